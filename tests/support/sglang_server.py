"""The SGLang test server, killed and restarted: python -m support.sglang_server MODEL PORT [DEATH ...].

A DEATH is PATH:NTH. The NTH request for PATH kills the server after it was received and before it is answered. After a
while the next server listens on the same port with the model's original weights. The last server stays.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer

from support.sglang_double import SglangDouble

AWAY_S = 4.0  # long enough that waiting clients report it


def serve(double: SglangDouble, port: int, path: str, nth: int) -> None:
    asked: Counter[str] = Counter()

    @web.middleware
    async def dying(request: web.Request, handler: Any) -> web.StreamResponse:
        asked[request.path] += 1
        if request.path == path and asked[path] == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return await handler(request)

    app = double.app()
    app.middlewares.append(dying)
    web.run_app(app, host="127.0.0.1", port=port, print=None)


def main(folder: str, port: int, deaths: list[str]) -> None:
    torch.set_num_threads(1)  # a fork has no other threads
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for death in deaths:
        if not (child := os.fork()):
            path, _, nth = death.rpartition(":")
            serve(SglangDouble(model, tokenizer, folder, 128), port, path, int(nth))
        _, status = os.waitpid(child, 0)
        print(death if os.WIFSIGNALED(status) else f"{death} ended by itself", flush=True)
        time.sleep(AWAY_S)
    serve(SglangDouble(model, tokenizer, folder, 128), port, "", 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
