"""The sampler's view of the trainer's model: the same tensors or a copy, optionally with QeRL noise.

`refresh` runs when a new weight version is published; `active` wraps every engine step. Noise is added to norm
weights that are swapped in only while the sampler runs, so it never affects the trainer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.models import lora
from shoal.models.decoder import Decoder

Mode = Literal["shared", "snapshot"]


class SamplerView:
    """`shared`: the trainer's own parameters. `snapshot`: an adapter slot under LoRA, else a copy of the model.

    `of_shards`: the trainer's weights are sharded, and are gathered into whole tensors here.
    """

    def __init__(self, trained: Decoder, mode: Mode = "shared") -> None:
        self._trained = trained
        self._gather: Callable[[Tensor], Tensor] = lambda tensor: tensor
        self._slot = False
        self._noisy: dict[nn.Module, Tensor] = {}  # allocated once: CUDA graphs read these tensors
        self.noisy = False
        self.applied_sigma = 0.0  # of the noise that is left after rounding: bf16 has steps of 0.008 above 1
        self.version = 0
        self._copied: int | None = None  # the version held by the snapshot
        self.decoder = trained
        if mode == "snapshot" and hasattr(trained.model, "peft_config"):
            lora.add_slot(trained.model, lora.SAMPLER)  # type: ignore[arg-type]
            self._slot = True
        elif mode == "snapshot":
            twin = copy.deepcopy(trained.model).requires_grad_(False)
            self.decoder = trained.over(twin)

    @classmethod
    def of_shards(cls, trained: Decoder, whole: Decoder, gather: Callable[[Tensor], Tensor]) -> SamplerView:
        """A view that gathers shards into the tensors of `whole`, in place, as CUDA graphs require."""
        view = cls(trained)
        view.decoder, view._gather = whole, gather
        whole.model.requires_grad_(False)
        return view

    def leave_device(self, *, keep: bool) -> None:
        """For sharded training without sampling: keep the whole copy on the host (to write files), or drop it."""
        if keep:
            self.decoder.model.to("cpu")  # type: ignore[operator]
            return
        for parameter in self.decoder.model.parameters():
            parameter.data = parameter.data.new_empty(0)
        gather = self._gather
        self._gather = lambda tensor: gather(tensor).flatten()[:0]  # other ranks need this rank's shard

    @torch.no_grad()
    def refresh(self, version: int, sigma: float = 0.0, seed: int = 0) -> None:
        """Serve the trainer's current weights as `version`, with noise of `sigma` drawn from (seed, version).

        If `version` is already served, its weights stay as they are and only the noise changes.
        """
        if version != self._copied:
            self._copy_weights()
        self.version = self._copied = version
        self.noisy, self.applied_sigma = sigma > 0, 0.0
        if self.noisy:
            squares = count = 0.0
            generator = torch.Generator().manual_seed((seed * 1_000_003 + version) % (1 << 63))
            for norm in noisy_norms(self.decoder.inner):
                weight: Tensor = norm.weight  # type: ignore[assignment]
                noise = torch.randn(weight.shape, generator=generator) * sigma
                buffer = self._noisy.setdefault(norm, torch.empty_like(weight, requires_grad=False))
                clean = weight.float().cpu()
                buffer.copy_(clean + noise)
                squares += (buffer.float().cpu() - clean).square().sum().item()
                count += clean.numel()
            self.applied_sigma = math.sqrt(squares / max(count, 1))

    def _copy_weights(self) -> None:
        if self._slot:
            lora.copy_slot(self._trained.model, lora.TRAINED, lora.SAMPLER)  # type: ignore[arg-type]
        elif self.decoder is not self._trained:
            for target, source in zip(self.decoder.model.parameters(), self._trained.model.parameters(), strict=True):
                if source.requires_grad:  # frozen weights never change
                    target.copy_(self._gather(source))

    def served_tensors(self) -> Iterator[Tensor]:
        """The parameters that the sampler reads, without other adapter slots."""
        others = {lora.TRAINED, lora.REFERENCE, lora.SAMPLER} - {lora.SAMPLER if self._slot else lora.TRAINED}
        for name, parameter in self.decoder.model.named_parameters():
            if "lora_" not in name or not others & set(name.split(".")):
                yield parameter

    @contextmanager
    def active(self) -> Iterator[None]:
        noisy = self._noisy if self.noisy else {}
        clean = {norm: norm.weight.data for norm in noisy}  # type: ignore[union-attr]
        for norm, weight in noisy.items():
            norm.weight.data = weight  # type: ignore[union-attr,assignment]
        try:
            if self._slot:
                with lora.using_slot(self._trained.model, lora.SAMPLER):  # type: ignore[arg-type]
                    yield
            else:
                yield
        finally:
            for norm, weight in clean.items():
                norm.weight.data = weight  # type: ignore[union-attr,assignment]


def noisy_norms(model: nn.Module) -> list[nn.Module]:
    """Input, post-attention and final RMSNorms; never the per-head q_norm and k_norm."""
    return [
        module
        for name, module in model.named_modules()
        if "RMSNorm" in type(module).__name__ and name.rsplit(".", 1)[-1] not in ("q_norm", "k_norm")
    ]
