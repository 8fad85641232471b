"""A judge or reward model over HTTP. It runs in the reward workers like any reward.

With `model`, the URL is an OpenAI-compatible chat endpoint, which is prompted for a number. Without it, the URL is a
service that receives {"messages", "data"} and returns {"score"}. A failure after all retries is an error, never a 0.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.types import Message, Task
from shoal.rewards.numeric import last_number, parse_number
from shoal.rewards.outcome import answer_of

INSTRUCTION = (
    "Rate the answer below from 0 (useless) to {best} (perfect). Reply with the number alone.\n\n"
    "Question:\n{question}\n\nReference:\n{reference}\n\nAnswer:\n{answer}"
)
RETRIED = (408, 425, 429, 500, 502, 503, 504)
FIRST_PAUSE_S = 0.1


class JudgeError(RuntimeError):
    """The judge is unavailable or did not return a number."""


class HttpJudge:
    """`HttpJudge("http://host/v1/chat/completions", model="judge")(task, messages)` → a number from 0 to 1."""

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        instruction: str = INSTRUCTION,
        best: float = 10.0,
        api_key_var: str | None = None,
        timeout_s: float = 3.0,
        retries: int = 2,
    ) -> None:
        if not str(url).startswith(("http://", "https://")):
            raise ConfigError(f"judge: url {url!r} is not a URL; write http://host:port/path")
        if timeout_s <= 0 or retries < 0 or best <= 0:
            raise ConfigError("judge: timeout_s and best must be above 0, retries at least 0")
        self._url, self._model, self._instruction, self._best = url, model, instruction, best
        self._timeout_s, self._retries = timeout_s, retries
        self._api_key_var = api_key_var
        self.keep_env = (api_key_var,) if api_key_var else ()  # reward workers lose all other secrets

    async def __call__(self, task: Task, messages: Sequence[Message]) -> float:
        reply = await self._post(self._body(task, messages))
        return self._read(reply)

    def prepare(self) -> None:
        import aiohttp  # noqa: F401  (once for all workers)

    def _body(self, task: Task, messages: Sequence[Message]) -> dict[str, Any]:
        if self._model is None:
            return {"messages": list(messages), "data": task.data}
        question = "\n".join(str(m.get("content") or "") for m in task.messages if m.get("role") != "system")
        text = self._instruction
        for name, value in {
            "best": f"{self._best:g}", "question": question, "reference": str(task.data.get("answer", "none")),
            "answer": answer_of(messages),
        }.items():  # fmt: skip
            text = text.replace(f"{{{name}}}", value)  # not str.format: instructions may contain braces
        return {"model": self._model, "messages": [{"role": "user", "content": text}], "temperature": 0}

    async def _post(self, body: dict[str, Any]) -> Any:
        import aiohttp

        key = os.environ.get(self._api_key_var) if self._api_key_var else None
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        problem = "no attempt was made"
        async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
            for attempt in range(self._retries + 1):
                if attempt:
                    await asyncio.sleep(FIRST_PAUSE_S * 2 ** (attempt - 1))
                try:
                    async with session.post(self._url, json=body) as response:
                        if response.status == 200:
                            return await response.json(content_type=None)
                        problem = f"status {response.status}"
                        if response.status not in RETRIED:
                            break
                except TimeoutError:
                    problem = f"no reply within {self._timeout_s:g} s"
                except (aiohttp.ClientError, ValueError) as error:
                    problem = f"{type(error).__name__}: {error}"
        raise JudgeError(f"the judge at {self._url} failed: {problem}")

    def _read(self, reply: Any) -> float:
        try:
            if self._model is None:
                return float(reply["score"])
            text = str(reply["choices"][0]["message"]["content"])
        except (KeyError, IndexError, TypeError, ValueError):
            raise JudgeError("the judge's reply has no score") from None
        found = last_number(text)
        number = parse_number(found) if found is not None else None
        if number is None or not 0 <= number <= self._best:
            raise JudgeError(f"the judge replied {text[:80]!r}, not a number from 0 to {self._best:g}")
        return float(number) / self._best
