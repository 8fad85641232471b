"""The engine on a vLLM HTTP server (0.32 or newer).

`/inference/v1/generate` takes token ids and returns ids, log-probs and the weight version of every token. Full weights
are read from a folder by `reload_weights`; every version of an adapter has its own name.
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

# The options that a run needs; build/ starts the server with them, and the error messages name them.
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, reload
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_NO_USAGE_STATS": "1",
}
FLAGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")
# LoRA ranks that vLLM supports; the server is started with the next larger one.
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
GENERATE = "/inference/v1/generate"


class VllmRolloutEngine(RemoteEngine):
    name = "vLLM"

    async def facts(self) -> ServerFacts:
        config = await self._server_config()
        model, adapters = config["model_config"], config.get("lora_config") or {}
        if model["logprobs_mode"] != "processed_logprobs":
            raise ConfigError(
                f"orch.client.base_url: {self.link.name} returns {model['logprobs_mode']}, not the log-probs "
                "of the sampling distribution; start it with --logprobs-mode processed_logprobs"
            )
        await self.release()  # an earlier run may have left it paused
        await self._check_tokens_route()
        about = config.get("device_config") or {}
        on_cpu = "cpu" in (str(about.get("device_type")), str(about.get("device")))
        return ServerFacts(str(model["model"]), int(model["max_model_len"]), adapters.get("max_lora_rank"), on_cpu)

    async def _server_config(self) -> dict[str, Any]:
        try:
            return (await self.get("/server_info?config_format=json"))["vllm_config"]
        except (EngineError, KeyError) as error:
            if isinstance(error, RequestRefused) and error.status >= 500:  # a vLLM that fails
                raise
            raise ConfigError(
                f"orch.client.base_url: the server at {self.link.address.root} is not vLLM in development mode "
                f"({error}); start vLLM with VLLM_SERVER_DEV_MODE=1 in its environment"
            ) from error

    async def _check_tokens_route(self) -> None:
        """Sample one token: the route exists, and compilation on the first request is done."""
        try:
            await self._generate([0], {"max_tokens": 1, "temperature": 0.0}, None)
        except RequestRefused as error:
            if error.status != 404:
                raise
            raise ConfigError(
                f"orch.client.base_url: {self.link.name} has no {GENERATE} ({error}); start vLLM "
                "0.32 or newer with --enable-scale-out"
            ) from error

    async def _generate(self, token_ids: list[int], sampling: dict[str, Any], adapter: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": sampling}
        if adapter is not None:
            body["model"] = adapter
        return await self.post(GENERATE, body)

    async def complete(self, request: Request, limit: int, adapter: str | None) -> ParsedAnswer:
        sampling = sampling_parameters(request, limit, self.reading.ends(request))
        answer = await self._generate(request.prompt_ids, sampling, adapter)
        try:
            choice = answer["choices"][0]
            spans = [(span["start"], span["end"], str(span["version"])) for span in choice["weight_versions"] or ()]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"] or ()]
            return ParsedAnswer(list(choice["token_ids"]), logprobs, str(choice["finish_reason"]), spans)
        except UNREADABLE as error:
            raise EngineError(f"vLLM's answer to {request.request_id} cannot be read: {error!r}") from error

    async def probe(self, token_ids: list[int], adapter: str | None) -> list[float]:
        # Not prompt_logprobs: together with other requests they crash a server with adapters (0.32).
        sampling = {"max_tokens": 1, "temperature": 0.0, "logprobs": PROBE_TOKENS, "ignore_eos": True}
        first = (await self._generate(token_ids, sampling, adapter))["choices"][0]["logprobs"]["content"][0]
        return sorted((float(entry["logprob"]) for entry in first["top_logprobs"]), reverse=True)[:PROBE_TOKENS]

    async def read_weights(self, path: str, version: int, *, partial: bool = False) -> None:
        """Load in place, layer by layer. With `partial`, tensors that the folder lacks stay as they are."""
        await self.tell("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": path}})
        await self._note_version(version)

    async def _note_version(self, version: int) -> None:
        # Requests in flight are prefilled again, since their cache was computed with the old weights.
        await self.tell("/reset_prefix_cache?reset_running_requests=true")
        await self.tell("/update_weight_version", {"new_version": str(version)})

    async def receive_weights(self, manifest: Mapping[str, Any], version: int) -> None:
        """Receive an NCCL broadcast through the weight-transfer endpoints.

        Written from vLLM's published protocol and not run, since it has no CPU backend. The sender is the author of
        the manifest: `train.weight_broadcast` works only with Shoal's server and is rejected with vLLM.
        """
        address, _, port = str(manifest["address"]).rpartition(":")
        init = {"master_address": address, "master_port": int(port), "rank_offset": 1, "world_size": manifest["world"]}
        if manifest.get("nccl_unique_id_b64"):
            init = {
                "nccl_unique_id_b64": manifest["nccl_unique_id_b64"],
                "rank_offset": 1,
                "world_size": init["world_size"],
            }
        tensors = manifest["tensors"]
        update = {
            "names": [tensor["name"] for tensor in tensors],
            "dtype_names": [tensor["dtype"] for tensor in tensors],
            "shapes": [tensor["shape"] for tensor in tensors],
        }
        if not self._transfers:
            await self.tell("/init_weight_transfer_engine", {"init_info": init})
            self._transfers = True
        await self.tell("/start_weight_update")
        await self.tell("/update_weights", {"update_info": update})
        await self.tell("/finish_weight_update", {"weight_version": str(version)})
        await self.tell("/reset_prefix_cache?reset_running_requests=true")

    _transfers = False

    async def add_adapter(self, name: str, path: str) -> None:
        await self.tell("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    async def remove_adapter(self, name: str) -> None:
        await self.tell("/v1/unload_lora_adapter", {"lora_name": name})

    async def hold(self) -> None:
        await self.tell("/pause?mode=keep")

    async def release(self) -> None:
        await self.tell("/resume")

    async def served_version(self, adapter: str | None) -> str:
        if adapter is not None:
            listed = await self.get("/v1/models")
            return adapter if any(model["id"] == adapter for model in listed["data"]) else ""
        return str((await self.get("/weight_info"))["weight_version"])


def sampling_parameters(request: Request, limit: int, ends: list[int]) -> dict[str, Any]:
    sampling = request.sampling
    return {
        **common_sampling(request, ends),
        "max_tokens": limit,
        "min_tokens": min(sampling.min_tokens, limit),
        "seed": sampling.seed,
        "logprobs": 0,  # of the sampled token only
    }
