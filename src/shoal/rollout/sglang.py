"""SGLang behind the RolloutEngine seam, over its native HTTP API.

Written from SGLang's published API and tested against a double of it (tests/support/sglang_double.py); none was run.
Noise on norms is refused: the API has no partial update that reads a folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shoal.errors import ConfigError, EngineError
from shoal.rollout.answers import UNREADABLE, Answer
from shoal.rollout.facts import ServerFacts
from shoal.rollout.lost import Refused
from shoal.rollout.probe import PROBE_TOKENS
from shoal.rollout.remote import RemoteEngine
from shoal.rollout.server_api import said_in_full
from shoal.types import Request

# Seeds count only in deterministic mode; without it a request asked again comes out otherwise.
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
        """`/model_info` and `/server_info` were `/get_model_info` and `/get_server_info` before."""
        try:
            return await self.get(f"/{what}")
        except Refused as refused:
            if refused.status >= 500:  # it has that, and fails
                raise
            try:
                return await self.get(f"/get_{what}")
            except Refused as error:
                said = f"orch.client.base_url: what answers at {self.link.address.root} is no SGLang ({error})"
                raise ConfigError(f"{said}; name an SGLang server, or set infer.engine") from error

    async def _generate(self, body: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        return await self.post(GENERATE, {**body, "lora_path": adapter} if adapter is not None else body)

    async def ask(self, request: Request, limit: int, adapter: str | None) -> Answer:
        body = {"input_ids": request.prompt_ids, "sampling_params": self._sampling(request, limit)}
        answer = await self._generate({**body, "return_logprob": True, "logprob_start_len": -1}, adapter)
        try:
            about = answer["meta_info"]
            drawn = about["output_token_logprobs"]
            spans = [(span["start"], span["end"], str(span["version"])) for span in about.get("weight_versions") or ()]
            ids, logprobs = [int(entry[1]) for entry in drawn], [float(entry[0]) for entry in drawn]
            return Answer(ids, logprobs, str(about["finish_reason"]["type"]), spans)
        except UNREADABLE as error:
            raise EngineError(f"SGLang's answer to {request.request_id} cannot be read: {error!r}") from error

    def _sampling(self, request: Request, limit: int) -> dict[str, Any]:
        sampling = request.sampling
        return {
            **said_in_full(request, self.reading.ends(request)),
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
        """From the trainer's NCCL broadcast. Written from the published API and not run."""
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
        """A failure comes with status 400, which the link refuses; what does not say that it succeeded did not."""
        answer = await self.post(path, body)
        if answer.get("success") is not True:
            raise Refused(f"SGLang: {path} failed: {answer}", 200)

    async def add_adapter(self, name: str, path: str) -> None:
        await self._done("/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def remove_adapter(self, name: str) -> None:
        await self._done("/unload_lora_adapter", {"lora_name": name})

    async def hold(self) -> None:
        # Retracted requests keep their tokens and compute their past again, so the cache can be flushed between.
        await self.tell("/pause_generation", {"mode": "retract"})

    async def release(self) -> None:
        await self.tell("/continue_generation", {})

    async def served_version(self, adapter: str | None) -> str:
        if adapter is not None:
            listed = await self.get("/v1/models")
            return adapter if any(model["id"] == adapter for model in listed["data"]) else ""
        return str((await self._about("model_info")).get("weight_version"))
