"""fp8-hybrid: linear layers that compute in FP8 while the policy scores and trains, through torchao.

Weights stay in bf16, with fp32 masters in the optimizer. Inputs and weights are rounded to E4M3, output gradients to
E5M2, with one scale per tensor. The sampler uses the same weights in bf16; `scoring` switches FP8 on. Sampling in FP8
would hardly reduce the mismatch: see docs/log.md.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.models import kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# FP8 matrix products require both dimensions of a weight to be multiples of this.
MULTIPLE = 16


@dataclass
class ScoringSwitch:
    """Shared by all layers of a model, and copied with it. On inside `scoring`."""

    on: bool = False


@functools.cache
def _layer_class() -> type[Any]:
    """Defined lazily, since torchao is an optional dependency."""
    from torchao.float8.float8_linear import Float8Linear

    class HybridLinear(Float8Linear):  # type: ignore[misc,valid-type]
        switch: ScoringSwitch

        def forward(self, input: Tensor) -> Tensor:
            if not self.switch.on:
                return F.linear(input, self.weight, self.bias)
            if input.is_cuda and kernels.available(True):
                output = _Product.apply(input, self.weight, self)
            elif self.weight.requires_grad:
                return super().forward(input)
            else:
                output = _FrozenProduct.apply(input, self)
            return output if self.bias is None else output + self.bias

    return HybridLinear


class _Product(torch.autograd.Function):
    """The same computation as torchao, in fewer kernels."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: Any) -> Tensor:
        from shoal.models.kernels.quant import rounded

        x, w = input.flatten(0, -2).contiguous(), weight.contiguous()
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, w)
        ctx.layer, ctx.tops, ctx.shape = layer, (_top(x), _top_of_weight(w, layer)), input.shape
        x8, w8 = (rounded(t, E4M3, top) for t, top in zip((x, w), ctx.tops, strict=True))
        assert x8.plain is not None and w8.plain is not None
        product = _scaled(x8.plain, w8.plain.t(), (x8.inverse, w8.inverse), layer.linear_mm_config.output, x.dtype)
        return product.unflatten(0, input.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from shoal.models.kernels.quant import rounded

        x, w = ctx.saved_tensors
        trained, products = ctx.needs_input_grad[1], ctx.layer.linear_mm_config
        grad = grads[0].flatten(0, -2).contiguous()
        g8 = rounded(grad, E5M2, _top(grad), turned=trained)
        w8 = rounded(w, E4M3, ctx.tops[1], plain=False, turned=True)
        assert g8.plain is not None and w8.turned is not None
        scales = (g8.inverse, w8.inverse)
        to_input = _scaled(g8.plain, w8.turned.t(), scales, products.grad_input, grad.dtype).view(ctx.shape)
        if not trained:
            return to_input, None, None
        x8 = rounded(x, E4M3, ctx.tops[0], plain=False, turned=True)
        assert g8.turned is not None and x8.turned is not None
        scales = (g8.inverse, x8.inverse)
        return to_input, _scaled(g8.turned, x8.turned.t(), scales, products.grad_weight, grad.dtype), None


def _top(x: Tensor) -> Tensor:
    from shoal.models.kernels.quant import largest

    return largest(x)


def _top_of_weight(weight: Tensor, layer: Any) -> Tensor:
    """The largest magnitude of a weight; cached for frozen weights."""
    own = layer.weight  # `weight` is this tensor or a contiguous copy of it
    if own.requires_grad:
        return _top(weight)
    now = (own.data_ptr(), own._version)
    if getattr(layer, "frozen_top", (None, None))[0] != now:
        layer.frozen_top = (now, _top(weight))
    return layer.frozen_top[1]


def _scaled(one: Tensor, other: Tensor, scales: tuple[Tensor, Tensor], how: Any, dtype: torch.dtype) -> Tensor:
    """one [a, inner] @ other [inner, b]; both are contiguous along the inner dimension."""
    return torch._scaled_mm(
        one, other, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=how.use_fast_accum
    )


class _FrozenProduct(torch.autograd.Function):
    """On a CPU: torchao's product without the weight gradient, which torchao computes even for frozen weights."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: Any) -> Tensor:
        ctx.layer = layer
        product = torch.mm(_rounded(input.flatten(0, -2), layer, "INPUT"), _rounded(layer.weight.t(), layer, "WEIGHT"))
        return product.unflatten(0, input.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        weight = _rounded(ctx.layer.weight.t(), ctx.layer, "WEIGHT").t()
        product = torch.mm(_rounded(grad.flatten(0, -2), ctx.layer, "GRAD_OUTPUT"), weight)
        return product.unflatten(0, grad.shape[:-1]), None


def _rounded(tensor: Tensor, layer: Any, role: str) -> Any:
    """Cast to FP8 as torchao's layer does."""
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole

    config = layer.config
    casts = {"INPUT": config.cast_config_input, "WEIGHT": config.cast_config_weight}
    return hp_tensor_to_float8_dynamic(
        tensor,
        casts.get(role, config.cast_config_grad_output).target_dtype,
        layer.linear_mm_config,
        gemm_input_role=GemmInputRole[role],
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def convert(model: nn.Module) -> int:
    """Convert every linear layer except the head whose sizes allow it. Returns the number of converted layers."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    head = model.get_output_embeddings()  # type: ignore[operator]
    switch, layers = ScoringSwitch(), []

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module is head:
            return False
        return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0

    # The product for a weight's gradient needs a multiple of 16 tokens, so the inner dimension is padded.
    # With power-of-two scales, a value rounds the same whatever else its micro-batch contains.
    config = Float8LinearConfig(pad_inner_dim=True, round_scales_to_power_of_2=True)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = _layer_class()
            module.switch = switch  # type: ignore[assignment]
            layers.append(module)
    if not layers:
        raise ModelError(f"train.recipe: no linear layer of {type(model).__name__} has dimensions divisible by 16")
    return len(layers)


def scoring_switch(model: nn.Module) -> ScoringSwitch | None:
    return next((m.switch for m in model.modules() if isinstance(getattr(m, "switch", None), ScoringSwitch)), None)  # type: ignore[misc]


def samples_plainly(module: nn.Module) -> bool:
    """Whether this is a plain linear layer outside of `scoring`."""
    return type(module) is nn.Linear or isinstance(getattr(module, "switch", None), ScoringSwitch)


@contextmanager
def scoring(switch: ScoringSwitch | None) -> Iterator[None]:
    """Compute in FP8 if the model has such layers. Include the backward, since checkpointing repeats the forward."""
    before = switch.on if switch is not None else False
    if switch is not None:
        switch.on = True
    try:
        yield
    finally:
        if switch is not None:
            switch.on = before
