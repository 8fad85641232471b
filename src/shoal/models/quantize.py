"""Quantised frozen weights (QLoRA): three storage formats, and the linear layer that computes with them.

A format is a pair of pure functions, quantise and dequantise. It stores a few named tensors; codes are integers, so
casting a model does not change them. `QuantisedLinear` dequantises its weight for every product. Trainer and sampler
run the same layers. PEFT wraps them like nn.Linear; stored weights get no gradient, and adapters cannot be merged.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.models import kernels

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# The eight magnitudes of E2M1, by code, and the midpoints between adjacent values.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALF_WAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Format(Protocol):
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """[rows, columns] → the stored tensors, on the same device."""
        ...

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor: ...


class Fp8Blocks:
    """E4M3 with one fp32 scale per 128 x 128 block, which maps the block's largest magnitude to 448."""

    block = 128

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        wide = F.pad(weight.float(), (0, -columns % self.block, 0, -rows % self.block))
        tiles = wide.view(len(wide) // self.block, self.block, -1, self.block)
        largest = tiles.abs().amax((1, 3))
        scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        codes = _to_e4m3(tiles / scales[:, None, :, None]).view(wide.shape)[:rows, :columns]
        # Copy even if the slice is contiguous: a view would keep the padding in memory.
        return {"codes": codes.clone(memory_format=torch.contiguous_format), "scales": scales}

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        codes, scales = stored["codes"], stored["scales"]
        if kernels.available(codes.is_cuda):
            from shoal.models.kernels.quant import fp8_blocks

            return fp8_blocks(codes, scales, dtype, self.block)
        spread = scales.repeat_interleave(self.block, 0)[: shape[0]].repeat_interleave(self.block, 1)[:, : shape[1]]
        return (_from_e4m3(codes) * spread).to(dtype)


class NvFp4:
    """E2M1, two codes per byte (low half first), an E4M3 scale per 16 values of a row, an fp32 scale per matrix."""

    group = 16

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        groups = F.pad(weight.float(), (0, -weight.shape[1] % self.group)).unflatten(1, (-1, self.group))
        largest = groups.abs().amax(-1)
        top = largest.amax()
        whole = torch.where(top > 0, top / (E4M3_MAX * E2M1_MAX), 1.0)
        scales = _to_e4m3(largest / E2M1_MAX / whole)
        steps = _from_e4m3(scales) * whole
        # A group far below the matrix's largest magnitude has scale zero and becomes zero.
        ratios = torch.where(steps[..., None] > 0, groups / steps[..., None], 0.0)
        codes = _to_e2m1(ratios).flatten(1)
        return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": scales, "whole": whole.reshape(1)}

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        codes, scales, whole = stored["codes"], stored["scales"], stored["whole"]
        if kernels.available(codes.is_cuda):
            from shoal.models.kernels.quant import nvfp4

            return nvfp4((codes, scales, whole), shape, dtype, self.group)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
        values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
        steps = (_from_e4m3(scales) * whole).repeat_interleave(self.group, 1)
        return (values * steps)[:, : shape[1]].to(dtype)


class Nf4:
    """NF4 of bitsandbytes: blocks of 64 values; their scales are stored in 8 bits, in blocks of 256."""

    block = 64

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        # Flatten the matrix so that blocks cross row boundaries. The CPU kernel of bitsandbytes starts a block with
        # every row, and misreads rows whose length is not a multiple of 64; flattened, CPU and GPU agree.
        flat = weight.to(torch.float32).reshape(-1)
        state: Any
        codes, state = quantize_4bit(flat, blocksize=self.block, compress_statistics=True, quant_type="nf4")
        return {
            "codes": codes,
            "scales": state.absmax,
            "offset": state.offset,
            "scale_scales": state.state2.absmax,
            "scale_map": state.state2.code,
        }

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import QuantState, dequantize_4bit

        scales = QuantState(stored["scale_scales"], code=stored["scale_map"], blocksize=256, dtype=torch.float32)
        state = QuantState(
            stored["scales"],
            shape=torch.Size([shape[0] * shape[1]]),
            blocksize=self.block,
            quant_type="nf4",
            dtype=dtype,
            offset=stored["offset"],
            state2=scales,
        )
        return dequantize_4bit(stored["codes"], state).view(shape)


FORMATS: dict[str, Format] = {"fp8": Fp8Blocks(), "fp4": NvFp4(), "nf4": Nf4()}


def _to_e4m3(values: Tensor) -> Tensor:
    """The nearest E4M3 value, as a byte. Clamped, since torch casts values above 448 to NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _to_e2m1(values: Tensor) -> Tensor:
    """The nearest E2M1 value as four bits; ties go to the even code, whose mantissa bit is zero."""
    size = values.abs()
    half_way = torch.tensor(_HALF_WAY, device=values.device)
    below = torch.bucketize(size, half_way, right=False)  # ties round down
    above = torch.bucketize(size, half_way, right=True)
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3


class QuantisedLinear(nn.Linear):
    """A linear layer with a quantised weight. The bias, if any, is kept unquantised and frozen."""

    def __init__(self, linear: nn.Linear, format_name: str, device: torch.device) -> None:
        nn.Module.__init__(self)  # nn.Linear.__init__ would allocate the weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.format_name = format_name
        self.compute_dtype = linear.weight.dtype  # PEFT reads the adapters' dtype from this name
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        stored = FORMATS[format_name].quantise(linear.weight.detach().to(device))
        self._stored = tuple(stored)
        for name, tensor in stored.items():
            self.register_buffer(name, tensor)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The dequantised weight, computed on access. Writing to it has no effect."""
        return self.dequantised(self.compute_dtype)

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        stored: Any = {name: self._buffers[name] for name in self._stored}
        return FORMATS[self.format_name].dequantise(stored, (self.out_features, self.in_features), dtype)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_features} → {self.out_features}, stored as {self.format_name}, bias={self.bias is not None}"


class _Product(torch.autograd.Function):
    """input @ weight.T + bias. The backward dequantises again; keeping the weight would cost the memory saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, layer: QuantisedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(input, layer.dequantised(input.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,) = grads
        return grad @ ctx.layer.dequantised(grad.dtype), None


@functools.cache
def lora_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """The PEFT layer for quantised linears. Defined lazily: runs without adapters do not import PEFT."""
    from peft.tuners.lora import Linear

    class QuantisedLora(Linear):
        """PEFT's layer without merging: `weight` is a temporary, so a merged weight would be lost."""

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise ModelError(
                "an adapter cannot be merged into a quantised base; load it on the original base model with PEFT "
                "and merge it there"
            )

    return {QuantisedLinear: QuantisedLora}


@torch.no_grad()
def quantise_linears(model: nn.Module, format_name: str, device: torch.device) -> int:
    """Replace every linear layer except the head, one at a time, so `device` never holds the whole model unquantised.

    Returns the number of replaced layers. Embeddings, norms and the head are not quantised.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child is not head
    ]
    if not found:
        raise ModelError(f"{type(model).__name__} has no linear layers to quantise to {format_name}")
    for parent, name, child in found:
        setattr(parent, name, QuantisedLinear(child, format_name, device))
        child.weight = None  # type: ignore[assignment]  # frees memory: `found` still references the layer
    return len(found)


def count_weights(model: nn.Module) -> int:
    """The number of weights, quantised ones included."""
    stored = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, QuantisedLinear))
    return stored + sum(p.numel() for p in model.parameters())


def held_bytes(model: nn.Module) -> int:
    """Bytes of the model's parameters and buffers; shared storage counts once."""
    tensors = [*model.parameters(), *model.buffers()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())
