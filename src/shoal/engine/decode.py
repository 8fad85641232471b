"""Decode forwards on the trainer's own parameters; the engine picks one when it starts.

`FusedDecode` (GPU): Llama-like models with fused kernels. Query, key and value weights (and gate and up) are joined in
memory, and each parameter becomes a view, so that one product reads them all. `make_fused` returns it only if its
layers agree with the Hugging Face modules in fp32. `KernelDecode`: the modules with the Triton attention kernel.
`PlainDecode` (CPU, fp32): the same products in plain torch. Otherwise the engine calls the modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.engine.joined_linear import JoinedLinear, can_join, copy_adapters
from shoal.engine.kv_cache import SlotCache
from shoal.models import kernels
from shoal.models.attention import Decode, Shape
from shoal.models.decoder import Decoder, LayerShape
from shoal.models.fused import (
    FAMILIES,
    TURNS_BY_LENGTH,
    LayerNorms,
    compared,
    fp32_copy,
    fused_path,
    own_layer,
    probe,
    probed,
    relative_gap,
    rope_of,
    turns,
    turns_by_length,
    why_not,
)


@dataclass
class KernelDecode:
    """Decode mode with the Triton kernel: each row reads only its own keys, whatever the longest row of the batch."""

    cache: SlotCache
    positions: Tensor  # [B]
    longest: int  # upper bound on keys per row

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        from shoal.engine.kernels.attention import decode_attention, launch_for

        heads = (query[:, :, 0].contiguous(), key[:, :, 0].contiguous(), value[:, :, 0].contiguous())
        cache = (self.cache.keys[layer], self.cache.values[layer])
        launch = launch_for(len(query) * key.shape[1], query.shape[3], self.longest)
        return decode_attention(heads, cache, self.positions, shape, launch).unsqueeze(1)  # [B, 1, H, D]

    def mix(self, module: Any, hidden: Tensor) -> Tensor:
        raise NotImplementedError("layers with a state have no decode kernel; see why_no_graphs")


def why_no_graphs(decoder: Decoder, cache: SlotCache) -> str | None:
    """Why decode steps of this model cannot be CUDA graphs on this device, or None if they can."""
    if not kernels.available(decoder.device.type == "cuda"):
        return "there is no Triton for this device"
    if turns_by_length(decoder):
        return TURNS_BY_LENGTH
    if decoder.unverified:
        return f"the decode kernel does not support {decoder.unverified}"
    from shoal.engine.kernels.attention import supports

    heads = decoder.config.num_attention_heads
    for keys, values in zip(cache.keys.values(), cache.values.values(), strict=True):
        if not supports(heads, keys.shape[1], keys.shape[3], values.shape[3]):
            return f"the decode kernel does not support head_dim {keys.shape[3]} (keys) and {values.shape[3]} (values)"
    return None


class PlainDecode:
    """`step` replaces the forward of the Hugging Face body in decode mode."""

    def __init__(self, decoder: Decoder, shapes: Mapping[int, LayerShape]) -> None:
        self._body: Any = decoder.body
        self._layers = [fuse_layer(layer, attention_of(shapes, i)) for i, layer in enumerate(self._body.layers)]

    def step(self, tokens: Tensor, context: Decode) -> Tensor:
        """[B] tokens at the context's positions → [B, hidden]."""
        x = self._body.embed_tokens(tokens)
        cos, sin = (t[:, 0, None] for t in self._body.rotary_emb(x[:, None], context.positions[:, None]))  # [B, 1, D]
        residual = x
        for layer in self._layers:
            x = self._attend_plain(layer, _norm(layer.module.input_layernorm, residual), (cos, sin), context)
            residual = residual + x
            gate, up = layer.gate_up(_norm(layer.module.post_attention_layernorm, residual)).chunk(2, -1)
            residual = residual + layer.down(F.silu(gate) * up)
        return _norm(self._body.norm, residual)

    def _attend_plain(self, layer: FusedLayer, x: Tensor, rope: tuple[Tensor, Tensor], context: Decode) -> Tensor:
        attention = layer.module.self_attn
        keys = context.cache.keys[layer.number]
        key_heads, dim = keys.shape[1], keys.shape[3]
        parts = layer.qkv(x).view(len(x), -1, dim)
        query_heads = parts.shape[1] - 2 * key_heads
        turned = parts[:, : query_heads + key_heads]
        if hasattr(attention, "q_norm"):
            gains = (attention.q_norm.weight.expand(query_heads, -1), attention.k_norm.weight.expand(key_heads, -1))
            turned = F.rms_norm(turned, (dim,), None, attention.q_norm.variance_epsilon) * torch.cat(gains)
        if turns(attention):
            (cos, sin), half = rope, dim // 2
            turned = turned * cos + torch.cat([-turned[..., half:], turned[..., :half]], -1) * sin
        mixed = context.attend(
            layer.number,
            turned[:, :query_heads, None],
            turned[:, query_heads:, None],
            parts[:, query_heads + key_heads :, None],
            layer.shape,
        )
        return layer.out(mixed.flatten(1))


def _norm(module: torch.nn.Module, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)  # type: ignore[arg-type]


@torch.no_grad()
def make_plain(decoder: Decoder, shapes: Mapping[int, LayerShape], cache: SlotCache) -> PlainDecode | None:
    """The plain path for fp32 on a CPU, if the model's family is known and the path agrees with its modules."""
    if decoder.device.type != "cpu" or decoder.dtype != torch.float32 or not _plain(decoder):
        return None
    plain = PlainDecode(decoder, shapes)
    rows = min(8, cache.slots)
    tokens = torch.arange(rows) * 13 % decoder.vocab_size
    positions = torch.arange(rows) * (cache.length - 1) // max(1, rows - 1)
    expected = decoder.hidden(tokens[:, None], positions[:, None], Decode(cache, positions, cache.length))[:, 0]
    actual = plain.step(tokens, Decode(cache, positions, cache.length))
    for tensor in (*cache.keys.values(), *cache.values.values()):
        tensor[:rows] = 0
    gap = float((actual - expected).norm() / expected.norm().clamp_min(1e-9))
    return plain if gap < 1e-5 else None


def _plain(decoder: Decoder) -> bool:
    if decoder.name not in FAMILIES or getattr(decoder.config, "hidden_act", "") != "silu":
        return False
    layers: Any = decoder.body.layers
    plain = all(type(module) is nn.Linear for layer in layers for module in linears(layer))
    return plain and all(layer.mlp.gate_proj.bias is None for layer in layers)


PROBE_ROWS, PROBE_KEYS = 8, 64


@dataclass
class FusedLayer:
    module: Any
    number: int
    shape: Shape
    qkv: JoinedLinear
    out: JoinedLinear
    gate_up: JoinedLinear
    down: JoinedLinear

    @property
    def products(self) -> tuple[JoinedLinear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


def fuse_layer(layer: Any, shape: Shape) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        layer,
        int(attention.layer_idx),
        shape,
        JoinedLinear([attention.q_proj, attention.k_proj, attention.v_proj]),
        JoinedLinear([attention.o_proj]),
        JoinedLinear([mlp.gate_proj, mlp.up_proj]),
        JoinedLinear([mlp.down_proj]),
    )


@dataclass(frozen=True)
class Tables:
    """Rotary cos and sin of every position of the cache, [length, D] each."""

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
        """Copy the current weights of the active adapters."""
        copy_adapters(self._adapted)


@dataclass(frozen=True)
class Step:
    tables: Tables
    cache: SlotCache
    positions: Tensor  # [B]
    longest: int = 512  # upper bound on keys per row


def decode_layer(layer: FusedLayer, x: Tensor | None, residual: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    """Run one layer. `x`: the previous layer's output (or its parts), not yet added to `residual`; None at first."""
    normed = _normed(x, residual, layer.module.input_layernorm)
    mixed = _in_parts(layer.out, _attend(layer, layer.qkv(normed), step))
    normed = _normed(mixed, residual, layer.module.post_attention_layernorm)
    return _in_parts(layer.down, _gate(layer.gate_up, normed)), residual


def _normed(x: Tensor | None, residual: Tensor, norm: Any) -> Tensor:
    """The norm of residual + x, which replaces residual in place."""
    from shoal.engine.kernels.products import sum_norm_
    from shoal.models.kernels.elementwise import add_norm_

    if x is None:
        return add_norm_(residual, None, norm.weight, norm.variance_epsilon)
    add = sum_norm_ if x.dim() == 3 else add_norm_
    return add(x, residual, norm.weight, norm.variance_epsilon)


def _gate(gate_up: JoinedLinear, x: Tensor) -> Tensor:
    from shoal.engine.kernels.products import gated, gated_tile
    from shoal.models.kernels.elementwise import swiglu

    tile = gated_tile(len(x), gate_up.weight) if gate_up.plain else None
    return swiglu(*gate_up(x).chunk(2, -1)) if tile is None else gated(x, gate_up.weight, tile)


def _in_parts(product: JoinedLinear, x: Tensor) -> Tensor:
    """The product [B, hidden], or partial products [splits, B, hidden] to be summed."""
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
    """The fused path if the model supports it and it agrees with the modules, and a description of the result."""
    reason = why_not(decoder) or _reason_not_joined(decoder)
    if reason is None:
        gap, reason = compared(decoder, lambda: _gap(decoder, shapes))
        if reason is None:
            return FusedDecode(decoder, shapes, cache), fused_path(gap, decoder)
    return None, reason


def _reason_not_joined(decoder: Decoder) -> str | None:
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
    """The largest relative error of a layer's update against its own module, on a small cache in fp32."""
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
        around = LayerNorms(tables.cos[positions], tables.sin[positions], Decode(cache, positions, PROBE_KEYS))
        expected = own_layer(twin, x[:, None], positions[:, None], around)[:, 0] - x
        layer = fuse_layer(twin, attention_of(shapes, index))
        copy_adapters(layer.products)
        added, residual = decode_layer(layer, None, x.clone(), Step(tables, cache, positions))
        whole = added.sum(0) if added.dim() == 3 else added
        worst = max(worst, relative_gap(residual + whole - x, expected))
    return worst
