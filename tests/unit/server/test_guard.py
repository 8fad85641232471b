"""Access control on every route, known or not: key, token, Host and Origin, body size, concurrency."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from shoal.models.chat import Chat
from shoal.server.access import Access, Listener, bind
from shoal.server.app import Routes, make_app
from shoal.server.completions import Completions, ServedModel
from shoal.server.control import Control, Names
from support.models import TOKENIZER
from support.scripted import ScriptedEngine

KEY = "sesame-open-42"
TOKEN = "of-this-run-17"
STEERING = {
    ("GET", "/shoal/about"),
    ("GET", "/shoal/version"),
    ("POST", "/shoal/load"),
    ("POST", "/shoal/pause"),
    ("POST", "/shoal/resume"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
}
UNKNOWN = [("GET", "/"), ("GET", "/docs"), ("DELETE", "/v1/models"), ("POST", "/health")]
Ask = Callable[..., Awaitable[tuple[int, Any]]]


def parts() -> tuple[Completions, Names, Control]:
    engine: Any = ScriptedEngine(lambda _: ("hi", "stop"))
    names = Names("fish", lambda: engine.version)
    return Completions(ServedModel(engine, Chat(TOKENIZER), "fish", 200)), names, Control(engine, names, {})


def every_route() -> list[tuple[str, str]]:
    routes = Routes(*parts(), failed=lambda _: None)
    named = [("GET", path) for path in routes.gets] + [("POST", path) for path in routes.posts]
    return [*((method, path.replace("{name:path}", "fish")) for method, path in named), *UNKNOWN]


def guarded(work: Callable[[Ask], Awaitable[None]], **access: Any) -> None:
    async def run() -> None:
        listener = Listener(make_app(*parts(), access=Access(**access)), bind("127.0.0.1", 0))
        await listener.start()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as http:

            async def ask(method: str, path: str, **options: Any) -> tuple[int, Any]:
                url = f"http://127.0.0.1:{listener.port}{path}"
                async with http.request(method, url, **options) as reply:
                    return reply.status, await (reply.json() if "json" in reply.content_type else reply.text())

            await work(ask)
        await listener.close()

    asyncio.run(run())


def test_routes_are_those_that_are_documented():
    assert len(every_route()) == 20 and ("POST", "/shoal/load") in every_route()


@pytest.mark.parametrize(
    "authorization", (None, "", KEY, "Bearer", "Bearer ", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x")
)
def test_every_route_is_denied_without_the_key(authorization: str | None):
    async def work(ask: Ask) -> None:
        headers = {} if authorization is None else {"Authorization": authorization}
        for method, path in every_route():
            status, reply = await ask(method, path, headers=headers)
            if (method, path) == ("GET", "/health"):
                assert status == 200
            else:
                assert (status, reply["error"]["code"]) == (401, "invalid_api_key"), (method, path)

    guarded(work, key=KEY)


def test_key_opens_every_route():
    async def work(ask: Ask) -> None:
        for method, path in every_route():
            status, _ = await ask(method, path, headers={"Authorization": f"Bearer {KEY}"}, json={})
            assert status in (200, 400, 404, 405), (method, path, status)

    guarded(work, key=KEY)


def test_openapi_document_describes_every_route():
    async def work(ask: Ask) -> None:
        status, document = await ask("GET", "/openapi.json")
        assert status == 200 and document["openapi"].startswith("3.")
        published = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
        named = {(method, path) for method, path in every_route() if (method, path) not in UNKNOWN}
        assert published == {(method, path.replace("models/fish", "models/{name}")) for method, path in named}
        schemas = document["components"]["schemas"]
        assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) <= schemas.keys()
        body = document["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        schema = schemas[body["$ref"].rpartition("/")[2]]
        assert schema["required"] == ["prompt"] and schema["additionalProperties"] is False
        assert {"temperature", "max_tokens", "chat_template_kwargs"} <= schemas["ChatBody"]["properties"].keys()

    guarded(work)


@pytest.mark.parametrize("token", (TOKEN, None), ids=("with a token", "without any"))
def test_control_routes_use_the_token_without_a_key(token: str | None):
    """On loopback every user of the machine may sample, but only the token gives control."""

    async def work(ask: Ask) -> None:
        for authorization in (None, "", "Bearer", "Bearer ", f"Bearer {TOKEN}x", f"Basic {TOKEN}", "Bearer any"):
            headers = {} if authorization is None else {"Authorization": authorization}
            for method, path in every_route():
                status, reply = await ask(method, path, headers=headers, json={})
                if (method, path) in STEERING:
                    assert (status, reply["error"]["code"]) == (401, "invalid_token"), (method, path)
                    assert "handshake/infer.token" in reply["error"]["message"]
                else:
                    assert status in (200, 400, 404, 405), (method, path, status)
        for method, path in STEERING:
            status, _ = await ask(method, path, headers={"Authorization": f"Bearer {TOKEN}"}, json={})
            assert status == 401 if token is None else status in (200, 400, 404), (method, path, status)

    assert set(every_route()) >= STEERING
    guarded(work, token=token)


def test_control_routes_use_the_key_if_set():
    async def work(ask: Ask) -> None:
        for method, path in STEERING:
            assert (await ask(method, path, headers={"Authorization": f"Bearer {TOKEN}"}, json={}))[0] == 401
        assert (await ask("POST", "/shoal/pause", headers={"Authorization": f"Bearer {KEY}"}))[0] == 200

    guarded(work, key=KEY, token=TOKEN)


def test_only_names_of_this_machine_are_answered_on_loopback():
    """DNS rebinding: a foreign name may resolve to 127.0.0.1."""

    async def work(ask: Ask) -> None:
        for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            for method, path in every_route():
                assert (await ask(method, path, headers={"Host": host}))[0] == 421, (host, path)
        for host in ("localhost", "localhost:99", "127.0.0.1", "[::1]:5", "LocalHost"):
            assert (await ask("GET", "/health", headers={"Host": host}))[0] == 200, host

    guarded(work)


def test_name_is_free_in_other_folders():
    async def work(ask: Ask) -> None:
        headers = {"Host": "inference.cluster", "Authorization": f"Bearer {KEY}"}
        assert (await ask("GET", "/v1/models", headers=headers))[0] == 200

    guarded(work, key=KEY, loopback=False)


def test_pages_of_other_origins_cannot_post():
    async def work(ask: Ask) -> None:
        for origin in (
            "https://evil.example",
            "null",
            "http://localhost.evil.example",
            "http://[",
            "http://[::1",
            "http://127.0.0.1:x",
        ):
            status, reply = await ask("POST", "/shoal/pause", headers={"Origin": origin})
            assert (status, reply["error"]["code"]) == (403, "wrong_origin")
        own = "127.0.0.1:8000"
        for origin in ("http://127.0.0.1", "http://127.0.0.1:8001", "https://127.0.0.1:8000", "http://localhost:8000"):
            assert (await ask("POST", "/shoal/pause", headers={"Host": own, "Origin": origin}))[0] == 403, origin
        for host, origin in (
            (own, f"http://{own}"),
            ("localhost", "http://localhost:80"),
            ("[::1]:5", "http://[::1]:5"),
        ):
            headers = {"Host": host, "Origin": origin, "Authorization": f"Bearer {TOKEN}"}
            assert (await ask("POST", "/shoal/pause", headers=headers))[0] == 200, origin

    guarded(work, token=TOKEN, clients=2)  # rejected requests are not counted afterwards


def test_large_body_is_refused_with_and_without_content_length():
    async def pieces():
        for _ in range(40):
            yield b"x" * 100

    async def work(ask: Ask) -> None:
        for data in (b"x" * 2000, pieces()):
            status, reply = await ask("POST", "/v1/completions", data=data)
            assert (status, reply["error"]["message"]) == (413, "the body is larger than 1000 bytes")
        assert (await ask("POST", "/tokenize", json={"prompt": "hi"}))[0] == 200

    guarded(work, body_bytes=1000)


def test_clients_are_counted():
    async def work(ask: Ask) -> None:
        assert (await ask("GET", "/health"))[0] == 200
        statuses = [status for status, _ in await asyncio.gather(*(ask("GET", "/v1/models") for _ in range(30)))]
        assert set(statuses) <= {200, 503} and 200 in statuses
        assert (await ask("GET", "/v1/models"))[0] == 200, "rejected requests are not counted afterwards"

    guarded(work, clients=1)


def test_endless_request_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shoal.server.access.BODY_LIMIT_S", 0.2)

    async def slowly():
        while True:
            yield b" "
            await asyncio.sleep(0.05)

    async def work(ask: Ask) -> None:
        status, reply = await asyncio.wait_for(ask("POST", "/v1/completions", data=slowly()), 10)
        assert (status, reply["error"]["code"]) == (408, "timeout")

    guarded(work)
