"""Which models a request may name: the one served, the version of it that is served now, an adapter, a rollout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shoal.server.asked import BadRequest, UnknownModel
from shoal.server.sessions import Session


class Names:
    """`adapter` is one that a person loaded by name; then the model alone cannot be had."""

    def __init__(self, model: str, version: Callable[[], int]) -> None:
        self.model = model
        self.adapter: str | None = None
        self.sessions: dict[str, Session] = {}
        self._version = version

    @property
    def pinned(self) -> str:
        """The name of exactly this version."""
        return f"{self.model}-v{self._version()}"

    def find(self, name: Any) -> Session | None:
        """Whose request it is, if a rollout's. Raises for a name that is not served."""
        if name is not None and not isinstance(name, str):
            raise BadRequest("model must be a text", "model")
        if name and name in self.sessions:
            return self.sessions[name]
        if self.adapter is not None and name != self.adapter:
            if not name or name in (self.model, self.pinned):
                raise BadRequest(
                    f"the adapter {self.adapter!r} is loaded and one set of weights is served at a time "
                    f"(infer.max_loras 1); ask for model {self.adapter!r}, or unload it",
                    "model",
                )
            raise self._unknown(name)
        if name and name not in (self.model, self.pinned, self.adapter):
            raise self._unknown(name)
        return None

    def _unknown(self, name: str) -> UnknownModel:
        return UnknownModel(f"there is no model {name[:80]!r} here; there is {self.listed()[0]!r}", "model")

    def listed(self) -> list[str]:
        return [self.adapter] if self.adapter is not None else [self.model, self.pinned]

    def as_openai(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._described(name) for name in self.listed()]}

    def one(self, name: str) -> dict[str, Any]:
        if name not in self.listed():
            raise self._unknown(name)
        return self._described(name)

    def _described(self, name: str) -> dict[str, Any]:
        parent = {} if name == self.model else {"parent": self.model}
        return {"id": name, "object": "model", "created": 0, "owned_by": "shoal", **parent}
