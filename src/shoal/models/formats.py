"""How a frozen weight is stored in 8 or 4 bits: three formats, each a pure pair of quantise and dequantise.

What is stored is a few named tensors; integers hold every code, so that no cast of a model changes them. Dequantising
reads them in place. `quantised.py` puts them behind a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models import kernels

E4M3_MAX = 448.0
E2M1_MAX = 6.0
# The eight magnitudes of E2M1, by code, and the points half-way between neighbours.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HALF_WAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


class Format(Protocol):
    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """[rows, columns] → what is stored, on the same device."""
        ...

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor: ...


class Fp8Blocks:
    """E4M3 with one fp32 scale for every block of 128 by 128: the block's largest number becomes 448."""

    block = 128

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        rows, columns = weight.shape
        wide = F.pad(weight.float(), (0, -columns % self.block, 0, -rows % self.block))
        tiles = wide.view(len(wide) // self.block, self.block, -1, self.block)
        largest = tiles.abs().amax((1, 3))
        scales = torch.where(largest > 0, largest / E4M3_MAX, 1.0)
        codes = _to_e4m3(tiles / scales[:, None, :, None]).view(wide.shape)[:rows, :columns]
        # A copy even where the slice is contiguous: a view would keep the padding.
        return {"codes": codes.clone(memory_format=torch.contiguous_format), "scales": scales}

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        codes, scales = stored["codes"], stored["scales"]
        if kernels.available(codes.is_cuda):
            from shoal.models.kernels.dequantise import fp8_blocks

            return fp8_blocks(codes, scales, dtype, self.block)
        spread = scales.repeat_interleave(self.block, 0)[: shape[0]].repeat_interleave(self.block, 1)[:, : shape[1]]
        return (_from_e4m3(codes) * spread).to(dtype)


class NvFp4:
    """E2M1, two to a byte, low half first; an E4M3 scale for every 16 along a row; one fp32 scale for the matrix."""

    group = 16

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        groups = F.pad(weight.float(), (0, -weight.shape[1] % self.group)).unflatten(1, (-1, self.group))
        largest = groups.abs().amax(-1)
        top = largest.amax()
        whole = torch.where(top > 0, top / (E4M3_MAX * E2M1_MAX), 1.0)
        scales = _to_e4m3(largest / E2M1_MAX / whole)
        steps = _from_e4m3(scales) * whole
        # A group far below the matrix's largest number has the scale zero, and is zero.
        ratios = torch.where(steps[..., None] > 0, groups / steps[..., None], 0.0)
        codes = _to_e2m1(ratios).flatten(1)
        return {"codes": codes[:, 0::2] | codes[:, 1::2] << 4, "scales": scales, "whole": whole.reshape(1)}

    def dequantise(self, stored: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        codes, scales, whole = stored["codes"], stored["scales"], stored["whole"]
        if kernels.available(codes.is_cuda):
            from shoal.models.kernels.dequantise import nvfp4

            return nvfp4((codes, scales, whole), shape, dtype, self.group)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], device=codes.device)
        values = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()]
        steps = (_from_e4m3(scales) * whole).repeat_interleave(self.group, 1)
        return (values * steps)[:, : shape[1]].to(dtype)


class Nf4:
    """bitsandbytes' NF4: blocks of 64 numbers, their scales in turn stored in 8 bits over blocks of 256."""

    block = 64

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        from bitsandbytes.functional import quantize_4bit

        # Blocks run on over the ends of rows. Given the matrix as one row, bitsandbytes agrees with itself everywhere:
        # its CPU kernel starts a block with every row, and reads rows that are no multiple of 64 long wrongly.
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
    """The nearest E4M3 number, as its byte. Beyond 448 torch makes NaN, so what rounding pushed there is cut."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def _from_e4m3(codes: Tensor) -> Tensor:
    return codes.view(torch.float8_e4m3fn).float()


def _to_e2m1(values: Tensor) -> Tensor:
    """The nearest E2M1 number as four bits; half-way, the one whose mantissa bit is zero, which is every even code."""
    size = values.abs()
    half_way = torch.tensor(_HALF_WAY, device=values.device)
    below = torch.bucketize(size, half_way, right=False)  # exactly half-way falls below
    above = torch.bucketize(size, half_way, right=True)
    codes = torch.where(below % 2 == 0, below, above).to(torch.uint8)
    return codes | (values < 0).to(torch.uint8) << 3
