"""Concatenated prompts, and the sizes of the graphs that compute them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.core.types import Request, SamplingParams
from shoal.engine.prefill import GRAPH_TOKENS, Prefill, PrefillBucket, Prompts
from shoal.engine.scheduler import Sequence
from support.engines import make_engine
from support.models import small_decoder


def prompts_of(*lengths: int) -> Prompts:
    """Different prompts, each in the slot of its number."""
    made = []
    for number, length in enumerate(lengths):
        request = Request(f"{number}", [number % 7 + 1] * length, SamplingParams(max_tokens=4))
        made.append(Sequence(request, 4, slot=number))
    return Prompts.of(made)


@pytest.mark.parametrize(
    ("lengths", "tokens"),
    [
        ((3, 5), 256),
        ((200, 57), 512),
        ((8000, 192), 8192),
        ((8000, 193), 9216),
        ((9000, 216), 9216),
        ((9000, 217), 10_240),
        ((16_000, 384), GRAPH_TOKENS),
        ((16_000, 385), 17_408),  # is no longer captured
    ],
)
def test_few_bucket_sizes_cover_every_size(lengths: tuple[int, ...], tokens: int) -> None:
    prompts = prompts_of(*lengths)
    extent = PrefillBucket.covering(prompts)
    assert extent.tokens == tokens and extent.longest >= max(lengths) and extent.prompts >= len(lengths)
    arrays = prompts.padded(extent)
    assert len(arrays["ids"]) == len(arrays["positions"]) == tokens
    np.testing.assert_array_equal(arrays["ids"][: sum(lengths)], prompts.arrays["ids"])
    assert arrays["starts"][: len(lengths) + 1].tolist() == [0, *np.cumsum(lengths)]
    assert (arrays["starts"][len(lengths) :] == sum(lengths)).all(), "padding belongs to no prompt"
    filled = extent.sequences - len(lengths)
    assert arrays["lengths"].tolist() == [*lengths, *[0] * filled], "nor to a sequence"


def test_group_prompt_is_prefilled_once_for_all_slots() -> None:
    asked = [(5, [1, 2, 3]), (2, [1, 2, 3]), (0, [4, 5]), (7, [1, 2, 3])]
    made = [Sequence(Request(f"{slot}", ids, SamplingParams(max_tokens=4)), 4, slot=slot) for slot, ids in asked]
    prompts = Prompts.of(made)
    assert prompts.arrays["ids"].tolist() == [1, 2, 3, 4, 5, 1, 2, 3], "neighbours share the prefill"
    assert prompts.arrays["positions"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert prompts.arrays["first"].tolist() == [0, 0, 3, 5] and prompts.arrays["lengths"].tolist() == [3, 3, 2, 3]
    assert prompts.arrays["slots"].tolist() == [5, 2, 0, 7] and prompts.last.tolist() == [2, 2, 4, 7]


def test_without_memory_prefills_are_not_captured_any_more(caplog: pytest.LogCaptureFixture) -> None:
    """The prompt is computed eagerly, and the memory of graphs is freed."""
    engine = make_engine(small_decoder())
    prefill: Prefill = engine._prompts
    prefill._graphs.enabled = True
    prefill._graphs[PrefillBucket(512, 8, 8, 128), False] = None  # type: ignore[assignment]

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no memory")

    prefill._capture = fail  # type: ignore[method-assign,assignment]
    sequence = Sequence(Request("0", [1, 2, 3], SamplingParams(max_tokens=4)), 4, slot=0)
    with torch.no_grad():
        first, second, third = (prefill.run([sequence]) for _ in range(3))
    assert torch.equal(first, second) and torch.equal(first, third)
    assert not prefill._graphs and not prefill._graphs.enabled
    assert [record.getMessage().endswith("no memory") for record in caplog.records] == [True]


def test_captured_prefills_take_no_more_than_the_largest() -> None:
    """In tokens of all sizes. A prompt of a captured size needs no further memory."""
    prefill: Prefill = make_engine(small_decoder())._prompts
    captured = []
    prefill._capture = lambda *_: captured.append(1)  # type: ignore[method-assign,assignment]
    sequence = Sequence(Request("0", [1, 2, 3], SamplingParams(max_tokens=4)), 4, slot=0)
    taken = prefill._graphs
    taken.enabled = True
    taken.update({(PrefillBucket(tokens, 8, 8, 128), False): None for tokens in (16_384, 15_360, 1024)})  # type: ignore[misc]
    with torch.no_grad():
        prefill.run([sequence]), prefill.run([sequence])
    assert not captured
    del taken[PrefillBucket(1024, 8, 8, 128), False]
    with torch.no_grad(), pytest.raises(AttributeError):  # there is nothing to replay
        prefill.run([sequence])
    assert captured == [1]
