"""Requests generated from the published OpenAPI document (schemathesis), and arbitrary bodies, to a real server.

No request may end in a server error, stop the server or bypass the token. Examples are fixed and bounded.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.models.chat import Chat
from shoal.server.access import Access, Listener, bind
from shoal.server.app import make_app
from shoal.server.completions import Completions, ServedModel
from shoal.server.control import Control, Names
from support.models import TOKENIZER
from support.scripted import ScriptedEngine

TOKEN = "the-token"
EXAMPLES = 15  # per operation
bounded = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
Send = Callable[..., tuple[int, bytes]]


@contextmanager
def served() -> Iterator[int]:
    """The port of a server in a thread of its own."""
    loop, started, port = asyncio.new_event_loop(), threading.Event(), []

    async def serve() -> None:
        engine: Any = ScriptedEngine(lambda _: ("hi", "stop"))
        names = Names("fish", lambda: engine.version)
        completions = Completions(ServedModel(engine, Chat(TOKENIZER), "fish", 64))
        listener = Listener(
            make_app(completions, names, Control(engine, names, {}), Access(token=TOKEN)), bind("127.0.0.1", 0)
        )
        await listener.start()
        port.append(listener.port)
        started.set()
        await ended.wait()
        await listener.close()

    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(30)
    yield port[0]
    loop.call_soon_threadsafe(ended.set)
    thread.join(30)


@pytest.fixture(scope="module")
def send() -> Iterator[Send]:
    with served() as port:

        def request(method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, bytes]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
            try:
                connection.request(method, path, body, {"Content-Type": "application/json", **headers})
                reply = connection.getresponse()
                return reply.status, reply.read()
            finally:
                connection.close()

        yield request
        assert request("GET", "/health")[0] == 200


def document() -> dict[str, Any]:
    with served() as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/openapi.json")
        return json.loads(connection.getresponse().read())


DOCUMENT = document()
SCHEMA: Any = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {
    f"{operation.ok().method.upper()} {operation.ok().path}": operation.ok()
    for operation in SCHEMA.get_all_operations()
}


def check(status: int, body: bytes) -> None:
    assert status < 500, (status, body[:500])
    if status >= 400 and body:
        assert json.loads(body)["error"]["message"]


def test_every_route_is_in_the_document():
    assert len(OPERATIONS) >= 14 and {"POST /v1/completions", "POST /shoal/load", "GET /health"} <= set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_requests_that_follow_the_schema(send: Send, name: str):
    operation = OPERATIONS[name]

    @bounded
    @given(operation.as_strategy())
    def run(case: Any) -> None:
        arguments = case.as_transport_kwargs()
        body = arguments.get("json")
        headers = {"Authorization": f"Bearer {TOKEN}"}
        path = str(case.formatted_path)
        content = json.dumps(body).encode() if operation.method.upper() == "POST" else None
        check(*send(operation.method.upper(), path, content, **headers))

    run()


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


def keys_of(path: str) -> list[str]:
    text = json.dumps(DOCUMENT["paths"][path]["post"])
    names = {part.rsplit("/", 1)[-1] for part in text.split('"') if part.startswith("#/components/schemas/")}
    found = {key for name in names for key in DOCUMENT["components"]["schemas"][name].get("properties", {})}
    return sorted(found) or ["a"]


POSTS = [path for path, methods in DOCUMENT["paths"].items() if "post" in methods]


@pytest.mark.parametrize("path", POSTS)
def test_bodies_with_known_keys_and_any_values(send: Send, path: str):
    @bounded
    @given(st.dictionaries(st.sampled_from(keys_of(path)), anything, max_size=5))
    def run(body: dict[str, Any]) -> None:
        check(*send("POST", path, json.dumps(body).encode(), Authorization=f"Bearer {TOKEN}"))

    run()


@bounded
@given(st.sampled_from(POSTS), st.binary(max_size=80))
def test_bodies_that_are_any_bytes(send: Send, path: str, body: bytes):
    status, answer = send("POST", path, body, Authorization=f"Bearer {TOKEN}")
    check(status, answer)


CONTROL = [path for path in DOCUMENT["paths"] if path.startswith("/shoal/") or path.endswith("_adapter")]


@bounded
@given(st.sampled_from(CONTROL), st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS"]), st.text(max_size=20))
def test_no_control_route_answers_without_the_token(send: Send, path: str, method: str, token: str):
    given_token = "".join(c for c in token if " " < c < "\x7f" or c == " ")
    status, _ = send(method, path, b"{}", Authorization=f"Bearer {given_token}")
    assert status == 401 or given_token.strip() == TOKEN
