"""Asks a server (vLLM and compatible ones) for the log-probs of given tokens, for `train.teacher.url`.

The token ids are sent as the prompt of /v1/completions with `prompt_logprobs`. The server must use the tokenizer of the
policy: the text of each token in the first answer is compared.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

from shoal.config.train import TeacherConfig
from shoal.core.errors import ConfigError, EngineError
from shoal.rollout.remote.client import Address, HttpClient, RequestRefused, Waiting

CONCURRENT = 32  # requests
CONNECT_LIMIT_S = 10.0
TokenText = Callable[[int], str]


class PromptScorer:
    """Log-probs at temperature 1, one per token; the first token has none and gets 0."""

    def __init__(
        self, teacher: TeacherConfig, token_text: TokenText, deadline_s: float, waiting: Waiting = lambda _: None
    ) -> None:
        assert teacher.url is not None
        key = os.environ.get(teacher.api_key_var) if teacher.api_key_var else None
        if teacher.api_key_var and not key:
            raise ConfigError(f"train.teacher.api_key_var: the environment variable {teacher.api_key_var} is not set")
        base = teacher.url.rstrip("/").removesuffix("/v1") + "/v1"
        _check_listening(base)
        self._address = Address(
            base,
            key,
            deadline_s,
            deadline_s,
            name="the teacher",
            kind="an OpenAI-compatible server",
            start="start the server",
            url_key="train.teacher.url",
            api_key="train.teacher.api_key_var",
        )
        self._waiting = waiting
        self._model = teacher.served_model
        self._token_text = token_text
        self._deadline_s = deadline_s
        self._checked = False

    async def __call__(self, sequences: Sequence[list[int]]) -> list[list[float]]:
        client = HttpClient(self._address, self._waiting)
        limit = asyncio.Semaphore(CONCURRENT)

        async def score(ids: list[int]) -> list[float]:
            async with limit:
                return await self._score(client, ids)

        try:
            if self._model is None:
                self._model = await self._only_model(client)
            return list(await asyncio.gather(*map(score, sequences)))
        finally:
            await client.close()

    async def _only_model(self, client: HttpClient) -> str:
        answer, _ = await client.until_up(lambda: client.get("/v1/models"))
        names = [str(entry.get("id")) for entry in answer.get("data", [])]
        if len(names) != 1:
            raise ConfigError(f"train.teacher.served_model: {client.name} serves {', '.join(names)}; name one of them")
        return names[0]

    async def _score(self, client: HttpClient, ids: list[int]) -> list[float]:
        body: dict[str, Any] = {
            "model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0,
        }  # fmt: skip
        try:
            answer, _ = await client.until_up(lambda: client.post("/v1/completions", body, self._deadline_s))
        except RequestRefused as error:
            raise ConfigError(f"train.teacher.url: {client.name} refused to score tokens: {error}") from error
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
        except (KeyError, IndexError, TypeError):
            entries = None
        if not isinstance(entries, list) or len(entries) != len(ids):
            found = f"{len(entries)} prompt_logprobs" if isinstance(entries, list) else "no prompt_logprobs"
            raise ConfigError(f"train.teacher.url: {client.name} returned {found} for {len(ids)} tokens; use vLLM")
        try:
            return [0.0, *(self._read(entry, token) for entry, token in zip(entries[1:], ids[1:], strict=True))]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(f"the answer of {client.name} cannot be read: {error!r}") from error
        finally:
            self._checked = True

    def _read(self, entry: dict[str, Any], token: int) -> float:
        """The entry of a position: token id → log-prob and text, for the token of the prompt and possibly others."""
        found = entry[str(token)]
        text = found.get("decoded_token")
        if not self._checked and text is not None and text.strip() and "\ufffd" not in text:
            ours = self._token_text(token)
            if ours.strip() != text.strip():
                raise ConfigError(
                    f"train.teacher.url: the teacher has another tokenizer than train.model: token {token} is "
                    f"{text!r} there and {ours!r} here"
                )
        return float(found["logprob"])


def _check_listening(base: str) -> None:
    """Before the first step: a wrong address should not be noticed only after the first rollouts."""
    url = urlsplit(base)
    address = (url.hostname or "", url.port or (443 if url.scheme == "https" else 80))
    try:
        socket.create_connection(address, CONNECT_LIMIT_S).close()
    except OSError as error:
        raise EngineError(
            f"train.teacher.url: no server can be reached at {base}: {error.strerror or error}; start the server, or "
            "correct the address"
        ) from error
