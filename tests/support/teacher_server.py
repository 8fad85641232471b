"""A server that scores tokens like vLLM (/v1/completions with prompt_logprobs), with transformers alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from json import dumps, loads
from pathlib import Path
from typing import Any


@contextmanager
def teacher_server(folder: Path, scores: bool = True, requests: int | None = None) -> Iterator[str]:
    """The address. Without `scores` it omits prompt_logprobs, as most OpenAI-compatible servers do.

    After `requests` requests it ends.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        with lock, torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        entries: list[Any] = [None]
        for at, token in enumerate(ids[1:]):
            text = tokenizer.decode([token])
            entries.append({str(token): {"logprob": float(logprobs[at, token]), "rank": 1, "decoded_token": text}})
        return {"choices": [{"text": "", "prompt_logprobs": entries if scores else None}]}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply({"data": [{"id": "teacher"}]})

        def do_POST(self) -> None:
            if requests is not None and next(count) >= requests:
                threading.Thread(target=end, daemon=True).start()
                self.close_connection = True
                return
            self._reply(answer(loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _reply(self, value: dict[str, Any]) -> None:
            data = dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    count = itertools.count()

    def end() -> None:
        server.shutdown()
        server.server_close()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        end()
