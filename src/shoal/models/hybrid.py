"""fp8-hybrid: linear layers whose products are taken in FP8 while the policy scores and trains, through torchao.

Weights stay what they are, bf16 with fp32 masters in the optimizer. Inputs and weights are rounded to E4M3, gradients
of outputs to E5M2, with one scale a tensor. The sampler takes the same weights in bf16, at its usual speed; `scoring`
tells the two apart. In FP8 it would agree with the policy hardly better: see docs/log.md.
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

from shoal.errors import ModelError
from shoal.models import kernels

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# What FP8 matrix products need both sides of a weight to be a multiple of.
MULTIPLE = 16


@dataclass
class Switch:
    """One for all layers of a model, and copied with it. On inside `scoring`."""

    on: bool = False


@functools.cache
def _layer_class() -> type[Any]:
    """Built when it is first needed, since torchao is an extra."""
    from torchao.float8.float8_linear import Float8Linear

    class HybridLinear(Float8Linear):  # type: ignore[misc,valid-type]
        switch: Switch

        def forward(self, input: Tensor) -> Tensor:
            if not self.switch.on:
                return F.linear(input, self.weight, self.bias)
            if kernels.available(input.is_cuda) and input.is_cuda:
                output = _Product.apply(input, self.weight, self)
            elif self.weight.requires_grad:
                return super().forward(input)
            else:
                output = _FrozenProduct.apply(input, self)
            return output if self.bias is None else output + self.bias

    return HybridLinear


class _Product(torch.autograd.Function):
    """What torchao computes, in few kernels instead of many."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, layer: Any) -> Tensor:
        from shoal.models.kernels.fp8 import rounded

        x, w = input.flatten(0, -2).contiguous(), weight.contiguous()
        ctx.save_for_backward(x, w)
        ctx.layer, ctx.tops, ctx.shape = layer, (_top(x), _top_of_weight(w, layer)), input.shape
        x8, w8 = (rounded(t, E4M3, top) for t, top in zip((x, w), ctx.tops, strict=True))
        assert x8.plain is not None and w8.plain is not None
        product = _scaled(x8.plain, w8.plain.t(), (x8.inverse, w8.inverse), layer.linear_mm_config.output, x.dtype)
        return product.unflatten(0, input.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        from shoal.models.kernels.fp8 import rounded

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
    from shoal.models.kernels.fp8 import largest

    return largest(x)


def _top_of_weight(weight: Tensor, layer: Any) -> Tensor:
    """A frozen weight's largest number is looked for once."""
    if weight.requires_grad:
        return _top(weight)
    now = (weight.data_ptr(), weight._version)
    if getattr(layer, "frozen_top", (None, None))[0] != now:
        layer.frozen_top = (now, _top(weight))
    return layer.frozen_top[1]


def _scaled(one: Tensor, other: Tensor, scales: tuple[Tensor, Tensor], how: Any, dtype: torch.dtype) -> Tensor:
    """one [a, inner] @ other [inner, b], rows and columns each along the inner dimension."""
    return torch._scaled_mm(
        one, other, scale_a=scales[0], scale_b=scales[1], out_dtype=dtype, use_fast_accum=how.use_fast_accum
    )


class _FrozenProduct(torch.autograd.Function):
    """On a CPU: torchao's product without the gradient of the weight, a third of the work even where it is frozen."""

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
    """In FP8, as torchao's own layer does it."""
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
    """Give every linear layer but the head FP8 products, where its sizes allow them. Returns how many."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import Float8Linear

    head = model.get_output_embeddings()  # type: ignore[operator]
    switch, layers = Switch(), []

    def fits(module: nn.Module, name: str) -> bool:
        if type(module) is not nn.Linear or module is head:
            return False
        return module.in_features % MULTIPLE == 0 and module.out_features % MULTIPLE == 0

    # A step has any number of tokens, and the product for a weight's gradient needs multiples of 16 of them: padded.
    # With powers of two as scales a number rounds the same whatever else its micro-batch holds.
    config = Float8LinearConfig(pad_inner_dim=True, round_scales_to_power_of_2=True)
    convert_to_float8_training(model, module_filter_fn=fits, config=config)
    for module in model.modules():
        if isinstance(module, Float8Linear):
            module.__class__ = _layer_class()
            module.switch = switch  # type: ignore[assignment]
            layers.append(module)
    if not layers:
        raise ModelError(f"train.recipe: no linear layer of {type(model).__name__} has sizes that are multiples of 16")
    return len(layers)


def switch_of(model: nn.Module) -> Switch | None:
    return next((m.switch for m in model.modules() if isinstance(getattr(m, "switch", None), Switch)), None)  # type: ignore[misc]


def samples_plainly(module: nn.Module) -> bool:
    """Whether outside `scoring` this is a plain linear layer: its weight is all there is to it."""
    return type(module) is nn.Linear or isinstance(getattr(module, "switch", None), Switch)


@contextmanager
def scoring(switch: Switch | None) -> Iterator[None]:
    """Products in FP8 where the model has such layers. Backward belongs inside: checkpointing runs forward again."""
    before = switch.on if switch is not None else False
    if switch is not None:
        switch.on = True
    try:
        yield
    finally:
        if switch is not None:
            switch.on = before
