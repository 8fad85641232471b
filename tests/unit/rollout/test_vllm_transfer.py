"""The weight-transfer endpoints of vLLM, in the order and with the fields of its published protocol. No real transfer
is run.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from aiohttp import web

from shoal.rollout.remote.server_info import RemoteSettings
from shoal.rollout.remote.vllm import VllmRolloutEngine
from support.ports import free_port

MANIFEST = {
    "transport": "broadcast", "kind": "full", "address": "10.0.0.1:29500", "world": 3,
    "tensors": [{"name": "a.weight", "dtype": "bfloat16", "shape": [2, 3], "digest": ""}],
}  # fmt: skip


def test_server_phases_share_one_process_group(tmp_path: Path) -> None:
    received: list[tuple[str, Any]] = []

    async def hear(request: web.Request) -> web.Response:
        received.append((request.path_qs, await request.json()))
        return web.json_response({})

    async def main() -> None:
        app = web.Application()
        app.add_routes([web.post("/{path:.*}", hear)])
        runner, port = web.AppRunner(app), free_port()
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        engine = VllmRolloutEngine(RemoteSettings(f"http://127.0.0.1:{port}", "m", 64, 100, (2,), str, tmp_path))
        await engine.receive_weights(MANIFEST, 7)
        await engine.receive_weights({**MANIFEST, "address": "elsewhere:1"}, 8)
        await engine.close()
        await runner.cleanup()

    asyncio.run(main())
    meeting = {"master_address": "10.0.0.1", "master_port": 29500, "rank_offset": 1, "world_size": 3}
    update = {"names": ["a.weight"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}
    rounds = [
        [
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": update}),
            ("/finish_weight_update", {"weight_version": str(version)}),
            ("/reset_prefix_cache?reset_running_requests=true", {}),
        ]
        for version in (7, 8)
    ]
    assert received == [("/init_weight_transfer_engine", {"init_info": meeting}), *rounds[0], *rounds[1]]
