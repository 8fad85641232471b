"""The load-time check of decode steps detects errors that a check of one forward pass cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.families import build
from shoal.core.errors import ModelError
from shoal.engine.decode_check import check_decode
from shoal.models.attention import Decode
from shoal.models.decoder import Decoder
from shoal.models.state_layers import StateCache
from support.models import small_model


def windowed() -> Decoder:
    """A window far larger than the length of the check."""
    return Decoder(small_model("mistral", sliding_window=100))


def test_correct_model_passes_and_keeps_its_window() -> None:
    decoder = windowed()
    check_decode(decoder, decoder.verify())
    assert decoder.config.sliding_window == 100
    assert not decoder.model.training


def test_ignored_attention_window_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = windowed()
    layers = decoder.verify()
    mask = Decode._mask
    monkeypatch.setattr(Decode, "_mask", lambda self, window: mask(self, None))
    with pytest.raises(ModelError, match="decode"):
        check_decode(decoder, layers)


@pytest.mark.parametrize("family", ["lfm2", "qwen3_5_text"])
def test_unwritten_state_is_detected(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(build(family))
    layers = decoder.verify()
    check_decode(decoder, layers)

    def forget(self: Any, layer: int, slots: torch.Tensor, states: Any) -> None:
        pass

    monkeypatch.setattr(StateCache, "write", forget)
    with pytest.raises(ModelError, match="decode"):
        check_decode(decoder, layers)
