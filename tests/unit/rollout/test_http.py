"""The engine over HTTP: lost connections, restarts, invalid answers. test_http_bits.py compares bits."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from shoal.core.errors import ConfigError, DeadlineError, EngineError
from shoal.rollout.remote.client import Address, ConnectionLost, HttpClient, ServerUnreachable, Unreachable
from shoal.rollout.remote.shoal import HttpRolloutEngine
from shoal.runs.secrets import INCARNATION
from shoal.runs.weight_files import describe, version_hash
from support.engines import ask
from support.models import random_prompts

PROMPTS = random_prompts(5, 7, 30)
FACTS = {"incarnation": "one", "max_model_len": 64, "vocab_size": 50, "version": 0, "model": "fish", "paused": False}


def good(**changes: Any) -> dict[str, Any]:
    """An answer of three tokens."""
    choice = {
        "token_ids": [7, 8, 9],
        "logprobs": {"token_logprobs": [-0.5, -1, -0.25]},
        "text": "abc",
        "shoal": {"spans": [[0, 3, 0]], "kept_ids": None, "finish_reason": "length"},
    }
    return {"choices": [{**choice, **changes}]}


def exactly(**changes: Any) -> dict[str, Any]:
    return good(shoal={**good()["choices"][0]["shoal"], **changes})


class Double:
    """Gives the set answers, one after the other. None breaks the connection."""

    def __init__(self, answers: list[Any], facts: Mapping[str, Any] | None = None) -> None:
        self.answers = answers
        self.facts = dict(facts or FACTS)
        self.asked: list[tuple[str, Any]] = []

    async def about(self, request: web.Request) -> web.Response:
        return web.json_response(self.facts)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        said = self.answers.pop(0)
        if callable(said):
            said = said()
        if said is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        headers = {INCARNATION: self.facts["incarnation"]}
        if isinstance(said, web.Response):
            return said
        return web.json_response(said, headers=headers)

    @asynccontextmanager
    async def up(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/shoal/about", self.about)
        app.router.add_post("/{path:.*}", self.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()


def against(double: Double, work: Callable[[HttpRolloutEngine], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with double.up() as url:
            more = {name: options.pop(name) for name in ("request_s", "silent_s") if name in options}
            engine = HttpRolloutEngine(Address(url, deadline_s=2, **{"request_s": 5, **more}), **options)
            try:
                await asyncio.wait_for(work(engine), 20)
            finally:
                await engine.close()

    asyncio.run(run())


REQUEST = ask("r", [1, 2, 3], max_tokens=8)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (good(token_ids=[7, 8, 50]), "not one of 0 to 49"),
        (good(token_ids=[7, 8, "9"]), "not one of 0 to 49"),
        (good(token_ids=[7, 8]), "2 tokens but 3 log-probs"),
        (good(logprobs={"token_logprobs": [-0.5, None, -1]}), "missing or not finite"),
        (good(logprobs={"token_logprobs": [-0.5, 0.5, -1]}), "positive: 0.5"),
        (good(logprobs=None), "TypeError"),
        (exactly(spans=[[0, 2, 0]]), "do not cover 3 tokens"),
        (exactly(spans=[[0, 1, 0], [2, 3, 0]]), "do not cover 3 tokens"),
        (exactly(spans=[[0, 3, 4]]), "sampled with version 4, it should be 0"),
        (exactly(finish_reason="tired"), "finish_reason is 'tired'"),
        (exactly(kept_ids=[[7]]), "3 tokens but 1 kept sets"),
        (exactly(kept_ids=[[7], [1, 2], []]), "token 8 is not among those that were kept"),
        (exactly(kept_ids=[[], [~8], []]), "token 8 is not among those that were kept"),
        (exactly(kept_ids=[[7], [8], [9, 50]]), "a kept id is not one of the vocabulary"),
        (exactly(spans=[[0, 5, 0], [5, 3, 0]]), "do not cover 3 tokens"),
        (good(token_ids=[True, 8, 9]), "not one of 0 to 49"),
        (good(text=None), "its text is NoneType"),
        ({**good(), "prompt_token_ids": [3, 2, 1]}, "answers another prompt than the one that was sent"),
        (web.Response(text=json.dumps(good()).replace("-0.5", "-1e999")), "not JSON"),
        (web.Response(text=json.dumps(good()).replace("-0.5", "NaN")), "not JSON"),
        (web.Response(text="[" * 100_000), "not JSON"),
        (web.Response(text="[1]"), "with list, not an object"),
        (good(token_ids=[7] * 9, logprobs={"token_logprobs": [-1.0] * 9}), "9 tokens, 8 were requested"),
        ({"choices": []}, "not enough values"),
        ({"hello": 1}, "KeyError: 'choices'"),
        (
            web.Response(text="<html>welcome</html>", content_type="text/html"),
            "is not grpo-infer (it answered /v1/completions with a page, status 200)",
        ),
        (web.Response(text='{"choices": [{"tok', content_type="application/json"), "not JSON"),
        (web.Response(text='{"error": {"message": "no"}}', status=500), "(status 500): no"),
    ],
)
def test_invalid_sampler_answer_ends_the_run_and_names_the_server(answer: Any, says: str):
    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(EngineError) as caught:
            await engine.generate(REQUEST)
        assert says in str(caught.value) and "the inference server at http://127.0.0.1:" in str(caught.value)

    against(Double([answer]), work)


def test_valid_answer_is_returned_unchanged():
    async def work(engine: HttpRolloutEngine) -> None:
        answer = await engine.generate(REQUEST)
        assert (answer.request_id, answer.token_ids, answer.logprobs) == ("r", [7, 8, 9], [-0.5, -1.0, -0.25])

    double = Double([good()])
    against(double, work)
    ((path, body),) = double.asked
    assert path == "/v1/completions" and body["prompt"] == [1, 2, 3] and body["temperature"] == 1.0
    assert set(body) >= {"top_p", "top_k", "min_p", "max_tokens", "min_tokens", "seed", "stop", "stop_token_ids"}


def test_lost_connection_is_retried_until_a_deadline():
    async def once(engine: HttpRolloutEngine) -> None:
        assert (await engine.generate(REQUEST)).token_ids == [7, 8, 9]

    double = Double([None, None, good()])
    against(double, once)
    assert len(double.asked) == 3 and double.asked[0] == double.asked[2]

    async def for_ever(engine: HttpRolloutEngine) -> None:
        with pytest.raises(EngineError, match="is up but lost /v1/completions 5 times in a row"):
            await engine.generate(REQUEST)

    against(Double([None] * 9), for_ever)


def test_busy_server_is_retried():
    """429, in JSON or as a proxy's text, and a temporary 503: nothing is lost. A server that stays busy times out."""
    busy = [web.Response(text='{"error": {"message": "slow down"}}', status=429) for _ in range(3)]
    double = Double([*busy, web.Response(text="<p>slow down</p>", status=429), web.Response(status=503), good()])

    async def patient(engine: HttpRolloutEngine) -> None:
        assert (await engine.generate(REQUEST)).token_ids == [7, 8, 9]

    against(double, patient)
    assert len(double.asked) == 6

    class NeverFree(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            return web.Response(text='{"error": "slow down"}', status=429)

    async def given_up(engine: HttpRolloutEngine) -> None:
        with pytest.raises(DeadlineError, match=r"slow down for 2 s \(status 429\)"):
            await engine.generate(REQUEST)

    against(NeverFree([]), given_up)


def test_answers_match_their_requests_in_any_order():
    """Eight requests at once, answered in reverse order: each gets its own answer."""
    waiting: list[asyncio.Future[None]] = []

    class Reversing(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            body = await request.json()
            waiting.append(asyncio.get_running_loop().create_future())
            mine = waiting[-1]
            if len(waiting) == 8:
                waiting[-1].set_result(None)
            await mine
            following = waiting.index(mine) - 1
            reply = {**good(token_ids=body["prompt"]), "prompt_token_ids": body["prompt"]}
            if following >= 0:
                asyncio.get_running_loop().call_later(0.01, waiting[following].set_result, None)
            return web.json_response(reply, headers={INCARNATION: "one"})

    async def work(engine: HttpRolloutEngine) -> None:
        requests = [ask(str(i), [i, i + 1, i + 2], max_tokens=8) for i in range(8)]
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        assert [(a.request_id, a.token_ids) for a in answers] == [(r.request_id, r.prompt_ids) for r in requests]

    against(Reversing([]), work)


def test_connection_lost_within_a_response_is_retried():
    class Breaking(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            if self.answers:
                return await super().answer(request)
            self.answers.append(good())
            reply = web.StreamResponse(headers={INCARNATION: "one", "Content-Length": "400"})
            await reply.prepare(request)
            await reply.write(b'{"choices": [{"token_ids": [7, 8')
            assert request.transport is not None
            request.transport.abort()
            return reply

    async def work(engine: HttpRolloutEngine) -> None:
        assert (await engine.generate(REQUEST)).token_ids == [7, 8, 9]

    against(Breaking([]), work)


def test_missing_answer_has_a_deadline():
    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(DeadlineError, match=r"no answer to /v1/completions within 1 s; raise orch.client.timeout"):
            await engine.generate(REQUEST)

    class Slow(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(30)
            return web.Response()

    class Dripping(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            reply = web.StreamResponse()
            await reply.prepare(request)
            for _ in range(100):
                await reply.write(b" ")
                await asyncio.sleep(0.2)
            return reply

    for double in (Slow([]), Dripping([])):
        against(double, work, request_s=1.0)


def test_new_server_process_receives_weights_first(tmp_path: Path):
    """The server returns without the weights: it is loaded and paused as before, then the request is repeated."""
    (tmp_path / "a").write_bytes(b"fish")
    manifest = {**describe(tmp_path, 3, "full"), "sigma": 0.5}
    loaded = {"version": 3, "hash": version_hash(manifest)}
    double = Double([])

    def restart() -> None:
        double.facts["incarnation"] = "two"

    double.answers = [loaded, restart, loaded, exactly(spans=[[0, 3, 3]])]

    async def work(engine: HttpRolloutEngine) -> None:
        assert await engine.load(3, manifest) == loaded["hash"]
        assert (await engine.generate(REQUEST)).spans[0].version == 3

    against(double, work, noise_seed=9)
    paths = [path for path, _ in double.asked]
    assert paths == ["/shoal/load", "/v1/completions", "/shoal/load", "/v1/completions"]
    assert double.asked[0] == double.asked[2] and double.asked[2][1]["noise_seed"] == 9


def test_answer_from_other_weights_is_rejected(tmp_path: Path):
    """It restarted between two requests: its first answer uses the wrong weights."""
    double = Double([])

    def first_of_the_new_one() -> dict[str, Any]:
        double.facts["incarnation"] = "two"
        return good()

    double.answers = [
        {"version": 0, "hash": "h"},
        first_of_the_new_one,
        {"version": 0, "hash": "h"},
        good(text="right"),
    ]

    async def work(engine: HttpRolloutEngine) -> None:
        await engine.load(0)
        assert (await engine.generate(REQUEST)).text == "right"

    against(double, work)


@pytest.mark.parametrize(
    ("reply", "says"),
    [({"version": 2, "hash": "h"}, "serves version 2, not 3"), ({"version": 3, "hash": "h"}, "the hash differs")],
)
def test_load_of_other_weights_ends_the_run(reply: Any, says: str, tmp_path: Path):
    (tmp_path / "a").write_bytes(b"fish")

    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(EngineError, match=says):
            await engine.load(3, describe(tmp_path, 3, "full"))

    against(Double([reply]), work)


def test_connected_server_is_identified():
    async def other(engine: HttpRolloutEngine) -> None:
        with pytest.raises(EngineError, match="serves 'fish', not 'cat'"):
            await engine.describe()

    against(Double([]), other, model="cat")

    async def stranger(engine: HttpRolloutEngine) -> None:
        with pytest.raises(EngineError, match="does not say its incarnation; is it a Shoal server"):
            await engine.describe()

    against(Double([], {"hello": "world"}), stranger)


def test_unreachable_address():
    said: list[str | None] = []

    async def run() -> None:
        engine = HttpRolloutEngine(Address("http://127.0.0.1:9/v1", deadline_s=0.5), waiting=said.append)
        with pytest.raises(DeadlineError, match=r"waited 0 s for the inference server at http://127.0.0.1:9, since"):
            await engine.describe()
        assert (await engine.health())["ok"] is False
        await engine.close()
        wrong = HttpRolloutEngine(Address("nowhere", deadline_s=0.5))
        with pytest.raises(ConfigError, match=r"orch.client.base_url"):
            await wrong.describe()
        await wrong.close()

    asyncio.run(run())
    words = [text for text in said if text is not None]
    assert words == said, "nothing was found, so nothing is reported as present"
    assert words[0].startswith("waiting for the inference server at http://127.0.0.1:9 since")
    why, remedy = words[0].split(": ")[-1].split("; ")
    assert why == "nothing listens there", "without the exception's text"
    assert "orch.client.base_url" in remedy


@pytest.mark.parametrize(
    "text", ["<!DOCTYPE html><html>no such page</html>", '{"detail": "Not Found"}', "404 page not found", ""]
)
def test_another_server_at_the_address_is_named_as_such(text: str):
    """Not quoted: the text of a foreign server says nothing about the run."""

    class Foreign(Double):
        async def about(self, request: web.Request) -> web.Response:
            return web.Response(text=text, status=404)

    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(ConfigError) as caught:
            await engine.describe()
        said = str(caught.value)
        assert "is not grpo-infer (" in said and "status 404); check orch.client.base_url" in said
        assert "no such page" not in said and "ot found" not in said.lower()

    against(Foreign([]), work)


def test_closed_engine_sends_no_request():
    """A session that is opened then would never be closed, and aiohttp reports it."""

    async def work(engine: HttpRolloutEngine) -> None:
        await engine.describe()
        await engine.close()
        with pytest.raises(EngineError, match="is closed"):
            await engine.generate(REQUEST)

    against(Double([good()]), work)


def test_silently_replaced_process_is_detected(monkeypatch: pytest.MonkeyPatch):
    """The request hangs on a dead connection. The new process would answer it."""
    monkeypatch.setattr("shoal.rollout.remote.shoal.POLL_EVERY_S", 0.1)

    class Replaced(Double):
        async def answer(self, request: web.Request) -> web.StreamResponse:
            if self.facts["incarnation"] == "one":
                self.facts["incarnation"] = "two"
                await asyncio.sleep(30)
            return await super().answer(request)

    async def work(engine: HttpRolloutEngine) -> None:
        assert (await engine.generate(REQUEST)).token_ids == [7, 8, 9]

    against(Replaced([good()]), work, request_s=60)


def test_hanging_server_wait_is_reported_and_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.rollout.remote.shoal.POLL_EVERY_S", 0.1)
    monkeypatch.setattr("shoal.rollout.remote.shoal.PROBE_S", 0.2)
    said: list[str | None] = []

    class Hanging(Double):
        async def about(self, request: web.Request) -> web.Response:
            if self.asked:
                await asyncio.sleep(30)
            return await super().about(request)

        async def answer(self, request: web.Request) -> web.StreamResponse:
            self.asked.append((request.path, None))
            await asyncio.sleep(30)
            return web.Response()

    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(DeadlineError, match=r"waited 2 s for the inference server"):
            await asyncio.gather(*(engine.generate(REQUEST) for _ in range(3)))

    against(Hanging([]), work, request_s=60, waiting=said.append)
    assert any(text and "no answer to /shoal/about" in text for text in said)


def test_silent_server_is_polled_early(monkeypatch: pytest.MonkeyPatch):
    """A suspended process keeps its connections open. Its missing heartbeat reveals it."""
    monkeypatch.setattr("shoal.rollout.remote.shoal.SILENT_PROBE_S", 0.2)
    said: list[str | None] = []
    silent = False

    class Stopped(Double):
        async def about(self, request: web.Request) -> web.Response:
            while silent:
                await asyncio.sleep(0.01)
            return await super().about(request)

        async def answer(self, request: web.Request) -> web.StreamResponse:
            nonlocal silent
            silent = True
            while not any(said):
                await asyncio.sleep(0.01)
            silent = False
            return await super().answer(request)

    async def work(engine: HttpRolloutEngine) -> None:
        assert (await asyncio.wait_for(engine.generate(REQUEST), 5)).token_ids == [7, 8, 9]

    against(Stopped([good()]), work, request_s=60, waiting=said.append, silent_s=lambda: 100.0 * silent)
    assert said[0] is not None and "no answer to /shoal/about within 0 s" in said[0]
    began = datetime.strptime(re.findall(r"since (\d\d:\d\d:\d\d)", said[0])[0], "%H:%M:%S")
    assert 95 <= (datetime.now() - began).seconds <= 110, "since the last heartbeat"


def test_responsive_server_without_heartbeat_is_polled_rarely():
    """Its heartbeat may be broken: a folder that is not writable, or that shows files late."""
    looks: list[float] = []

    class Unseen(Double):
        async def about(self, request: web.Request) -> web.Response:
            looks.append(time.monotonic())
            return await super().about(request)

        async def answer(self, request: web.Request) -> web.StreamResponse:
            await asyncio.sleep(1.2)
            return await super().answer(request)

    async def work(engine: HttpRolloutEngine) -> None:
        assert (await engine.generate(REQUEST)).token_ids == [7, 8, 9]

    against(Unseen([good()]), work, request_s=60, silent_s=lambda: 100.0)
    assert 2 <= len(looks) <= 5, "to connect, and then twice a second"


def test_unreachable_address_is_reported_despite_server_state():
    """An unknown host name was reported as a server that is still loading."""
    address = Address("http://nowhere:1/v1", deadline_s=0.01, whereabouts=lambda: ("it loads", "wait"))

    async def reason(loss: ConnectionLost) -> str:
        async def probe() -> None:
            raise loss

        with pytest.raises(DeadlineError) as caught:
            await HttpClient(address).until_up(probe)
        return str(caught.value)

    assert asyncio.run(reason(ServerUnreachable("nothing listens there"))).endswith(": it loads; wait")
    unknown = asyncio.run(reason(Unreachable("the name of its host is not known")))
    assert "host is not known" in unknown and unknown.endswith("check orch.client.base_url") and "loads" not in unknown


def test_missing_key_is_named():
    async def work(engine: HttpRolloutEngine) -> None:
        with pytest.raises(ConfigError, match=r"requires a key: no; set orch.client.api_key_var"):
            await engine.generate(REQUEST)

    against(Double([web.Response(text='{"error": {"message": "no"}}', status=401)]), work)
