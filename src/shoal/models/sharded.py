"""A decoder with weights sharded over the ranks (FSDP2): each layer is gathered for its pass and resharded after it.

Built from a whole decoder, which samplers keep using: gathering moves tensors, but CUDA graphs need fixed addresses.
Trained shards are in fp32, so they are the optimizer's masters as well.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from shoal.models.decoder import Decoder
from shoal.models.fused import FusedBody, run_layer


class ShardedDecoder(Decoder):
    """A Decoder whose passes go through `gathered`, on all ranks at the same time."""

    def __init__(self, whole: Decoder, mesh: DeviceMesh, *, frozen: bool = False) -> None:
        super().__init__(_shard(whole, mesh, frozen))
        self._computes_in = whole.dtype
        # The root's forward runs any work that needs the weights: hidden states and head together.
        self.inner.forward = _call
        if whole.fused is not None:
            self.fused = FusedBody(self.body, whole.fused.shapes, through_modules=True)
            for layer in _layers(self.body):
                layer.forward = partial(run_layer, layer)

    @property
    def dtype(self) -> torch.dtype:
        return self._computes_in

    def gathered(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        result = self.inner(work)
        if not torch.is_grad_enabled():
            # Without a backward, FSDP would keep the root's gathered weights, which are stale after the next step.
            self.inner.reshard()  # type: ignore[operator]
        return result


def _call(work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Clone views: FSDP attaches backward hooks to the outputs, and a view may be modified through its base."""
    return tuple(tensor.clone() if tensor._is_view() else tensor for tensor in work())


def _shard(whole: Decoder, mesh: DeviceMesh, frozen: bool) -> nn.Module:
    """A sharded copy of the model; only one layer at a time exists whole."""
    hollow = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad and not frozen)
        for p in whole.model.parameters()
    }
    model = copy.deepcopy(whole.model, hollow)
    copied = Decoder(model)
    low = whole.dtype not in (torch.float32, torch.float64)
    policy = MixedPrecisionPolicy(whole.dtype, torch.float32, cast_forward_inputs=False) if low else None
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy or MixedPrecisionPolicy()}
    filled: dict[int, nn.Parameter] = {}
    for target, source in zip(_layers(copied.body), _layers(whole.body), strict=True):
        _fill(target, source, filled)
        _sum_gradients(fully_shard(target, reshard_after_forward=True, **options))
    _fill(copied.inner, whole.inner, filled)
    # The root holds embeddings and head, needed at the end of the forward and the start of the backward.
    _sum_gradients(fully_shard(copied.inner, reshard_after_forward=False, **options))
    return model


def _layers(body: nn.Module) -> list[nn.Module]:
    return [layer for child in body.children() if isinstance(child, nn.ModuleList) for layer in child]


@torch.no_grad()
def _fill(target: nn.Module, source: nn.Module, filled: dict[int, nn.Parameter]) -> None:
    """Copy the parameters of `source` that `target` does not have yet; tied parameters stay tied."""
    for name, parameter in source.named_parameters(remove_duplicate=False):
        owner_name, _, leaf = name.rpartition(".")
        owner = target.get_submodule(owner_name)
        hollow = owner._parameters[leaf]
        if hollow is None or not hollow.is_meta:
            continue
        if id(parameter) not in filled:
            trained = hollow.requires_grad
            values = parameter.detach().clone()
            values = values.float() if trained and values.dtype != torch.float64 else values
            filled[id(parameter)] = nn.Parameter(values, requires_grad=trained)
        owner._parameters[leaf] = filled[id(parameter)]


def _sum_gradients(module: FSDPModule) -> None:
    """Sum gradients instead of averaging: the loss denominators already cover the whole step."""
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
