"""Invalid sampler answers of vLLM and SGLang, from a real test server: refused and never trained."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.core.errors import EngineError
from shoal.rollout.remote.engine import RemoteEngine
from shoal.rollout.remote.server_info import RemoteSettings
from shoal.rollout.remote.sglang import SglangRolloutEngine
from shoal.rollout.remote.vllm import VllmRolloutEngine
from support.engines import ask
from support.ports import free_port

ANSWER: dict[str, Any] = {"ids": [7, 8, 9], "logprobs": [-0.5, -1.0, -0.25], "reason": "length", "versions": [[0, 3]]}


def of_vllm(ids: Any, logprobs: Any, reason: Any, versions: Any) -> dict[str, Any]:
    content = [{"logprob": value} for value in logprobs] if logprobs is not None else None
    spans = [{"start": start, "end": end, "version": "0"} for start, end in versions]
    choice = {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason, "weight_versions": spans}
    return {"choices": [choice]}


def of_sglang(ids: Any, logprobs: Any, reason: Any, versions: Any) -> dict[str, Any]:
    drawn = [[value, i, None] for value, i in zip(logprobs, ids, strict=False)] if logprobs is not None else None
    spans = [{"start": start, "end": end, "version": "0"} for start, end in versions]
    about = {"output_token_logprobs": drawn, "finish_reason": {"type": reason}, "weight_versions": spans}
    return {"meta_info": about}


ENGINES = {"vllm": (VllmRolloutEngine, of_vllm), "sglang": (SglangRolloutEngine, of_sglang)}
WRONG = {
    "an id over the vocabulary": ({"ids": [7, 8, 50]}, "not one of 0 to 49"),
    "a negative id": ({"ids": [7, -8, 9]}, "not one of 0 to 49"),
    "a positive log-prob": ({"logprobs": [-0.5, 0.5, -1.0]}, "positive or not finite"),
    "too many tokens": ({"ids": [7] * 9, "logprobs": [-1.0] * 9, "versions": [[0, 9]]}, "8 were requested"),
    "another end": ({"reason": "tired"}, "finish_reason is 'tired'"),
    "no log-probs": ({"logprobs": None}, r"cannot be read|3 tokens but 0 log-probs"),
    "one log-prob missing": ({"logprobs": [-0.5, None, -1.0]}, r"cannot be read|positive or not finite"),
    "versions of fewer tokens": ({"versions": [[0, 2]]}, "versions do not cover 3 tokens"),
    "versions that go back": ({"versions": [[0, 5], [5, 3]]}, "versions do not cover 3 tokens"),
}


async def ask_one_that_says(engine: type[RemoteEngine], answer: Any, scratch: Path) -> Any:
    async def say(_: web.Request) -> web.Response:
        return web.json_response(answer)

    app = web.Application()
    app.router.add_post("/{path:.*}", say)
    runner, port = web.AppRunner(app), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    asked = engine(RemoteSettings(f"http://127.0.0.1:{port}", "m", 64, 50, (2,), str, scratch))
    try:
        request = ask("r", [1, 2, 3], max_tokens=8)
        return asked.reading.completion(request, await asked.complete(request, 8, None), 0, asked.name)
    finally:
        await asked.close()
        await runner.cleanup()


@pytest.mark.parametrize("name", ENGINES)
def test_valid_answer_is_accepted(name: str, tmp_path: Path) -> None:
    engine, said = ENGINES[name]
    drawn = asyncio.run(ask_one_that_says(engine, said(**ANSWER), tmp_path))
    assert (drawn.token_ids, drawn.logprobs) == ([7, 8, 9], [-0.5, -1.0, -0.25])


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_answer_is_rejected(name: str, wrong: str, tmp_path: Path) -> None:
    (engine, said), (changes, says) = ENGINES[name], WRONG[wrong]
    with pytest.raises(EngineError, match=says):
        asyncio.run(ask_one_that_says(engine, said(**{**ANSWER, **changes}), tmp_path))


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize(
    "answer", [{}, {"choices": []}, {"choices": [7]}, {"choices": None}, {"meta_info": 7}], ids=str
)
def test_model_of_another_shape_is_refused(name: str, answer: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="answer to r cannot be read"):
        asyncio.run(ask_one_that_says(ENGINES[name][0], answer, tmp_path))
