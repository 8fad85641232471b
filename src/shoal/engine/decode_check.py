"""The load-time check of decode steps: prefill, then single tokens, against the model's own forward.

Windows are set to 8 for the check, so that a short text is longer than each of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ModelError
from shoal.engine.kv_cache import PrefillWriter, SlotCache
from shoal.models.attention import ATTENTION, KEY_MULTIPLE, Decode, Packed, round_up
from shoal.models.decoder import Decoder, LayerShape

WINDOW = 8
PROMPT, TOKENS = 16, 24
ROWS = 8  # more rows than sequences: a decode batch is padded
WINDOW_FIELDS = ("sliding_window", "sliding_window_size", "attention_chunk_size")


@torch.no_grad()
def check_decode(decoder: Decoder, layers: dict[int, LayerShape]) -> None:
    """Raise ModelError if decode steps differ from the model's own forward. Runs on a CPU only.

    On a GPU it was never run, and decode kernels have a check of their own.
    """
    if decoder.device.type != "cpu":
        return
    ids = torch.arange(2 * TOKENS).view(2, TOKENS) * 7 % decoder.vocab_size
    training = decoder.model.training
    decoder.model.eval()
    with _short_windows(decoder), ExitStack() as stack:
        stack.callback(decoder.model.train, training)
        expected = _own_logits(decoder, ids)
        try:
            actual = _decoded(decoder, layers, ids)
        except Exception as error:
            raise ModelError(f"{decoder.name} cannot decode with Shoal's cache: {error}") from error
    tolerance = 1e-3 if decoder.dtype in (torch.float32, torch.float64) else 0.15
    gap = ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-9)).item()
    if not gap < tolerance:
        raise ModelError(f"{decoder.name}: decode steps differ from the model's own forward (relative error {gap:.1e})")


def _own_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    inner: Any = decoder.inner
    try:
        inner.set_attn_implementation("eager")
        return inner(input_ids=ids, use_cache=False).logits[:, PROMPT - 1 :]
    finally:
        inner.set_attn_implementation(ATTENTION)


def _decoded(decoder: Decoder, layers: dict[int, LayerShape], ids: Tensor) -> Tensor:
    """Logits of the last prompt token and of each decoded token, [2, TOKENS - PROMPT + 1, V]."""
    cpu, length = torch.device("cpu"), round_up(TOKENS, KEY_MULTIPLE)
    cache = SlotCache(layers, ROWS, length, decoder.dtype, cpu)
    slots = torch.tensor([0, 2])
    starts = torch.tensor([0, PROMPT])
    writer = PrefillWriter(cache, starts, torch.full((2,), PROMPT), slots, PROMPT)
    positions = torch.arange(PROMPT).repeat(2)[None]
    context = Packed(np.array([0, PROMPT, 2 * PROMPT]), cpu, writer)
    states = decoder.hidden(ids[:, :PROMPT].reshape(1, -1), positions, context)[0]
    found = [decoder.logits(states[starts + PROMPT - 1])]
    for position in range(PROMPT, TOKENS):
        tokens, at = torch.zeros(ROWS, dtype=torch.long), torch.zeros(ROWS, dtype=torch.long)
        tokens[slots], at[slots] = ids[:, position], position
        step = Decode(cache, at, length)
        found.append(decoder.logits(decoder.hidden(tokens[:, None], at[:, None], step)[slots, 0]))
    return torch.stack(found, 1)


@contextmanager
def _short_windows(decoder: Decoder) -> Iterator[None]:
    """Set the windows of all modules and configs to `WINDOW`."""
    holders: list[Any] = [*decoder.inner.modules(), decoder.inner.config, decoder.config]
    holders += [config for module in holders if isinstance(config := vars(module).get("config"), object)]
    changed = []
    for holder in {id(h): h for h in holders if h is not None}.values():
        for name in WINDOW_FIELDS:
            value = vars(holder).get(name) if hasattr(holder, "__dict__") else None
            if isinstance(value, int) and value > WINDOW:
                changed.append((holder, name, value))
                vars(holder)[name] = WINDOW
    try:
        yield
    finally:
        for holder, name, value in changed:
            vars(holder)[name] = value
