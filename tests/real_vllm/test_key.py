"""The routes that vLLM's key protects, and those that it does not."""

from __future__ import annotations

import json
import subprocess

import pytest

from support.engine_servers import vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
KEYED = """
import asyncio, json, sys
from vllm.entrypoints.serve.middleware.authenticate import AuthenticationMiddleware

async def status(path):
    sent = []
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
    async def send(message):
        sent.append(message)
    scope = {"type": "http", "method": "POST", "path": path, "headers": []}
    await AuthenticationMiddleware(app, ["key"])(scope, None, send)
    return sent[0]["status"]

print(json.dumps({path: asyncio.run(status(path)) for path in sys.argv[1:]}))
"""


def test_control_routes_do_not_use_the_vllm_key() -> None:
    """The warning in docs/vllm-and-sglang.md, checked with vLLM's own code and without a key."""
    guarded = ("/v1/models", "/v1/load_lora_adapter", "/inference/v1/generate")
    open_to_all = ("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version")
    open_to_all += ("/update_weights", "/server_info")
    command = [vllm_python(), "-c", KEYED, *guarded, *open_to_all]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {**dict.fromkeys(guarded, 401), **dict.fromkeys(open_to_all, 200)}
