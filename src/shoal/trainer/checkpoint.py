"""The policy's files: weights for transformers or PEFT, and the optimizer state for bit-equal resume.

Writes into a given folder; the run directory makes that folder appear atomically.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from shoal.core.errors import NonFiniteError, StorageError
from shoal.models import lora
from shoal.models.decoder import Decoder
from shoal.models.multimodal import copy_processor
from shoal.runs.run_dir import SHARDS
from shoal.trainer.policy import TrainedPolicy

STATE_FILE = "trainer.safetensors"
COUNTS_FILE = "trainer.json"


def export_weights(
    policy: TrainedPolicy,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    whole: Decoder | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> None:
    """Write a folder that `from_pretrained` of transformers (full) or PEFT (LoRA) loads.

    Sharded weights are written from their `whole` copy, and `tensors` replace those of the model.
    """
    model: Any = (whole or policy.decoder).model
    folder.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "peft_config"):
        # With "auto", PEFT queries the hub whether the base model has other embeddings.
        embeddings = "auto" if _adapts_embeddings(model) else False
        adapters = {"selected_adapters": [lora.TRAINED], "save_embedding_layers": embeddings}
        model.save_pretrained(str(folder), **adapters, state_dict=tensors)
    else:
        model.save_pretrained(folder, state_dict=tensors)
        copy_processor(model, folder)
    tokenizer.save_pretrained(folder)


def _adapts_embeddings(model: Any) -> bool:
    return bool(set(model.peft_config[lora.TRAINED].target_modules or ()) & {"embed_tokens", "lm_head"})


def copy_weights(policy: TrainedPolicy) -> dict[str, Tensor]:
    """The tensors that `export_weights` writes, copied to the host. Tied weights stay one tensor."""
    model: Any = policy.decoder.model
    all_of_them = not hasattr(model, "peft_config") or _adapts_embeddings(model)
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    tensors = {}
    for name, tensor in model.state_dict().items():
        if all_of_them or lora.TRAINED in name.split("."):
            place = (tensor.data_ptr(), tensor.shape)
            if place not in copies:
                copies[place] = _on_host(tensor)
            tensors[name] = copies[place]
    return tensors


def save_shards(policy: TrainedPolicy, folder: Path, group: dist.ProcessGroup) -> None:
    """Write masters and moments as a torch distributed checkpoint: each rank writes its own shards.

    In safetensors files, since torch's default format is read by unpickling.
    """
    tensors = {name: tensor if tensor.ndim else tensor[None] for name, tensor in policy.optimizer.state().items()}
    writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(tensors, storage_writer=writer, process_group=group)  # type: ignore[arg-type]
    except (OSError, dcp.CheckpointException) as error:
        raise StorageError(f"the shards could not be written to {folder}: {str(error).splitlines()[0]}") from error


def _read_shards(policy: TrainedPolicy, folder: Path) -> dict[str, torch.Tensor]:
    """Read this rank's shards, independent of the number of ranks that wrote them."""
    reader = dcp.HuggingFaceStorageReader(str(folder))
    masters, tensors = policy.optimizer.masters, {}
    for name in reader.read_metadata().state_dict_metadata:
        kind, _, parameter = name.partition("/")
        if parameter not in masters:
            raise ValueError("the optimizer state belongs to another model")
        tensors[name] = torch.zeros(1) if kind == "step" else torch.zeros_like(masters[parameter], requires_grad=False)
    dcp.load(tensors, storage_reader=reader, no_dist=True)  # type: ignore[arg-type]
    return {name: tensor[0] if name.startswith("step/") else tensor for name, tensor in tensors.items()}


def save_state(policy: TrainedPolicy, folder: Path) -> None:
    write_state(*copy_state(policy), folder)


def copy_state(policy: TrainedPolicy) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state and the random state, copied to the host, and the counts."""
    state = {} if policy.passes_together else policy.optimizer.state()  # sharded state is in save_shards
    if state and not _all_finite(list(policy.optimizer.masters.values())):
        raise NonFiniteError(
            "the trained weights contain NaN or Inf and are not saved; the last checkpoint is unchanged"
        )
    tensors = {name: _on_host(tensor) for name, tensor in state.items()}
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available() and policy.decoder.device.type == "cuda":
        tensors["rng/cuda"] = torch.cuda.get_rng_state(policy.decoder.device)
    counts: dict[str, Any] = {"optimizer_steps": policy.optimizer_steps}
    if policy.signal_state:
        counts["signals"] = dict(policy.signal_state)
    return tensors, counts


def write_state(tensors: dict[str, Tensor], counts: dict[str, Any], folder: Path) -> None:
    save_file(tensors, folder / STATE_FILE)
    (folder / COUNTS_FILE).write_text(json.dumps(counts), "utf-8")


def load_state(policy: TrainedPolicy, folder: Path) -> None:
    try:
        tensors = load_file(folder / STATE_FILE)
        counts = json.loads((folder / COUNTS_FILE).read_text("utf-8"))
        torch.set_rng_state(tensors.pop("rng/cpu"))
        cuda = tensors.pop("rng/cuda", None)
        if cuda is not None and policy.decoder.device.type == "cuda":
            torch.cuda.set_rng_state(cuda, policy.decoder.device)
        if (folder / SHARDS).is_dir():
            tensors |= _read_shards(policy, folder / SHARDS)
        policy.optimizer.load_state(tensors)
        policy.optimizer_steps = int(counts["optimizer_steps"])
        policy.signal_state = {name: float(value) for name, value in counts.get("signals", {}).items()}
    except (OSError, ValueError, KeyError, SafetensorError, dcp.CheckpointException) as error:
        raise StorageError(f"the checkpoint {folder} could not be loaded: {error}") from error


@torch.no_grad()
def _all_finite(tensors: list[Tensor]) -> bool:
    return bool(torch.stack(torch._foreach_norm(tensors, float("inf"))).isfinite().all())


@torch.no_grad()
def snapshot_weights(decoder: Decoder) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The weights an engine needs, copied to the host, by their names in files; and an adapter's settings."""
    model: Any = decoder.model
    if not hasattr(model, "peft_config"):
        return {name: _on_host(tensor) for name, tensor in decoder.inner.named_parameters()}, None
    mark = f".{lora.TRAINED}."
    named = {name.replace(mark, "."): tensor for name, tensor in model.named_parameters() if mark in name}
    settings = model.peft_config[lora.TRAINED].to_dict()
    kept = ("r", "lora_alpha", "use_rslora", "bias", "use_dora")
    return {name: _on_host(tensor) for name, tensor in named.items()}, {key: settings.get(key) for key in kept}


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True).contiguous()
