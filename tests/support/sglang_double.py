"""A test server with SGLang's published API (io_struct.py, http_server.py, its documentation).

It is not SGLang: a plain transformers model answers on the routes that Shoal uses, one token per forward pass, with
SGLang's names, defaults and answer formats. No real SGLang was run. The documentation marks facts that only this
server shows.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from aiohttp import web
from peft import PeftModel
from safetensors.torch import load_file

SAMPLING = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "sampling_seed",
}  # fmt: skip
PAUSE_MODES = ("abort", "retract", "in_place")


class SglangDouble:
    def __init__(self, model: Any, tokenizer: Any, path: str, context_tokens: int, **server: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.context_tokens = context_tokens
        self.server = {
            "context_length": context_tokens, "enable_lora": True, "max_lora_rank": 8,
            "enable_deterministic_inference": True, "model_path": path, **server,
        }  # fmt: skip
        self.version = "default"
        self.adapters: dict[str, Any] = {}
        self.flushes = 0
        self.drawn_tokens = 0
        self._going = asyncio.Event()
        self._going.set()
        self._dice = np.random.default_rng(1)

    def app(self) -> web.Application:
        app = web.Application()
        post = ("generate", "update_weights_from_disk", "pause_generation", "continue_generation")
        post = (*post, "load_lora_adapter", "unload_lora_adapter")
        app.add_routes([web.post(f"/{name}", self._handler(name)) for name in post])
        get = {"/health": "health", "/v1/models": "models", "/model_info": "model_info", "/server_info": "server_info"}
        app.add_routes([web.get(route, self._handler(name)) for route, name in get.items()])
        return app

    def _handler(self, name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Looked up at request time, so that a test can replace it."""

        async def answer(request: web.Request) -> web.Response:
            return await getattr(self, name)(request)

        return answer

    # What it reports about itself

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def models(self, _: web.Request) -> web.Response:
        names = [self.server["model_path"], *self.adapters]
        cards = [{"id": name, "object": "model", "root": name, "max_model_len": self.context_tokens} for name in names]
        return web.json_response({"object": "list", "data": cards})

    async def model_info(self, _: web.Request) -> web.Response:
        path = self.server["model_path"]
        about = {"model_path": path, "tokenizer_path": path, "is_generation": True, "weight_version": self.version}
        return web.json_response(about)

    async def server_info(self, _: web.Request) -> web.Response:
        return web.json_response(self.server)

    # Sampling

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        sampling, ids = body.get("sampling_params") or {}, body["input_ids"]
        unknown = set(sampling) - SAMPLING
        if unknown:
            return _refuse(f"Unexpected keyword argument {sorted(unknown)[0]!r}")
        if len(ids) >= self.context_tokens:
            return _refuse(f"The input ({len(ids)} tokens) is longer than the model's context length")
        name = body.get("lora_path")
        if name is not None and name not in self.adapters:
            return _refuse(f"Got LoRA adapter that has never been loaded: {name}")
        drawn = _Drawn(sampling, self.adapters[name] if name is not None else None)
        limit = min(int(sampling.get("max_new_tokens", 128)), self.context_tokens - len(ids))
        while drawn.finish is None:
            await self._going.wait()
            self._draw(drawn, ids, limit, int(body.get("top_logprobs_num") or 0))
            await asyncio.sleep(0)
        return web.json_response(drawn.answer(self.tokenizer, len(ids), self.version))

    @torch.no_grad()
    def _draw(self, drawn: _Drawn, prompt: list[int], limit: int, top: int) -> None:
        sampling, model = drawn.sampling, drawn.adapter or self.model
        logits = model(torch.tensor([prompt + drawn.ids])).logits[0, -1].double().numpy()
        temperature, top_k = float(sampling.get("temperature", 1.0)), int(sampling.get("top_k", -1))
        if temperature < 1e-6:  # SGLang's setting for greedy sampling
            temperature, top_k = 1.0, 1
        ends: set[int] = set(sampling.get("stop_token_ids") or ())
        if not sampling.get("ignore_eos", False):
            ends.add(self.tokenizer.eos_token_id)
        if len(drawn.ids) < int(sampling.get("min_new_tokens", 0)):
            logits[sorted(ends | {self.tokenizer.eos_token_id})] = -np.inf
        scaled = logits / temperature
        logprobs = scaled - np.logaddexp.reduce(scaled)
        token = int(np.argmax(self._kept(logprobs, sampling, top_k) + self._gumbel(drawn, len(logprobs))))
        drawn.take(token, logprobs, self.version, top)
        self.drawn_tokens += 1
        drawn.finish = self._finish(drawn, token, ends, limit)

    @staticmethod
    def _kept(logprobs: np.ndarray, sampling: dict[str, Any], top_k: int) -> np.ndarray:
        order = np.argsort(-logprobs)
        mass = np.cumsum(np.exp(logprobs[order])) - np.exp(logprobs[order])
        keep = mass < float(sampling.get("top_p", 1.0))
        keep &= np.exp(logprobs[order]) >= float(sampling.get("min_p", 0.0)) * np.exp(logprobs.max())
        if top_k > 0:
            keep[top_k:] = False
        kept = np.full_like(logprobs, -np.inf)
        kept[order[keep]] = logprobs[order[keep]]
        return kept

    def _gumbel(self, drawn: _Drawn, size: int) -> np.ndarray:
        """Seeds have an effect in deterministic mode only, and then by position, independent of the batch."""
        dice, seed = self._dice, drawn.sampling.get("sampling_seed")
        if self.server["enable_deterministic_inference"] and seed is not None:
            dice = np.random.Generator(np.random.Philox(key=[int(seed), len(drawn.ids)]))
        return dice.gumbel(size=size)

    def _finish(self, drawn: _Drawn, token: int, ends: set[int], limit: int) -> dict[str, Any] | None:
        if token in ends:
            return {"type": "stop", "matched": token}
        text = self.tokenizer.decode(drawn.ids, skip_special_tokens=True)
        stops = drawn.sampling.get("stop") or []
        for stop in [stops] if isinstance(stops, str) else stops:
            if stop in text:
                return {"type": "stop", "matched": stop}
        return {"type": "length", "length": limit} if len(drawn.ids) >= limit else None

    # Weights

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return _said(False, f"Failed to load weights: no safetensors in {body['model_path']}")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.model.load_state_dict(weights, strict=False)
        if body.get("weight_version") is not None:
            self.version = str(body["weight_version"])
        self.flushes += bool(body.get("flush_cache", True))
        return _said(True, "Succeeded to update model weights.")

    async def pause_generation(self, request: web.Request) -> web.Response:
        if (await request.json()).get("mode", "abort") not in PAUSE_MODES:
            return _refuse("mode must be abort, retract or in_place")
        self._going.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, _: web.Request) -> web.Response:
        self._going.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def load_lora_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        name, path = body["lora_name"], Path(body["lora_path"])
        rank = json.loads((path / "adapter_config.json").read_text("utf-8"))["r"]
        if name in self.adapters:
            return _said(False, f"LoRA adapter {name} is already loaded.")
        if rank > self.server["max_lora_rank"]:
            return _said(False, f"LoRA rank {rank} exceeds max_lora_rank {self.server['max_lora_rank']}")
        self.adapters[name] = PeftModel.from_pretrained(copy.deepcopy(self.model), str(path)).merge_and_unload()  # type: ignore[operator]
        return _said(True, "")

    async def unload_lora_adapter(self, request: web.Request) -> web.Response:
        name = (await request.json())["lora_name"]
        if self.adapters.pop(name, None) is None:
            return _said(False, f"LoRA adapter {name} is not loaded.")
        return _said(True, "")


class _Drawn:
    """A request in progress."""

    def __init__(self, sampling: dict[str, Any], adapter: Any) -> None:
        self.sampling = sampling
        self.adapter = adapter
        self.ids: list[int] = []
        self.logprobs: list[list[Any]] = []
        self.top: list[list[list[Any]]] = []
        self.versions: list[str] = []
        self.finish: dict[str, Any] | None = None

    def take(self, token: int, logprobs: np.ndarray, version: str, top: int) -> None:
        self.ids.append(token)
        self.versions.append(version)
        self.logprobs.append([float(logprobs[token]), token, None])
        self.top.append([[float(logprobs[i]), int(i), None] for i in np.argsort(-logprobs)[:top]])

    def answer(self, tokenizer: Any, prompt_tokens: int, version: str) -> dict[str, Any]:
        text = tokenizer.decode(self.ids, skip_special_tokens=True)
        matched = (self.finish or {}).get("matched")
        if isinstance(matched, str):
            text = text[: text.index(matched)]
        edges = [i for i, name in enumerate(self.versions) if i == 0 or name != self.versions[i - 1]]
        spans = [
            {"version": self.versions[start], "start": start, "end": end}
            for start, end in zip(edges, [*edges[1:], len(self.ids)], strict=True)
        ]
        about = {
            "finish_reason": self.finish, "prompt_tokens": prompt_tokens, "completion_tokens": len(self.ids),
            "weight_version": version, "weight_versions": spans, "output_token_logprobs": self.logprobs,
            "output_top_logprobs": self.top,
        }  # fmt: skip
        return {"text": text, "output_ids": self.ids, "meta_info": about}


def _said(success: bool, message: str) -> web.Response:
    return web.json_response({"success": success, "message": message}, status=200 if success else 400)


def _refuse(message: str) -> web.Response:
    return web.json_response({"error": {"message": message}}, status=400)
