"""The one attention function, registered with transformers under the name "shoal".

Three modes. `Packed` is train mode: segments end to end, each attends to itself and to the prefix it continues.
`Packed` with a cache writer is prefill: keys and values are also written into the KV cache. `Decode` is decode mode:
one new token per sequence against the cache. The context is passed as a keyword of `model.forward`, so there is no
global state. `upload` copies arrays to the device; `take_tokens` gathers keys and values that segments share.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from shoal.models import kernels
from shoal.models.state_layers import OneLayerCache, States, run

# Each array starts at a multiple of this: Triton recompiles kernels for unaligned pointers.
ALIGNMENT_BYTES = 16


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """Copy arrays to the device, one copy per dtype. Each result is a view of the tensor that holds its dtype."""
    found: dict[str, Tensor] = {}
    for dtype in sorted({array.dtype.str for array in arrays.values()}):
        members = {name: array for name, array in arrays.items() if array.dtype.str == dtype}
        multiple = max(1, ALIGNMENT_BYTES // np.dtype(dtype).itemsize)
        starts = np.cumsum([0, *(-(-array.size // multiple) * multiple for array in members.values())]).tolist()
        whole = np.zeros(starts[-1], dtype)
        for start, array in zip(starts, members.values(), strict=False):
            whole[start : start + array.size] = array.ravel()
        there = _copy(torch.from_numpy(whole), device)
        for start, (name, array) in zip(starts, members.items(), strict=False):
            found[name] = there[start : start + array.size].view(array.shape)
    return {name: found[name] for name in arrays}


def _copy(whole: Tensor, device: torch.device) -> Tensor:
    # The pinned-memory allocator keeps a block until the copy from it is done.
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)


def gather(keys: np.ndarray, tokens: int) -> dict[str, np.ndarray]:
    """`keys` [n]: the token of each gathered key. `copies` [n], `copy_starts` [T+1]: the keys of each token."""
    starts = np.append(0, np.cumsum(np.bincount(keys, minlength=tokens)))
    arrays = {"keys": keys, "copies": np.argsort(keys, kind="stable"), "copy_starts": starts}
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def take_tokens(tokens: Tensor, plan: Mapping[str, Tensor]) -> Tensor:
    """[T, ...] → [n, ...]. The backward sums gradients of shared tokens in fp32."""
    return _TakeTokens.apply(tokens, plan["keys"], plan["copies"], plan["copy_starts"])  # type: ignore[return-value]


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, keys: Tensor, copies: Tensor, copy_starts: Tensor) -> Tensor:
        ctx.save_for_backward(keys, copies, copy_starts)
        return tokens.index_select(0, keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (keys, copies, copy_starts), (grad,) = ctx.saved_tensors, grads
        if grad.dtype.itemsize <= 4 and kernels.available(grad.is_cuda):
            from shoal.models.kernels.logprobs import sum_copies

            return sum_copies(grad, copies, copy_starts), None, None, None
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(len(copy_starts) - 1, *grad.shape[1:], dtype=wide, device=grad.device)
        return total.index_add_(0, keys, grad.to(wide)).to(grad.dtype), None, None, None


ATTENTION = "shoal"
# Key lengths are padded to this multiple, so that sums round the same whatever else is in the batch.
KEY_MULTIPLE = 16
# Rows of matrix products are padded to this multiple for the same reason: CPU GEMMs round by batch size.
ROW_MULTIPLE = 8
LEAST_ABOUT = 7  # log2: segments of up to 128 tokens share one length class


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Shape:
    """Attention parameters of a layer besides q, k and v."""

    scale: float
    window: int | None
    softcap: float | None
    sink: Tensor | None = field(default=None, compare=False)  # [H], a logit per head that attends to nothing


class Context(Protocol):
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor: ...

    def mix(self, module: Any, hidden: Tensor) -> Tensor:
        """Run a layer that has a state instead of keys (state_layers.py)."""
        ...


class CacheWriter(Protocol):
    def write(self, layer: int, key: Tensor, value: Tensor) -> None: ...

    def write_states(self, layer: int, start: int, states: States) -> None: ...


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
    shape = Shape(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    return shoal.attend(int(module.layer_idx), query, key, value, shape), None  # type: ignore[arg-type]


AttentionInterface.register(ATTENTION, shoal_attention)


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, allowed: Tensor | None, shape: Shape, sink: Tensor | None = None
) -> Tensor:
    """[B, H, Tq, D] x [B, Hkv, Tk, D]; `allowed` broadcasts to [B, 1, Tq, Tk]; None = causal with Tq == Tk.

    `sink` broadcasts to [B, H, Tq].
    """
    if shape.softcap is None and sink is None:
        grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=allowed, is_causal=allowed is None, scale=shape.scale, enable_gqa=grouped
        )
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = torch.matmul(query, key.transpose(-1, -2)) * shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if allowed is None:
        length = query.shape[2]
        allowed = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~allowed, float("-inf"))
    wide = torch.promote_types(scores.dtype, torch.float32)
    out = torch.matmul(torch.softmax(scores, -1, dtype=wide).to(value.dtype), value)
    if sink is None:
        return out
    # The same as one more logit in the softmax. The sum runs over as many keys as without, so it rounds the same in any
    # batch.
    return out * torch.sigmoid(scores.to(wide).logsumexp(-1) - sink.to(wide)).unsqueeze(-1).to(out.dtype)


@dataclass(frozen=True)
class _Rectangle:
    """Segments as rows of a right-padded rectangle. Indices are into the row of tokens."""

    queries: Tensor  # [S, Lq]
    keys: Tensor  # [S, Lk]
    scatter: Tensor  # [n], the real queries among those of the flattened rectangle
    last_key: Tensor | None  # [S, Lq], the column of each query's own key; None = its own column


def _varlen_takes(query: Tensor, value: Tensor) -> bool:
    """Whether torch's `varlen_attn` supports these heads."""
    size = query.shape[-1]
    in_16_bits = query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)
    return in_16_bits and size % 8 == 0 and size <= 256 and value.shape[-1] == size


@dataclass
class Packed:
    """Train and prefill mode. Tensors are laid out [1, H, T, D] with segments end to end."""

    starts: np.ndarray  # [S+1]
    device: torch.device
    writer: CacheWriter | None = None
    prefixes: np.ndarray | None = None  # [S], the segment that each one continues, or -1; None = no prefixes
    _plans: dict[Any, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.prefixes is None or not (self.prefixes >= 0).any():
            self.prefixes = None
        elif self.writer is not None or (self.prefixes[self.prefixes[self.prefixes >= 0]] >= 0).any():
            raise ValueError("prefixes must not continue other segments, and a prefill has no prefixes")

    @staticmethod
    def planned(plan: Mapping[str, Tensor], longest: tuple[int, int], writer: CacheWriter | None = None) -> Packed:
        """Segments with bounds on the device, as CUDA graphs need them (16-bit dtypes only).

        `longest`: upper bounds of queries and keys per segment. `plan`: the arrays of `bounds` and of `gather`, on
        the device.
        """
        context = Packed(np.zeros(1), plan["starts"].device, writer)
        context._plans["varlen"] = ({"key_starts": plan["starts"], **plan}, *longest)
        return context

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        if self.writer is not None:
            self.writer.write(layer, key[0], value[0])
        if _varlen_takes(query, value) and shape.softcap is None and shape.sink is None:
            return self._varlen(query, key, value, shape)
        return self._padded(query, key, value, shape)

    def mix(self, module: Any, hidden: Tensor) -> Tensor:
        """[1, T, hidden] → [1, T, hidden]; the state begins anew with each segment."""
        if self.prefixes is not None:
            raise ValueError("a state does not continue a prefix elsewhere in the row")
        if self.writer is not None:
            return self._mix_alone(module, hidden, self.writer)
        if "layout" not in self._plans:
            self._plans["layout"] = self._layout()
        rectangles, order = self._plans["layout"]
        pieces = [run(module, hidden[0][r.queries]).flatten(0, 1)[r.scatter] for r in rectangles]
        return torch.cat(pieces)[order].unsqueeze(0)

    def _mix_alone(self, module: Any, hidden: Tensor, writer: CacheWriter) -> Tensor:
        pieces = []
        for start, end in zip(self.starts.tolist(), self.starts[1:].tolist(), strict=False):
            cache = OneLayerCache()
            pieces.append(run(module, hidden[:, start:end], cache))
            writer.write_states(int(module.layer_idx), start, cache.states())
        return torch.cat(pieces, 1)

    def _varlen(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if "varlen" not in self._plans:
            self._plans["varlen"] = self._varlen_plan()
        plan, longest, longest_keys = self._plans["varlen"]
        # torch 2.11 enables grouped heads by default; later releases require the flag.
        extra: dict[str, Any] = {"enable_gqa": True} if _VARLEN_GQA_FLAG else {}
        window = (shape.window - 1, 0) if shape.window is not None else (-1, 0)
        query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
        if "keys" in plan:
            key, value = (take_tokens(x, plan) for x in (key, value))
        # With fewer queries than keys, the kernel aligns the causal mask and the window at the lower right (see
        # torch.nn.attention.bias), so a query comes after all keys of its prefix.
        out = varlen_attn(
            query,
            key,
            value,
            plan["starts"],
            plan["key_starts"],
            longest,
            longest_keys,
            scale=shape.scale,
            window_size=window,
            **extra,
        )
        return out.unsqueeze(0)  # type: ignore[union-attr]

    def _varlen_plan(self) -> tuple[dict[str, Tensor], int, int]:
        arrays, longest, longest_keys = self.bounds
        if "keys" in arrays:
            arrays = arrays | gather(arrays["keys"], int(self.starts[-1]))
        plan = upload(arrays, self.device)
        return {"key_starts": plan["starts"], **plan}, longest, longest_keys

    @cached_property
    def bounds(self) -> tuple[dict[str, np.ndarray], int, int]:
        """Starts of queries; starts and indices of keys if segments share prefixes; most queries, keys of a segment."""
        arrays = {"starts": self.starts.astype(np.int32)}
        longest = longest_keys = int(np.diff(self.starts).max())
        if self.prefixes is not None:
            keys = [self._keys_of(segment) for segment in range(len(self.prefixes))]
            arrays["keys"] = np.concatenate(keys)
            arrays["key_starts"] = np.cumsum([0, *map(len, keys)]).astype(np.int32)
            longest_keys = max(map(len, keys))
        return arrays, longest, longest_keys

    def _keys_of(self, segment: int) -> np.ndarray:
        """Token indices of a segment's keys, in order of position."""
        own = np.arange(self.starts[segment], self.starts[segment + 1])
        prefix = -1 if self.prefixes is None else self.prefixes[segment]
        return own if prefix < 0 else np.concatenate([np.arange(self.starts[prefix], self.starts[prefix + 1]), own])

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        """Segments as rows of right-padded rectangles: under a causal mask, real tokens never attend to padding."""
        if "layout" not in self._plans:
            self._plans["layout"] = self._layout()
        rectangles, order = self._plans["layout"]
        pieces = []
        for number, rectangle in enumerate(rectangles):
            q = query[0][:, rectangle.queries].transpose(0, 1)  # [S, H, Lq, D]
            k, v = (x[0][:, rectangle.keys].transpose(0, 1) for x in (key, value))
            sink = None if shape.sink is None else shape.sink[:, None]
            out = dense_attention(q, k, v, self._allowed(number, rectangle, shape.window), shape, sink)
            pieces.append(out.transpose(1, 2).flatten(0, 1)[rectangle.scatter])
        joined = pieces[0] if len(pieces) == 1 else torch.cat(pieces)[order]
        return joined.unsqueeze(0)  # [1, T, H, D]

    def _layout(self) -> tuple[list[_Rectangle], Tensor]:
        """The rectangles, and the index of each token in their concatenation.

        In training, segments of similar length share a rectangle (segments with a prefix have their own), so padding
        at most doubles a long segment. In a prefill each length has its own rectangle: kernels choose their blocking
        by length, and a prompt must round the same whatever else is in the batch.
        """
        lengths = np.diff(self.starts)
        tails = np.zeros(len(lengths), dtype=bool) if self.prefixes is None else self.prefixes >= 0
        about = 2 * np.maximum(np.ceil(np.log2(np.maximum(lengths, 1))), LEAST_ABOUT)
        classes = lengths if self.writer is not None else about + tails
        members = [np.flatnonzero(classes == kind) for kind in np.unique(classes)]
        order = np.concatenate([np.arange(self.starts[s], self.starts[s + 1]) for part in members for s in part])
        rectangles = [self._rectangle(part, bool(tails[part[0]])) for part in members]
        return rectangles, upload({"order": np.argsort(order)}, self.device)["order"]

    def _rectangle(self, members: np.ndarray, continued: bool) -> _Rectangle:
        lengths = np.diff(self.starts)[members, None]
        columns = np.minimum(np.arange(lengths.max())[None], lengths - 1)
        arrays = {
            "queries": self.starts[members, None] + columns,
            "scatter": np.concatenate([i * columns.shape[1] + np.arange(n) for i, n in enumerate(lengths[:, 0])]),
        }
        if continued:
            keys = [self._keys_of(segment) for segment in members]
            widest = max(map(len, keys))
            arrays["keys"] = np.stack([found[np.minimum(np.arange(widest), len(found) - 1)] for found in keys])
            # Padding repeats the last query: a row whose keys are all masked would be NaN.
            arrays["last_key"] = np.array([[len(found)] for found in keys]) - lengths + columns
        tensors = upload({name: array.astype(np.int64) for name, array in arrays.items()}, self.device)
        return _Rectangle(
            tensors["queries"], tensors.get("keys", tensors["queries"]), tensors["scatter"], tensors.get("last_key")
        )

    def _allowed(self, number: int, rectangle: _Rectangle, window: int | None) -> Tensor | None:
        """The mask for `dense_attention`; None = causal."""
        length = rectangle.keys.shape[1]
        window = None if window is None or window >= length else window
        if rectangle.last_key is None and window is None:
            return None
        if (number, window) not in self._plans:
            columns = torch.arange(length, device=self.device)
            own = columns[:, None] if rectangle.last_key is None else rectangle.last_key[:, None, :, None]
            distance = own - columns
            self._plans[number, window] = (distance >= 0) & (distance < (length if window is None else window))
        return self._plans[number, window]


@dataclass
class Decode:
    """Decode mode: row b holds the token at position `positions[b]` of the sequence in cache slot b."""

    cache: Any  # engine.kv_cache.SlotCache
    positions: Tensor  # [B] long
    key_length: int  # keys read; a multiple of KEY_MULTIPLE above every position
    _allowed: dict[int | None, Tensor] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        keys, values = self.cache.append(layer, self.positions, key[:, :, 0], value[:, :, 0], self.key_length)
        batch, heads, _, dim = query.shape
        kv_heads = keys.shape[1]
        # Query heads that share a key head become its queries, so keys are not repeated.
        folded = query.reshape(batch, kv_heads, heads // kv_heads, dim)
        sink = None if shape.sink is None else shape.sink.view(kv_heads, -1)
        out = dense_attention(folded, keys, values, self._mask(shape.window), shape, sink)
        return out.reshape(batch, 1, heads, value.shape[-1])

    def mix(self, module: Any, hidden: Tensor) -> Tensor:
        """[B, 1, hidden]. Rows without a sequence are advanced too; a prefill replaces their states."""
        return run(module, hidden, self.cache.states.rows(int(module.layer_idx), len(hidden)))

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
