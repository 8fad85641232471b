"""The attention function against a loop over tokens written out in float64."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.engine.cache import PrefillWriter, SlotCache
from shoal.errors import ModelError
from shoal.models.attention import Decode, Packed, Shape, round_up, shoal_attention
from shoal.models.decoder import LayerShape
from support.models import small_decoder, small_model

HEADS, KV_HEADS, DIM = 4, 2, 6
LENGTHS = (5, 1, 9, 3)
STARTS = np.concatenate([[0], np.cumsum(LENGTHS)])
CPU = torch.device("cpu")
SHAPES = {
    "plain": Shape(0.4, None, None),
    "window": Shape(0.4, 3, None),
    "window of one": Shape(0.4, 1, None),
    "wide window": Shape(0.4, 100, None),
    "softcap": Shape(0.4, None, 1.5),
    "both": Shape(0.4, 3, 1.5),
}


def random_qkv(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(LENGTHS)
    return tuple(
        torch.randn(1, heads, tokens, DIM, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )  # type: ignore[return-value]


def written_out(query: Tensor, key: Tensor, value: Tensor, shape: Shape) -> np.ndarray:
    """[T, H, D]: each token looks at its own segment, up to itself and no further back than the window."""
    out = np.zeros((query.shape[2], HEADS, DIM))
    for start, end in pairwise(STARTS):
        for t in range(start, end):
            first = start if shape.window is None else max(start, t - shape.window + 1)
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = (key[0, shared, first : t + 1] @ query[0, head, t]).numpy() * shape.scale
                if shape.softcap is not None:
                    scores = np.tanh(scores / shape.softcap) * shape.softcap
                shares = np.exp(scores - scores.max())
                out[t, head] = (shares / shares.sum()) @ value[0, shared, first : t + 1].numpy()
    return out


@pytest.mark.parametrize("name", SHAPES)
def test_train_mode(name: str) -> None:
    query, key, value = random_qkv()
    out = Packed(STARTS, CPU).attend(0, query, key, value, SHAPES[name])
    np.testing.assert_allclose(out[0], written_out(query, key, value, SHAPES[name]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_then_decode(name: str) -> None:
    """All but the last token of each segment as a prefill, the last one against the cache."""
    query, key, value = random_qkv(1)
    expected = written_out(query, key, value, SHAPES[name])
    cache = SlotCache({0: LayerShape(KV_HEADS, DIM, DIM)}, len(LENGTHS), 16, torch.float64, CPU)
    known = [(slot, start, length - 1) for slot, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=False))]
    tokens = np.concatenate([np.arange(start, start + n) for _, start, n in known])
    starts = np.concatenate([[0], np.cumsum([n for *_, n in known if n])])
    writer = PrefillWriter(
        cache,
        torch.arange(len(tokens)),
        torch.tensor(np.concatenate([np.full(n, slot) for slot, _, n in known])),
        torch.tensor(np.concatenate([np.arange(n) for *_, n in known])),
    )
    out = Packed(starts, CPU, writer).attend(
        0, query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], SHAPES[name]
    )
    np.testing.assert_allclose(out[0], expected[tokens], rtol=0, atol=1e-12)

    last = torch.tensor(STARTS[1:] - 1)
    context = Decode(cache, torch.tensor([n - 1 for n in LENGTHS]), 12)
    q, k, v = (x[0, :, last].transpose(0, 1)[:, :, None] for x in (query, key, value))
    out = context.attend(0, q, k, v, SHAPES[name])
    np.testing.assert_allclose(out[:, 0], expected[last], rtol=0, atol=1e-12)


def test_what_lies_behind_the_position_in_the_cache_is_not_seen() -> None:
    query, key, value = (torch.randn(1, heads, 1, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for rubbish in (0.0, 1e6):
        cache = SlotCache({0: LayerShape(KV_HEADS, DIM, DIM)}, 1, 8, torch.float32, CPU)
        cache.keys[0][:, :, 4:] = rubbish
        cache.values[0][:, :, 4:] = rubbish
        found.append(Decode(cache, torch.tensor([3]), 8).attend(0, query, key, value, SHAPES["plain"]))
    assert torch.equal(found[0], found[1])


def test_a_layer_with_a_context_only() -> None:
    query, key, value = random_qkv()
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="without a context"):
        shoal_attention(layer, query, key, value, None)
    with pytest.raises(ModelError, match="attention sinks"):
        shoal_attention(layer, query, key, value, None, shoal=Packed(STARTS, CPU), s_aux=torch.zeros(HEADS))
    out, weights = shoal_attention(layer, query, key, value, None, shoal=Packed(STARTS, CPU))
    assert weights is None
    np.testing.assert_allclose(out[0], written_out(query, key, value, Shape(DIM**-0.5, None, None)), rtol=0, atol=1e-12)


def test_round_up() -> None:
    assert [round_up(value, 8) for value in (0, 1, 8, 9)] == [0, 8, 8, 16]


def test_verify_reports_the_shape_of_every_layer() -> None:
    for architecture, dim in (("qwen3", 32), ("qwen2", 16)):
        layers = small_decoder(architecture).verify()
        assert {i: (s.heads, s.key_dim, s.value_dim) for i, s in layers.items()} == {0: (2, dim, dim), 1: (2, dim, dim)}
        assert layers[0].numbers_per_token == 4 * dim


def test_verify_leaves_the_model_as_it_was() -> None:
    from shoal.models.decoder import Decoder

    model = small_model("qwen3")
    for training in (True, False):
        model.train(training)
        Decoder(model).verify()
        assert model.training is training and model.config._attn_implementation == "shoal"
