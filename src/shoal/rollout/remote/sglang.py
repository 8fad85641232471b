"""The engine on an SGLang server, over its native HTTP API.

Written from the published API and tested with a test double (tests/support/sglang_double.py), not with a real server.
Noise on norms is rejected, because the API has no partial update from a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ConfigError, EngineError
from shoal.core.types import Request
from shoal.rollout.remote.client import RequestRefused
from shoal.rollout.remote.engine import RemoteEngine
from shoal.rollout.remote.server_api import common_sampling
from shoal.rollout.remote.server_info import PROBE_TOKENS, UNREADABLE, ParsedAnswer, ServerFacts

# SGLang ignores seeds without it, so a repeated request would give another result.
FLAGS = ("--enable-deterministic-inference",)
GENERATE = "/generate"


class SglangRolloutEngine(RemoteEngine):
    name = "SGLang"

    async def facts(self) -> ServerFacts:
        model, server = await self._about("model_info"), await self._about("server_info")
        if not server.get("enable_deterministic_inference"):
            raise ConfigError(
                f"orch.client.base_url: {self.link.name} ignores seeds, and every rollout has one; "
                "start it with --enable-deterministic-inference"
            )
        rank = server.get("max_lora_rank") if server.get("enable_lora") else None
        context = server.get("context_length") or (await self.get("/v1/models"))["data"][0]["max_model_len"]
        return ServerFacts(str(model["model_path"]), int(context), rank)

    async def _about(self, what: str) -> dict[str, Any]:
        """Older versions have `/get_model_info` and `/get_server_info`."""
        try:
            return await self.get(f"/{what}")
        except RequestRefused as refused:
            if refused.status >= 500:  # the route exists and fails
                raise
            try:
                return await self.get(f"/get_{what}")
            except RequestRefused as error:
                raise ConfigError(
                    f"orch.client.base_url: the server at {self.link.address.root} is not SGLang ({error}); name an "
                    "SGLang server, or set infer.engine"
                ) from error

    async def _generate(self, body: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        return await self.post(GENERATE, {**body, "lora_path": adapter} if adapter is not None else body)

    async def complete(self, request: Request, limit: int, adapter: str | None) -> ParsedAnswer:
        body = {"input_ids": request.prompt_ids, "sampling_params": self._sampling(request, limit)}
        answer = await self._generate({**body, "return_logprob": True, "logprob_start_len": -1}, adapter)
        try:
            about = answer["meta_info"]
            tokens = about["output_token_logprobs"]
            spans = [(span["start"], span["end"], str(span["version"])) for span in about.get("weight_versions") or ()]
            ids, logprobs = [int(entry[1]) for entry in tokens], [float(entry[0]) for entry in tokens]
            return ParsedAnswer(ids, logprobs, str(about["finish_reason"]["type"]), spans)
        except UNREADABLE as error:
            raise EngineError(f"SGLang's answer to {request.request_id} cannot be read: {error!r}") from error

    def _sampling(self, request: Request, limit: int) -> dict[str, Any]:
        sampling = request.sampling
        return {
            **common_sampling(request, self.reading.ends(request)),
            "max_new_tokens": limit,
            "min_new_tokens": min(sampling.min_tokens, limit),
            "sampling_seed": sampling.seed,
        }

    async def probe(self, token_ids: list[int], adapter: str | None) -> list[float]:
        sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
        body = {"input_ids": token_ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}
        answer = await self._generate({**body, "top_logprobs_num": PROBE_TOKENS}, adapter)
        return sorted((float(entry[0]) for entry in answer["meta_info"]["output_top_logprobs"][0]), reverse=True)

    async def read_weights(self, path: str, version: int, *, partial: bool = False) -> None:
        if partial:
            raise ConfigError(
                "train.noise_scheduler: infer.engine sglang cannot put noise on its norms; turn the noise off, or use "
                "infer.engine vllm or embedded"
            )
        body = {"model_path": path, "weight_version": str(version), "flush_cache": True, "abort_all_requests": False}
        await self._done("/update_weights_from_disk", body)

    async def receive_weights(self, manifest: Mapping[str, Any], version: int) -> None:
        """Receive an NCCL broadcast. Written from the published API and not run."""
        address, _, port = str(manifest["address"]).rpartition(":")
        if not self._transfers:
            group = {"master_address": address, "master_port": int(port), "rank_offset": 1, "backend": "nccl"}
            await self._done("/init_weights_update_group", {**group, "world_size": manifest["world"]})
            self._transfers = True
        tensors = manifest["tensors"]
        update = {
            "names": [tensor["name"] for tensor in tensors],
            "dtypes": [tensor["dtype"] for tensor in tensors],
            "shapes": [tensor["shape"] for tensor in tensors],
        }
        await self._done("/update_weights_from_distributed", {**update, "weight_version": str(version)})

    _transfers = False

    async def _done(self, path: str, body: dict[str, Any]) -> None:
        """Failures have status 400, which raises RequestRefused; a response without success=true is a failure too."""
        answer = await self.post(path, body)
        if answer.get("success") is not True:
            raise RequestRefused(f"SGLang: {path} failed: {answer}", 200)

    async def add_adapter(self, name: str, path: str) -> None:
        await self._done("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def remove_adapter(self, name: str) -> None:
        await self._done("/unload_lora_adapter", {"lora_name": name})

    async def hold(self) -> None:
        # Retracted requests keep their tokens and are prefilled again, so the cache can be flushed.
        await self.tell("/pause_generation", {"mode": "retract"})

    async def release(self) -> None:
        await self.tell("/continue_generation", {})

    async def served_version(self, adapter: str | None) -> str:
        if adapter is not None:
            listed = await self.get("/v1/models")
            return adapter if any(model["id"] == adapter for model in listed["data"]) else ""
        return str((await self._about("model_info")).get("weight_version"))
