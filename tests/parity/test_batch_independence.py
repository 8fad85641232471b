"""A completion depends on its request and the weights only: bit for bit in fp32, with any other requests, order and
slot.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.types import Completion, Request
from shoal.models.decoder import Decoder
from support.engines import ask, make_engine, run
from support.models import ARCHITECTURES, EOS, lora_decoder, random_prompts, small_decoder

# Below one padded block of keys, across its border, and beyond it.
LENGTHS = (1, 3, 8, 13, 30, 50, 63, 64, 65, 90)
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.0},
    {"temperature": 1.4, "top_k": 7, "min_tokens": 4},
    {"max_tokens": 1},
    {"max_tokens": 35, "min_p": 0.05},
)


def requests() -> list[Request]:
    prompts = random_prompts(9, *LENGTHS)
    return [ask(f"{i}", prompt, seed=1000 + i, **SAMPLING[i % len(SAMPLING)]) for i, prompt in enumerate(prompts * 3)]


def answers_of(decoder: Decoder, asked: list[Request], **settings: Any) -> dict[str, Completion]:
    return run(make_engine(decoder, eos_token_ids=(EOS,), **settings), asked)


def assert_equal(found: dict[str, Completion], alone: dict[str, Completion]) -> None:
    """Dataclasses compare floats exactly, so equality is bitwise."""
    for name, completion in found.items():
        assert completion == alone[name], f"request {name}"


@pytest.fixture(scope="module", params=ARCHITECTURES)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return small_decoder(request.param)


@pytest.fixture(scope="module")
def alone(decoder: Decoder) -> dict[str, Completion]:
    engine = make_engine(decoder, eos_token_ids=(EOS,))
    return {request.request_id: run(engine, [request])[request.request_id] for request in requests()}


@pytest.mark.parametrize("slots", (8, 16, 32, 64))
def test_results_do_not_depend_on_slots(decoder: Decoder, alone: dict[str, Completion], slots: int) -> None:
    assert len({tuple(answer.token_ids) for answer in alone.values()}) > 15
    assert_equal(answers_of(decoder, requests(), slots=slots), alone)


def test_results_do_not_depend_on_order_or_prefill_budget(decoder: Decoder, alone: dict[str, Completion]) -> None:
    assert_equal(answers_of(decoder, requests()[::-1], slots=16, prefill_tokens=70), alone)


def test_late_arrivals(decoder: Decoder, alone: dict[str, Completion]) -> None:
    """Requests that arrive while others are being answered."""
    engine, waiting, found = make_engine(decoder, slots=16, eos_token_ids=(EOS,)), requests(), {}
    while waiting or engine.busy:
        for request in waiting[:2]:
            engine.add(request)
        waiting = waiting[2:]
        found |= {completion.request_id: completion for completion in engine.step()}
    assert_equal(found, alone)
    assert len(found) == len(alone)


PLAIN = small_decoder("qwen3")
ALONE = {r.request_id: answers_of(PLAIN, [r])[r.request_id] for r in requests()}


@settings(max_examples=25, deadline=None)
@given(
    chosen=st.lists(st.integers(0, len(ALONE) - 1), min_size=1, max_size=30, unique=True),
    slots=st.sampled_from((8, 16, 24, 40, 64)),
    prefill_tokens=st.sampled_from((1, 64, 100, 8192)),
    context_tokens=st.sampled_from((128, 200, 512)),
)
def test_results_do_not_depend_on_other_requests(
    chosen: list[int], slots: int, prefill_tokens: int, context_tokens: int
) -> None:
    everything = requests()
    found = answers_of(
        PLAIN,
        [everything[i] for i in chosen],
        slots=slots,
        prefill_tokens=prefill_tokens,
        context_tokens=context_tokens,
    )
    assert len(found) == len(chosen)
    assert_equal(found, ALONE)


def test_group_beside_other_requests_and_with_lora() -> None:
    decoder = lora_decoder("llama")
    (prompt,), company = random_prompts(0, 21), requests()
    group = [ask(f"g{i}", prompt, seed=i) for i in range(6)]
    together = answers_of(decoder, [*company[:7], *group, *company[7:]], slots=16)
    apart = {r.request_id: answers_of(decoder, [r])[r.request_id] for r in group}
    assert_equal(apart, together)
    assert len({tuple(answer.token_ids) for answer in apart.values()}) == 6


def test_seed_determines_the_draw() -> None:
    (prompt,) = random_prompts(0, 10)
    first, again, other = (answers_of(PLAIN, [ask("r", prompt, seed=seed)])["r"] for seed in (5, 5, 6))
    assert first == again and first.token_ids != other.token_ids
