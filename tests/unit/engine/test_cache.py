"""The cache contains the written values at the written positions."""

from __future__ import annotations

import torch

from shoal.engine.kv_cache import PrefillWriter, SlotCache
from shoal.models.decoder import LayerShape

LAYERS = {0: LayerShape(2, 4, 4), 3: LayerShape(1, 8, 6)}


def make_cache() -> SlotCache:
    return SlotCache(LAYERS, slots=3, length=5, dtype=torch.float32, device=torch.device("cpu"))


def test_shapes_and_size() -> None:
    cache = make_cache()
    assert cache.keys[0].shape == (3, 2, 5, 4) and cache.values[3].shape == (3, 1, 5, 6)
    assert SlotCache.bytes_per_token(LAYERS, torch.bfloat16) == 2 * (2 * (4 + 4) + 1 * (8 + 6))


def test_append_writes_each_row_at_its_own_position() -> None:
    cache = make_cache()
    key, value = torch.rand(2, 2, 4), torch.rand(2, 2, 4)
    keys, values = cache.append(0, torch.tensor([3, 1]), key, value, 4)
    assert keys.shape == (2, 2, 4, 4)
    assert torch.equal(keys[0, :, 3], key[0]) and torch.equal(keys[1, :, 1], key[1])
    assert torch.equal(values[0, :, 3], value[0]) and torch.equal(values[1, :, 1], value[1])
    assert int((keys != 0).sum()) == key.numel(), "and nowhere else"


def test_one_prefill_writes_several_slots() -> None:
    cache = make_cache()
    key, value = torch.rand(2, 4, 4), torch.rand(2, 4, 4)  # [heads, tokens of the row, dim]
    where = (torch.tensor(x) for x in ([1, 1, 3], [2, 2, 0], [0, 2, 1]))
    PrefillWriter(cache, *where, longest=2).write(0, key, value)
    for slot in (0, 2):
        assert torch.equal(cache.keys[0][slot, :, :2], key[:, 1:3])
        assert torch.equal(cache.values[0][slot, :, :2], value[:, 1:3])
    assert cache.keys[0][1].abs().sum() == 0


def test_move_copies_a_slot() -> None:
    cache = make_cache()
    cache.keys[3][2] = torch.rand(1, 5, 8)
    cache.values[3][2] = torch.rand(1, 5, 6)
    cache.move(torch.tensor([2]), torch.tensor([0]), 3)
    assert torch.equal(cache.keys[3][0, :, :3], cache.keys[3][2, :, :3])
    assert torch.equal(cache.values[3][0, :, :3], cache.values[3][2, :, :3])
    assert cache.keys[3][0, :, 3:].abs().sum() == 0
