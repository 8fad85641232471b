"""A Hugging Face decoder as Shoal uses it: hidden states from packed rows, and logits from hidden states.

The trainer and the embedded engine hold the same Decoder, so there is one set of parameters. `verify` compares it with
the model's own forward at load time, whatever the architecture.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ModelError
from shoal.models import fp8_linear as hybrid
from shoal.models.attention import ATTENTION, Context, Packed, Shape
from shoal.models.fused import FusedBody
from shoal.models.logprobs import Head
from shoal.models.quantize import held_bytes
from shoal.models.state_layers import OneLayerCache, StateShape, attach, run, shapes_of
from shoal.models.tokenizer import first_line

STATELESS = ("mlp", "moe")  # kinds of layers that see one token at a time
TRY_ON_GPU = "SHOAL_TRY_ON_GPU"  # environment variable


@dataclass(frozen=True)
class LayerShape:
    """Key/value heads, head sizes and attention parameters of one layer, as recorded from the model's forward."""

    heads: int
    key_dim: int
    value_dim: int
    attention: Shape | None = field(default=None, compare=False)
    states: tuple[StateShape, ...] = ()

    @property
    def numbers_per_token(self) -> int:
        return self.heads * (self.key_dim + self.value_dim)

    @property
    def state_bytes(self) -> int:
        """Per sequence, however long."""
        return sum(state.size_bytes for state in self.states)


@dataclass
class _Recorder:
    """Packed attention that records the shape of each layer's keys and values."""

    inner: Packed
    layers: dict[int, LayerShape] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> Tensor:
        known = self.layers.get(layer)
        if (
            known is not None and known.attention is not None
        ):  # the second call would overwrite the keys of the first in the cache
            raise ModelError(f"layer {layer} attends more than once, which Shoal cannot sample")
        states = known.states if known is not None else ()
        self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], shape, states)
        return self.inner.attend(layer, query, key, value, shape)

    def mix(self, module: Any, hidden: Tensor) -> Tensor:
        cache, layer = OneLayerCache(), int(module.layer_idx)
        run(module, hidden[:, : self.inner.starts[1]], cache)
        known = self.layers.get(layer, LayerShape(0, 0, 0))
        if known.states:
            raise ModelError(f"layer {layer} has several state layers, which Shoal cannot sample")
        self.layers[layer] = replace(known, states=shapes_of(cache.states()))
        return self.inner.mix(module, hidden)


class Decoder:
    """`model` may be a plain causal language model or one wrapped by peft."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.fused: FusedBody | None = None  # set by `fused.attach`
        # peft replaces layers inside the model, so the inner model already computes with the adapters.
        self.inner: nn.Module = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
        self.body: nn.Module = self.inner.get_decoder()  # type: ignore[operator]
        self.config = self.inner.config.get_text_config()  # type: ignore[operator,union-attr]
        self.lm_head: nn.Module = self.inner.get_output_embeddings()  # type: ignore[operator]
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self.logit_scale = _logit_scale(self.config)
        self._fp8 = hybrid.scoring_switch(model)
        self.has_states = attach(self.body)
        if not isinstance(self.body, nn.Module) or not isinstance(self.lm_head, nn.Module):
            raise ModelError(f"{type(self.inner).__name__} is not a causal language model with an output head")

    def over(self, model: nn.Module) -> Decoder:
        """A Decoder for a copy of this model."""
        decoder = Decoder(model)
        if self.fused is not None:
            decoder.fused = FusedBody(decoder.body, self.fused.shapes)
        return decoder

    def gathered(self, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run `work` with all weights gathered. Here they always are; a sharded decoder overrides this."""
        return work()

    def recompute(self, on: bool) -> None:
        """Switch activation checkpointing on or off."""
        if self.fused is not None:
            self.fused.recompute = on
        elif on:
            self.inner.gradient_checkpointing_enable()  # type: ignore[operator]
        else:
            self.inner.gradient_checkpointing_disable()  # type: ignore[operator]

    @property
    def name(self) -> str:
        return type(self.inner).__name__

    @property
    def device(self) -> torch.device:
        return self._head_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype: that of the head, since other layers may store quantised weights."""
        return self._head_weight.dtype

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, adapters included."""
        return held_bytes(self.model)

    def scoring(self) -> AbstractContextManager[None]:
        """Around the policy's forward and backward: FP8 products under the fp8-hybrid recipe. Not used for sampling."""
        return hybrid.scoring(self._fp8)

    @property
    def vocab_size(self) -> int:
        return int(self._head_weight.shape[0])

    @property
    def _head_weight(self) -> Tensor:
        return self.lm_head.weight  # type: ignore[return-value]

    @property
    def max_positions(self) -> int | None:
        return self.longrope_limit or getattr(self.config, "max_position_embeddings", None)

    @property
    def longrope_limit(self) -> int | None:
        """The longest supported text of a longrope model; None for other models.

        A single longer text switches the whole batch to other rotary factors, so results would depend on the batch.
        """
        rope = getattr(self.config, "rope_parameters", None) or {}
        if rope.get("rope_type") != "longrope":
            return None
        return rope.get("original_max_position_embeddings") or self.config.original_max_position_embeddings

    @property
    def unverified(self) -> str | None:
        """What this model needs that was never run on a GPU."""
        if self.has_states:
            return "state layers"
        sinks = any(name.endswith(".sinks") for name, _ in self.body.named_parameters())
        return "attention sinks" if sinks else None

    def check_device(self) -> None:
        """Refuse on a GPU what was verified on a CPU only."""
        if self.device.type != "cpu" and self.unverified and os.environ.get(TRY_ON_GPU) != "1":
            raise ModelError(f"{self.name}: {self.unverified} are not yet verified on a GPU; set {TRY_ON_GPU}=1 to try")

    def check_length(self, tokens: int) -> None:
        limit = self.longrope_limit
        if limit is not None and tokens > limit:
            raise ModelError(
                f"{self.name} uses longrope: texts of more than {limit} tokens are not supported, got {tokens}; "
                "lower orch.seq_len (infer.max_model_len in a server, train.sequence_len in SFT)"
            )

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        """[B, T] token ids and positions → last hidden states [B, T, hidden]."""
        if self.fused is not None and isinstance(context, Packed):
            return self.fused.hidden(input_ids, position_ids, context)
        out = self.body(input_ids=input_ids, position_ids=position_ids, use_cache=False, shoal=context)
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] → [..., V] in the model's dtype."""
        logits = self.lm_head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    @property
    def head(self) -> Head:
        product = type(self.lm_head) is nn.Linear and self.lm_head.bias is None
        plain = product and self.softcap is None and self.logit_scale == 1.0
        return Head(self.logits, self.lm_head.weight if plain else None)  # type: ignore[arg-type]

    def pack(self, starts: np.ndarray) -> Packed:
        return Packed(starts, self.device)

    @torch.no_grad()
    def verify(self) -> dict[int, LayerShape]:
        """Compare with the model's own forward on a short probe; returns the KV shape of each layer.

        The probe has two sequences, packed here and batched there, so a model with recurrent state fails the check.
        """
        self.check_device()
        length = 12
        ids = torch.arange(2 * length, device=self.device).view(2, length) * 7 % self.vocab_size
        positions = torch.arange(length, device=self.device).repeat(2)[None]
        training = self.model.training
        self.model.eval()
        try:
            self.inner.set_attn_implementation("eager")  # type: ignore[operator]
            expected = self.inner(input_ids=ids, use_cache=False).logits.flatten(0, 1)
        finally:
            self.inner.set_attn_implementation(ATTENTION)  # type: ignore[operator]
        recorder = _Recorder(self.pack(np.array([0, length, 2 * length])))
        try:
            actual = self.logits(self.hidden(ids.view(1, -1), positions, recorder))[0]
        except ModelError as error:
            raise ModelError(f"{self.name}: {error}") from error
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise ModelError(f"{self.name} cannot run with Shoal's attention: {first_line(error)}") from error
        self.model.train(training)
        layers = recorder.layers
        kinds = getattr(self.config, "layer_types", None) or [""] * self.config.num_hidden_layers
        missing = sum(kind not in STATELESS for kind in kinds) - len(layers)
        if missing:
            raise ModelError(f"{self.name}: {missing} layers use no attention or state that Shoal can reach")
        # In 16-bit dtypes, rounding differences grow with depth: 5e-2 was measured at 28 layers.
        tolerance = 1e-3 if self.dtype in (torch.float32, torch.float64) else 0.15
        if not expected.isfinite().all():
            raise ModelError(
                f"{self.name}: its logits are not finite; the weights are damaged or overflow in {self.dtype}"
            )
        gap = ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)).item()
        if not gap < tolerance:
            raise ModelError(
                f"{self.name}: logits computed by Shoal differ from the model's own forward (relative error {gap:.1e})"
            )
        return layers


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits by `logit_scale`; Granite divides them by `logits_scaling`. None = 1."""
    factors = [getattr(config, name, None) for name in ("logit_scale", "logits_scaling")]
    multiplier, divisor = (1.0 if factor is None else factor for factor in factors)
    if isinstance(multiplier, str) or isinstance(divisor, str):
        raise ModelError(f"{type(config).__name__}: logit_scale {multiplier!r} is not supported")
    return multiplier / divisor
