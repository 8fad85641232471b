"""The one attention function, registered with transformers under the name "shoal".

It has three modes. A `Packed` context is train mode: sequences laid end to end, each attending to itself. With a cache
writer it is prefill: the same, and keys and values are also written into the cache. A `Decode` context is decode mode:
one new token a sequence against the cache. The context travels as a keyword of `model.forward`, so no state is global
and the same module tree trains and samples.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from shoal.errors import ModelError

ATTENTION = "shoal"
# Keys are padded to this multiple, so that the sum over them rounds the same whatever else is in the batch.
KEY_MULTIPLE = 16
# Rows of every matrix product are padded to this multiple for the same reason (CPU GEMMs round by batch size).
ROW_MULTIPLE = 8


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Shape:
    """What a layer asks of attention besides q, k and v."""

    scale: float
    window: int | None
    softcap: float | None


class Context(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor: ...


class CacheWriter(Protocol):
    def write(self, layer: int, key: Tensor, value: Tensor) -> None: ...


def shoal_attention(
    module: torch.nn.Module,
    query: Tensor,  # [B, H, T, D]
    key: Tensor,  # [B, Hkv, T, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    shoal: Context | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if shoal is None:
        raise RuntimeError("the shoal attention function was called without a context")
    if s_aux is not None:
        raise ModelError(f"{type(module).__name__} uses attention sinks, which Shoal does not support")
    shape = Shape(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap)
    return shoal.attend(int(module.layer_idx), query, key, value, shape), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, shoal_attention)


def dense_attention(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, shape: Shape) -> Tensor:
    """[B, H, Tq, D] x [B, Hkv, Tk, D]; `allowed` broadcasts to [B, 1, Tq, Tk]; None = causal with Tq == Tk."""
    if shape.softcap is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=shape.scale, enable_gqa=grouped
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * shape.scale
    scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if allowed is None:
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    shares = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.matmul(shares.to(value.dtype), value)


@dataclass
class Packed:
    """Train and prefill mode. Tensors are laid out [1, H, T, D] with segments end to end."""

    starts: np.ndarray  # [S+1]
    device: torch.device
    writer: CacheWriter | None = None
    _plans: dict[Any, Any] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        if self.writer is not None:
            self.writer.write(layer, key[0], value[0])
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and shape.softcap is None:
            return self._varlen(query, key, value, shape)
        return self._padded(query, key, value, shape)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if "starts" not in self._plans:
            self._plans["starts"] = torch.as_tensor(self.starts, dtype=torch.int32).to(self.device, non_blocking=True)
            self._plans["longest"] = int(np.diff(self.starts).max())
        starts, longest = self._plans["starts"], self._plans["longest"]
        # torch 2.11 groups heads without being asked; later releases want the flag.
        extra: dict[str, Any] = {"enable_gqa": True} if _VARLEN_GQA_FLAG else {}
        window = (shape.window - 1, 0) if shape.window is not None else (-1, 0)
        out = varlen_attn(
            query[0].transpose(0, 1),
            key[0].transpose(0, 1),
            value[0].transpose(0, 1),
            starts,
            starts,
            longest,
            longest,
            scale=shape.scale,
            window_size=window,
            **extra,
        )
        return out.unsqueeze(0)  # type: ignore[union-attr]

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """Segments as rows of right-padded rectangles: under a causal mask no real token sees the padding."""
        pieces = []
        for gather, scatter in self._layout():
            q, k, v = (x[0][:, gather].transpose(0, 1) for x in (query, key, value))  # [S, H, L, D]
            length = gather.shape[1]
            allowed = None
            if shape.window is not None and shape.window < length:
                allowed = self._window(length, shape.window)
            out = dense_attention(q, k, v, allowed, shape)  # [S, H, L, D]
            pieces.append(out.transpose(1, 2).flatten(0, 1)[scatter])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)[self._plans["order"]]
        return joined.unsqueeze(0)  # [1, T, H, D]

    def _layout(self) -> list[tuple[Tensor, Tensor]]:
        """Rectangles as (gather [S, L] from the row, scatter [n] out of the flattened rectangle).

        In training one rectangle holds all segments. In a prefill each has its own length's, since kernels choose their
        blocking by length and a prompt must round the same in any company.
        """
        if "layout" not in self._plans:
            lengths = np.diff(self.starts)
            classes = lengths if self.writer is not None else np.full_like(lengths, lengths.max())
            layout, order = [], []
            for length in np.unique(classes):
                members = np.flatnonzero(classes == length)
                columns = np.minimum(np.arange(length)[None], lengths[members, None] - 1)
                scatter = np.concatenate([i * length + np.arange(lengths[s]) for i, s in enumerate(members)])
                layout.append((self._long(self.starts[members, None] + columns), self._long(scatter)))
                order += [np.arange(self.starts[s], self.starts[s + 1]) for s in members]
            self._plans["order"] = self._long(np.argsort(np.concatenate(order)))
            self._plans["layout"] = layout
        return self._plans["layout"]

    def _long(self, array: np.ndarray) -> Tensor:
        return torch.as_tensor(array, dtype=torch.long).to(self.device)

    def _window(self, length: int, window: int) -> Tensor:
        key = ("window", window, length)  # the rectangles of a prefill differ in length
        if key not in self._plans:
            distance = torch.arange(length, device=self.device)[:, None] - torch.arange(length, device=self.device)
            self._plans[key] = (distance >= 0) & (distance < window)
        return self._plans[key]


@dataclass
class Decode:
    """Decode mode: row b holds the token at position `positions[b]` of the sequence in cache slot b."""

    cache: Any  # engine.cache.SlotCache
    positions: Tensor  # [B] long
    key_length: int  # keys looked at; a multiple of KEY_MULTIPLE above every position
    _allowed: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        keys, values = self.cache.append(layer, self.positions, key[:, :, 0], value[:, :, 0], self.key_length)
        batch, heads, _, dim = query.shape
        kv_heads = keys.shape[1]
        # The heads that share a key head stand as its queries, so nothing is repeated.
        folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        out = dense_attention(folded, keys, values, self._mask(shape.window), shape)
        return out.reshape(batch, 1, heads, value.shape[-1])

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._allowed:
            keys = torch.arange(self.key_length, device=self.positions.device)[None]
            allowed = keys <= self.positions[:, None]
            if window is not None:
                allowed &= keys > self.positions[:, None] - window
            self._allowed[window] = allowed[:, None, None]
        return self._allowed[window]


def _varlen_has_gqa_flag() -> bool:
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


_VARLEN_GQA_FLAG = _varlen_has_gqa_flag()
