"""The decode forward of Llama-like models in few kernels, on the trainer's own parameters.

Query, key and value weights (and gate and up) are laid side by side once, and each parameter becomes a view of its
rows: one matrix product reads them together, while optimizer and checkpoint still see the originals. Adapters follow
their product as a second, thin one. `make_fused` hands this out only if layers agree with their Hugging Face modules
in fp32 on a small cache; otherwise the modules decode.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.engine.cache import SlotCache
from shoal.engine.linear import Joined, can_join, copy_adapters
from shoal.models.attention import Decode, Shape
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.fused import (
    TURNS_BY_LENGTH,
    Around,
    compared,
    fp32_copy,
    own_layer,
    probe,
    probed,
    relative_gap,
    rope_of,
    turns,
    turns_by_length,
    why_not,
)

PROBE_ROWS, PROBE_KEYS = 8, 64


@dataclass
class FusedLayer:
    module: Any
    number: int
    shape: Shape
    qkv: Joined
    out: Joined
    gate_up: Joined
    down: Joined

    @property
    def products(self) -> tuple[Joined, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def fuse_layer(layer: Any, shape: Shape) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        layer,
        int(attention.layer_idx),
        shape,
        Joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        Joined([attention.o_proj]),
        Joined([mlp.gate_proj, mlp.up_proj]),
        Joined([mlp.down_proj]),
    )


@dataclass(frozen=True)
class Tables:
    """cos and sin of every position of the cache, [length, D] each."""

    cos: Tensor
    sin: Tensor

    @staticmethod
    def of(decoder: Decoder, length: int, dtype: torch.dtype) -> Tables:
        positions = torch.arange(length, device=decoder.device)[None]
        like = torch.zeros(1, 1, dtype=dtype, device=decoder.device)
        return Tables(*rope_of(decoder.body, like, positions))


class FusedDecode:
    """One decode step: [B] tokens at [B] positions → last hidden states [B, hidden]."""

    def __init__(self, decoder: Decoder, shapes: Mapping[int, LayerShape], cache: SlotCache) -> None:
        self._body: Any = decoder.body
        self._cache = cache
        self._tables = Tables.of(decoder, cache.length, decoder.dtype)
        self._layers = [fuse_layer(layer, attention_of(shapes, i)) for i, layer in enumerate(self._body.layers)]
        self._adapted = [product for layer in self._layers for product in layer.products if product.adapted]

    def hidden(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        residual = self._body.embed_tokens(tokens)
        x = None
        for layer in self._layers:
            x, residual = decode_layer(layer, x, residual, Step(self._tables, self._cache, positions, longest))
        assert x is not None
        return _normed(x, residual, self._body.norm)

    def copy_adapters(self) -> None:
        """Take up what the active adapters have become."""
        copy_adapters(self._adapted)


@dataclass(frozen=True)
class Step:
    tables: Tables
    cache: SlotCache
    positions: Tensor  # [B]
    longest: int = 512  # keys of any row at most


def decode_layer(layer: FusedLayer, x: Tensor | None, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """`x` is what the last layer has still to add to the residual (None before the first), perhaps in parts."""
    normed = _normed(x, residual, layer.module.input_layernorm)
    mixed = _in_parts(layer.out, _attend(layer, layer.qkv(normed), step))
    normed = _normed(mixed, residual, layer.module.post_attention_layernorm)
    return _in_parts(layer.down, _gate(layer.gate_up, normed)), residual


def _normed(x: Tensor | None, residual: Tensor, norm: Any) -> Tensor:
    """The norm of residual + x, which replaces residual in place."""
    from shoal.engine.kernels.products import sum_norm_
    from shoal.models.kernels.norm import add_norm_

    if x is None:
        return add_norm_(residual, None, norm.weight, norm.variance_epsilon)
    add = sum_norm_ if x.dim() == 3 else add_norm_
    return add(x, residual, norm.weight, norm.variance_epsilon)


def _gate(gate_up: Joined, x: Tensor) -> Tensor:
    from shoal.engine.kernels.products import gated, gated_tile
    from shoal.models.kernels.swiglu import swiglu

    tile = gated_tile(len(x), gate_up.weight) if gate_up.plain else None
    return swiglu(*gate_up(x).chunk(2, -1)) if tile is None else gated(x, gate_up.weight, tile)


def _in_parts(product: Joined, x: Tensor) -> Tensor:
    """[B, hidden], or in parts [splits, B, hidden] whose sum it is."""
    from shoal.engine.kernels.products import split_product, splits_of

    splits = splits_of(len(x), product.weight) if product.plain else 1
    return product(x) if splits == 1 else split_product(x, product.weight, splits)


def _attend(layer: FusedLayer, qkv: Tensor, step: Step) -> Tensor:
    from shoal.engine.kernels.attention import HeadForm, decode_attention, launch_for

    attention, number = layer.module.self_attn, layer.number
    cache = (step.cache.keys[number], step.cache.values[number])
    key_heads, dim = cache[0].shape[1], cache[0].shape[3]
    heads = qkv.view(len(qkv), -1, dim)
    query_heads = heads.shape[1] - 2 * key_heads
    parts = heads.split([query_heads, key_heads, key_heads], 1)
    norms: tuple[Any, ...] = ()
    if hasattr(attention, "q_norm"):
        norms = (attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.variance_epsilon)
    form = HeadForm(step.tables.cos, step.tables.sin, *norms) if turns(attention) else None
    launch = launch_for(len(qkv) * key_heads, dim, step.longest)
    return decode_attention(parts, cache, step.positions, layer.shape, launch, form).flatten(1)  # type: ignore[arg-type]


def make_fused(decoder: Decoder, shapes: Mapping[int, LayerShape], cache: SlotCache) -> tuple[FusedDecode | None, str]:
    """The fused path if the model is of a known family and both paths agree on it; and the reason in words."""
    reason = why_not(decoder) or _why_not_joined(decoder)
    if reason is None:
        gap, reason = compared(decoder, lambda: _gap(decoder, shapes))
        if reason is None:
            return FusedDecode(decoder, shapes, cache), f"few kernels, {gap:.0e} from {decoder.name}'s own in fp32"
    return None, reason


def _why_not_joined(decoder: Decoder) -> str | None:
    if turns_by_length(decoder):
        return TURNS_BY_LENGTH
    body: Any = decoder.body
    for layer in body.layers:
        for module in linears(layer):
            if not can_join(module):
                return f"{type(module).__name__} is not a plain linear layer or an adapter on one"
    return None


def linears(layer: Any) -> Sequence[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    inner = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    return (*inner, mlp.gate_proj, mlp.up_proj, mlp.down_proj)


def attention_of(shapes: Mapping[int, LayerShape], index: int) -> Shape:
    shape = shapes[index].attention
    assert shape is not None
    return shape


@torch.no_grad()
def _gap(decoder: Decoder, shapes: Mapping[int, LayerShape]) -> float:
    """The largest relative gap of what a layer adds, fused and by its own module, over a small cache in fp32."""
    body: Any = decoder.body
    device = decoder.device
    positions = torch.arange(PROBE_ROWS, device=device) * (PROBE_KEYS - 1) // (PROBE_ROWS - 1)
    tables = Tables.of(decoder, PROBE_KEYS, torch.float32)
    worst = 0.0
    for index in probed(body.layers, {i: attention_of(shapes, i) for i in shapes}):
        twin: Any = fp32_copy(body.layers[index])
        cache = SlotCache({index: shapes[index]}, PROBE_ROWS, PROBE_KEYS, torch.float32, device)
        filled = torch.randn(cache.keys[index].shape, generator=torch.Generator().manual_seed(index))
        for tensor in (cache.keys[index], cache.values[index]):
            tensor.copy_(filled)
        x = probe(PROBE_ROWS, decoder)
        around = Around(tables.cos[positions], tables.sin[positions], Decode(cache, positions, PROBE_KEYS))
        expected = own_layer(twin, x[:, None], positions[:, None], around)[:, 0] - x
        layer = fuse_layer(twin, attention_of(shapes, index))
        copy_adapters(layer.products)
        added, residual = decode_layer(layer, None, x.clone(), Step(tables, cache, positions))
        whole = added.sum(0) if added.dim() == 3 else added
        worst = max(worst, relative_gap(residual + whole - x, expected))
    return worst
