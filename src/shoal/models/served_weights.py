"""The weights of a server: tensors that published versions replace in place.

A version is fully checked before the first tensor changes, so the old version stays in service if the new one is bad.
CUDA graphs keep reading the same tensors. An adapter below the maximum rank is padded with zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.core.errors import EngineError, ModelError, StorageError
from shoal.models import lora
from shoal.models.decoder import Decoder
from shoal.models.file_layout import is_converted
from shoal.models.load import read_converted
from shoal.runs import weight_files as manifests
from shoal.runs.files import fault


class ReceivedVersion(Protocol):
    """A received and verified weight version."""

    @property
    def hash(self) -> str: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes by tensor name, as in the files."""
        ...

    @property
    def adapter(self) -> Mapping[str, Any] | None:
        """Contents of adapter_config.json; None for a full model."""
        ...

    def tensor(self, name: str) -> Tensor: ...

    def close(self) -> None: ...


Reader = Callable[[Mapping[str, Any]], ReceivedVersion]


class FolderWeights:
    """A folder written by transformers or PEFT. Tensors are read one by one after all files were verified."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
        self.hash = manifests.verify(manifest)
        self._folder = Path(str(manifest["path"]))
        self._open = ExitStack()
        self._files: dict[str, Any] = {}
        self.adapter = self._adapter_config() if manifest.get("kind") == "lora" else None
        try:
            for name in sorted(n for n in manifest["files"] if n.endswith(".safetensors")):
                file = self._open.enter_context(safe_open(self._folder / name, framework="pt"))
                self._files.update(dict.fromkeys(file.keys(), file))
            self.shapes = {name: tuple(f.get_slice(name).get_shape()) for name, f in self._files.items()}
        except SafetensorError as error:
            raise StorageError(f"weights {self._folder}: {error}") from error

    def tensor(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def close(self) -> None:
        self._open.close()

    def _adapter_config(self) -> Mapping[str, Any]:
        try:
            return dict(json.loads((self._folder / "adapter_config.json").read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise StorageError(f"weights {self._folder}: adapter_config.json cannot be read: {error}") from error


class ConvertedFolder:
    """A folder with other tensors than the modules, such as one per expert. transformers loads all of it at once."""

    adapter = None

    def __init__(self, manifest: Mapping[str, Any], model: Any) -> None:
        self.hash = manifests.verify(manifest)
        self._tensors = read_converted(str(manifest["path"]), model)
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors = {}


@contextmanager
def _raise_if_broken() -> Iterator[None]:
    """Turn a failure while tensors are being replaced into EngineError: the weights are then a mix of two versions."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"weights were replaced only in part ({error}); restart the server") from error


class WeightLoader:
    """`max_lora_rank`: None if adapters are not served. `readers`: by the manifest's transport."""

    def __init__(
        self, decoder: Decoder, max_lora_rank: int | None = None, readers: Mapping[str, Reader] | None = None
    ) -> None:
        self._decoder = decoder
        self._max_rank = max_lora_rank
        self._readers: dict[str, Reader] = {"filesystem": self._read_folder, **(readers or {})}

    def _read_folder(self, manifest: Mapping[str, Any]) -> ReceivedVersion:
        if manifest.get("kind") != "lora" and is_converted(self._decoder.inner):
            return ConvertedFolder(manifest, self._decoder.inner)
        return FolderWeights(manifest)

    @torch.no_grad()
    def replace(self, manifest: Mapping[str, Any]) -> str:
        """Load a version; returns its hash."""
        transport = str(manifest.get("transport", "filesystem"))
        if transport not in self._readers:
            raise StorageError(f"weights: this server does not support the transport {transport}; use filesystem")
        incoming = self._readers[transport](manifest)
        fault("weights:arrived")
        try:
            if incoming.adapter is not None:
                self._replace_adapter(incoming, incoming.adapter)
            else:
                self._replace_all(incoming)
        finally:
            incoming.close()
        return incoming.hash

    def _replace_all(self, incoming: ReceivedVersion) -> None:
        targets = {
            name.replace(".base_layer", ""): parameter
            for name, parameter in self._decoder.inner.named_parameters()
            if "lora_" not in name
        }
        tied = set(self._decoder.inner.state_dict()) - set(dict(self._decoder.inner.named_parameters()))
        _check_names(set(targets), set(incoming.shapes) - tied, "model")
        _check_shapes({name: tuple(t.shape) for name, t in targets.items()}, incoming)
        with _raise_if_broken():
            for name, parameter in targets.items():
                fault("weights:tensor")
                parameter.copy_(incoming.tensor(name))
        self.clear_adapter()

    def _replace_adapter(self, incoming: ReceivedVersion, config: Mapping[str, Any]) -> None:
        rank, scale = self._checked_scale(config)
        targets = self._adapter_targets()
        unknown = sorted(set(incoming.shapes) - set(targets))
        if unknown:
            raise ModelError(f"the adapter targets {unknown[0]}, which has no adapter on this server")
        _check_shapes({n: _cut(targets[n], n, rank).shape for n in incoming.shapes}, incoming)
        with _raise_if_broken():
            self.clear_adapter()
            for name in incoming.shapes:
                fault("weights:tensor")
                _cut(targets[name], name, rank).copy_(incoming.tensor(name))
        for module in self._decoder.inner.modules():
            if hasattr(module, "lora_A"):
                module.scaling[lora.TRAINED] = scale  # type: ignore[index]

    @torch.no_grad()
    def clear_adapter(self) -> None:
        """Serve the base model without an adapter."""
        for parameter in self._adapter_targets().values():
            parameter.zero_()

    def _adapter_targets(self) -> dict[str, Tensor]:
        """Adapter parameters by their name in PEFT's files, which omit the slot name."""
        return {
            name.replace(f".{lora.TRAINED}.", "."): parameter
            for name, parameter in self._decoder.model.named_parameters()
            if ".lora_A." in name or ".lora_B." in name
        }

    def _checked_scale(self, config: Mapping[str, Any]) -> tuple[int, float]:
        """The adapter's rank and scaling factor."""
        if self._max_rank is None:
            raise ModelError("this server does not serve adapters; start it with infer.enable_lora=true")
        try:
            rank, alpha = int(config.get("r", 0)), float(config.get("lora_alpha", config.get("r", 0)))
        except (TypeError, ValueError) as error:
            raise ModelError(f"the adapter's r and lora_alpha must be numbers: {error}") from error
        if not 1 <= rank <= self._max_rank:
            raise ModelError(f"the adapter's rank {rank} exceeds infer.max_lora_rank ({self._max_rank})")
        special = [key for key in ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save") if config.get(key)]
        if config.get("bias", "none") != "none":
            special.append("bias")
        if special:
            raise ModelError(f"the adapter uses {', '.join(special)}, which this server does not support")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _cut(parameter: Tensor, name: str, rank: int) -> Tensor:
    """The part of a slot's matrix used by an adapter of this rank: rows of A [r, in], columns of B [out, r]."""
    return parameter[:rank] if ".lora_A." in name else parameter[:, :rank]


def _check_names(ours: set[str], theirs: set[str], what: str) -> None:
    missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
    if missing or unknown:
        parts = [f"{len(missing)} tensors are missing, such as {missing[0]}"] if missing else []
        parts += [f"{len(unknown)} are unknown, such as {unknown[0]}"] if unknown else []
        raise ModelError(f"the weights do not match this server's {what}: {'; '.join(parts)}")


def _check_shapes(expected: Mapping[str, tuple[int, ...]], incoming: ReceivedVersion) -> None:
    for name, shape in expected.items():
        if tuple(incoming.shapes[name]) != tuple(shape):
            raise ModelError(f"{name} has shape {list(incoming.shapes[name])}, expected {list(shape)}")
