"""The attention function against a loop over tokens in float64."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.engine.kv_cache import PrefillWriter, SlotCache
from shoal.models import attention
from shoal.models.attention import (
    Decode,
    Packed,
    Shape,
    dense_attention,
    gather,
    round_up,
    shoal_attention,
    take_tokens,
)
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


def written_out(
    query: Tensor, key: Tensor, value: Tensor, shape: Shape, prefixes: Sequence[int] | None = None
) -> np.ndarray:
    """[T, H, D]: each token attends to its segment and its prefix, up to itself and within the window."""
    out = np.zeros((query.shape[2], HEADS, DIM))
    segments = [list(range(start, end)) for start, end in pairwise(STARTS)]
    for segment, prefix in zip(segments, prefixes or [-1] * len(segments), strict=True):
        before = segments[prefix] if prefix >= 0 else []
        for t in segment:
            seen = [*before, *range(segment[0], t + 1)]
            seen = seen if shape.window is None else seen[-shape.window :]
            for head in range(HEADS):
                shared = head // (HEADS // KV_HEADS)
                scores = (key[0, shared, seen] @ query[0, head, t]).numpy() * shape.scale
                if shape.softcap is not None:
                    scores = np.tanh(scores / shape.softcap) * shape.softcap
                shares = np.exp(scores - scores.max())
                out[t, head] = (shares / shares.sum()) @ value[0, shared, seen].numpy()
    return out


@pytest.fixture(params=(0, attention.LEAST_ABOUT), ids=("rectangles", "one rectangle"))
def _rectangles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """All lengths here are similar, unless a test changes this."""
    monkeypatch.setattr(attention, "LEAST_ABOUT", request.param)


@pytest.mark.usefixtures("_rectangles")
@pytest.mark.parametrize("name", SHAPES)
def test_train_mode(name: str) -> None:
    query, key, value = random_qkv()
    out = Packed(STARTS, CPU).attend(0, query, key, value, SHAPES[name])
    np.testing.assert_allclose(out[0], written_out(query, key, value, SHAPES[name]), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("_rectangles")
@pytest.mark.parametrize("prefixes", ([-1, 0, 0, 0], [-1, -1, 1, 0], [-1, -1, -1, 2]), ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_segments_that_continue_another(name: str, prefixes: list[int]) -> None:
    query, key, value = random_qkv()
    out = Packed(STARTS, CPU, prefixes=np.array(prefixes)).attend(0, query, key, value, SHAPES[name])
    expected = written_out(query, key, value, SHAPES[name], prefixes)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", SHAPES)
def test_gradient_of_a_prefix_is_that_of_its_copies(name: str) -> None:
    """Against the same tokens with a copy of the prefix before each segment that continues it."""
    taken = [np.arange(a, b) for a, b in pairwise(STARTS)]
    whole = [taken[0], np.concatenate([taken[0], taken[1]]), np.concatenate([taken[0], taken[2]]), taken[3]]
    copied, starts = np.concatenate(whole), np.concatenate([[0], np.cumsum([len(w) for w in whole])])
    own = np.concatenate([np.arange(end - len(t), end) for end, t in zip(starts[1:], taken, strict=True)])
    upstream = torch.randn(sum(LENGTHS), HEADS, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def gradient(shared: bool) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in random_qkv(2)]
        if shared:
            out = Packed(STARTS, CPU, prefixes=np.array([-1, 0, 0, -1])).attend(0, *leaves, SHAPES[name])[0]  # type: ignore[arg-type]
        else:
            out = Packed(starts, CPU).attend(0, *(x[:, :, copied] for x in leaves), SHAPES[name])[0][own]  # type: ignore[arg-type]
        return list(torch.autograd.grad(out, leaves, upstream))

    for one, other in zip(gradient(True), gradient(False), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def varlen_by_hand(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, **how: Any) -> Tensor:
    """The computation of the GPU kernel: [T, H, D], queries and keys of a segment aligned at their ends."""
    out = []
    for (start, end), (first, last) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        query, key, value = (x.transpose(0, 1)[None] for x in (q[start:end], k[first:last], v[first:last]))
        behind = torch.arange(last - first - (end - start), last - first)[:, None] - torch.arange(last - first)
        left, right = how["window_size"]
        seen = (behind >= -right) & ((behind <= left) if left >= 0 else True)
        out.append(dense_attention(query, key, value, seen, Shape(how["scale"], None, None))[0].transpose(0, 1))
    return torch.cat(out)


@pytest.mark.parametrize("prefixes", (None, [-1, 0, 0, 0], [-1, -1, 1, 0]), ids=str)
@pytest.mark.parametrize("name", ("plain", "window", "window of one", "wide window"))
def test_varlen_kernel_arguments(name: str, prefixes: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/parity/test_gpu_prefix.py tests the kernel itself."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_hand)
    query, key, value = random_qkv()
    context = Packed(STARTS, CPU, prefixes=None if prefixes is None else np.array(prefixes))
    out = context._varlen(query, key, value, SHAPES[name])
    expected = written_out(query, key, value, SHAPES[name], prefixes)
    np.testing.assert_allclose(out[0], expected, rtol=0, atol=1e-12)


def test_gradients_of_a_shared_token_are_added_up_in_fp32() -> None:
    """In bf16 a sum of ones stops at 256: from there half the step is 1."""
    tokens = torch.zeros(2, 3, dtype=torch.bfloat16, requires_grad=True)
    take_tokens(tokens, plan_of([0] * 300 + [1], 2)).sum().backward()
    assert tokens.grad is not None and tokens.grad.tolist() == [[300.0] * 3, [1.0] * 3]
    wide = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: take_tokens(x, plan_of([3, 0, 3, 1, 3], 5)), (wide,))


def plan_of(keys: list[int], tokens: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(array) for name, array in gather(np.array(keys), tokens).items()}


def test_copies_are_listed_token_by_token() -> None:
    plan = plan_of([3, 0, 3, 1, 3], 5)
    assert plan["copies"].tolist() == [1, 3, 0, 2, 4] and plan["copy_starts"].tolist() == [0, 1, 2, 2, 5, 5]


def test_prefixes_of_prefixes_and_in_a_prefill_are_refused() -> None:
    with pytest.raises(ValueError, match="prefixes must not continue"):
        Packed(STARTS, CPU, prefixes=np.array([-1, 0, 1, -1]))
    cache = SlotCache({0: LayerShape(KV_HEADS, DIM, DIM)}, 1, 16, torch.float64, CPU)
    writer = PrefillWriter(cache, *(torch.zeros(1, dtype=torch.long) for _ in range(3)), longest=0)
    with pytest.raises(ValueError, match="a prefill has no prefixes"):
        Packed(STARTS, CPU, writer, np.array([-1, 0, 0, -1]))


def test_training_padding_is_below_twice_the_segment_length() -> None:
    """One segment of 2,000 tokens and sixty of 50 in one rectangle would be twenty-four times their number."""
    starts = np.concatenate([[0], np.cumsum([2000, 1100, *[50] * 60, 130])])
    rectangles, order = Packed(starts, CPU)._layout()
    assert sorted(tuple(rectangle.queries.shape) for rectangle in rectangles) == [(1, 130), (2, 2000), (60, 50)]
    assert sorted(order.tolist()) == list(range(starts[-1]))


@pytest.mark.parametrize("name", SHAPES)
def test_row_without_shared_prefix_is_unchanged(name: str) -> None:
    query, key, value = random_qkv()
    plain, asked = (
        Packed(STARTS, CPU, prefixes=prefixes).attend(0, query, key, value, SHAPES[name])
        for prefixes in (None, np.full(len(LENGTHS), -1))
    )
    assert torch.equal(plain, asked)


@pytest.mark.parametrize("name", SHAPES)
def test_prefill_then_decode(name: str) -> None:
    """All but the last token of each segment as a prefill, the last one with the cache."""
    query, key, value = random_qkv(1)
    expected = written_out(query, key, value, SHAPES[name])
    cache = SlotCache({0: LayerShape(KV_HEADS, DIM, DIM)}, len(LENGTHS), 16, torch.float64, CPU)
    known = [(slot, start, length - 1) for slot, (start, length) in enumerate(zip(STARTS, LENGTHS, strict=False))]
    tokens = np.concatenate([np.arange(start, start + n) for _, start, n in known])
    starts = np.concatenate([[0], np.cumsum([n for *_, n in known if n])])
    lengths, slots = (torch.tensor(x) for x in zip(*((n, slot) for slot, _, n in known), strict=True))
    writer = PrefillWriter(cache, lengths.cumsum(0) - lengths, lengths, slots, int(lengths.max()))
    out = Packed(starts, CPU, writer).attend(
        0, query[:, :, tokens], key[:, :, tokens], value[:, :, tokens], SHAPES[name]
    )
    np.testing.assert_allclose(out[0], expected[tokens], rtol=0, atol=1e-12)

    last = torch.tensor(STARTS[1:] - 1)
    context = Decode(cache, torch.tensor([n - 1 for n in LENGTHS]), 12)
    q, k, v = (x[0, :, last].transpose(0, 1)[:, :, None] for x in (query, key, value))
    out = context.attend(0, q, k, v, SHAPES[name])
    np.testing.assert_allclose(out[:, 0], expected[last], rtol=0, atol=1e-12)


def test_stale_cache_entries_are_not_attended() -> None:
    query, key, value = (torch.randn(1, heads, 1, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    found = []
    for rubbish in (0.0, 1e6):
        cache = SlotCache({0: LayerShape(KV_HEADS, DIM, DIM)}, 1, 8, torch.float32, CPU)
        cache.keys[0][:, :, 4:] = rubbish
        cache.values[0][:, :, 4:] = rubbish
        found.append(Decode(cache, torch.tensor([3]), 8).attend(0, query, key, value, SHAPES["plain"]))
    assert torch.equal(found[0], found[1])


def test_layer_with_a_context_only() -> None:
    query, key, value = random_qkv()
    layer = nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="without a context"):
        shoal_attention(layer, query, key, value, None)
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
