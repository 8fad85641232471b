"""How many sequences fit: what was asked for, what memory allows, and nothing that would not work."""

from __future__ import annotations

import os

import pytest

from shoal.errors import HardwareError
from shoal.trainer.memory import CPU_SHARE, engine_slots
from support.models import layer_shapes, small_decoder

DECODER = small_decoder()
LAYERS = layer_shapes(DECODER)
# Two layers of two heads, keys and values of 32 fp32 numbers; contexts are padded to 64.
BYTES_PER_SLOT = 2 * 2 * (32 + 32) * 4 * 128


def limit_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    sizes = {"SC_AVPHYS_PAGES": free_bytes // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


@pytest.mark.parametrize(("wanted", "slots"), ((1, 8), (8, 8), (9, 16), (64, 64)))
def test_what_is_wanted_rounded_up_to_whole_rows(wanted: int, slots: int) -> None:
    assert engine_slots(DECODER, LAYERS, wanted, 128, None) == slots


def test_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, int(30 * BYTES_PER_SLOT / CPU_SHARE))
    assert engine_slots(DECODER, LAYERS, 64, 128, None) == 24
    assert engine_slots(DECODER, LAYERS, 64, 120, None) == 24, "a context is padded to whole blocks of keys"
    assert engine_slots(DECODER, LAYERS, 64, 128, 0.5) == 56


def test_too_little_memory_names_a_setting_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, int(7 * BYTES_PER_SLOT / CPU_SHARE))
    with pytest.raises(HardwareError, match=r"8 sequences of 128 tokens .* lower orch.seq_len"):
        engine_slots(DECODER, LAYERS, 64, 128, None)
