"""Slots, budgets and compaction, without a model."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.types import Request, SamplingParams, Span
from shoal.engine.scheduler import SMALLEST_BATCH, Scheduler, Sequence, bucket


def waiting(scheduler: Scheduler, *prompts: list[int]) -> None:
    for number, prompt in enumerate(prompts):
        scheduler.waiting.append(Sequence(Request(str(number), prompt, SamplingParams()), limit=10))


def test_admission_fills_the_lowest_slots() -> None:
    scheduler = Scheduler(slots=8, prefill_tokens=100)
    waiting(scheduler, *([1, 2, n] for n in range(10)))
    assert [s.slot for s in scheduler.admit()] == list(range(8))
    assert len(scheduler.waiting) == 2 and scheduler.admit() == []
    scheduler.retire(scheduler.running[5])
    scheduler.retire(scheduler.running[2])
    assert [(s.request.request_id, s.slot) for s in scheduler.admit()] == [("8", 2), ("9", 5)]


def test_prefill_budget_counts_equal_prompts_once_and_admits_one() -> None:
    scheduler = Scheduler(slots=8, prefill_tokens=10)
    waiting(scheduler, [1] * 6, [1] * 6, [2] * 4, [3], [1] * 6)
    assert [len(s.request.prompt_ids) for s in scheduler.admit()] == [6, 6, 4], "6 + 4 is the budget"
    assert [len(s.request.prompt_ids) for s in scheduler.admit()] == [1, 6]
    waiting(scheduler, [4] * 50, [5])
    assert [len(s.request.prompt_ids) for s in scheduler.admit()] == [50], "too long, but the only one"


def test_rows_are_powers_of_two_over_the_highest_slot() -> None:
    scheduler = Scheduler(slots=40, prefill_tokens=1000)
    waiting(scheduler, *([n] for n in range(40)))
    scheduler.admit()
    assert scheduler.rows == 40, "never more than the number of slots"
    for slot in range(39, -1, -1):
        scheduler.retire(scheduler.running[slot])
        expected = 40 if slot > 32 else 32 if slot > 16 else 16 if slot > 8 else 8
        assert scheduler.rows == expected


def test_large_batches_grow_in_smaller_steps() -> None:
    """An unneeded row costs more in larger batches. An additional graph always costs the same."""
    sizes = sorted({bucket(count) for count in range(1, 2049)})
    assert sizes[:14] == [8, 16, 32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512]
    assert sizes[14:] == [*range(576, 1025, 64), *range(1152, 2049, 128)]
    assert all(bucket(count) >= count for count in range(3000)) and all(bucket(size) == size for size in sizes)


def test_compaction_moves_high_slots_into_free_slots() -> None:
    scheduler = Scheduler(slots=32, prefill_tokens=1000)
    waiting(scheduler, *([n] for n in range(20)))
    scheduler.admit()
    for slot in (*range(5), *range(8, 16), 17, 19):
        scheduler.retire(scheduler.running[slot])
    assert scheduler.compaction() == [(16, 0), (18, 1)]
    assert {slot: s.request.request_id for slot, s in scheduler.running.items()} == {
        0: "16", 1: "18", 5: "5", 6: "6", 7: "7",
    }  # fmt: skip
    assert all(s.slot == slot for slot, s in scheduler.running.items())
    assert scheduler.rows == SMALLEST_BATCH and scheduler.compaction() == []


def test_no_compaction_while_requests_wait() -> None:
    scheduler = Scheduler(slots=16, prefill_tokens=1000)
    waiting(scheduler, *([n] for n in range(17)))
    scheduler.admit()
    for slot in range(15):
        scheduler.retire(scheduler.running[slot])
    assert scheduler.compaction() == []


@settings(max_examples=60, deadline=None)
@given(st.sampled_from((8, 16, 40)), st.lists(st.tuples(st.integers(0, 6), st.sets(st.integers(0, 39))), max_size=12))
def test_every_request_runs_in_one_slot_of_its_own(slots: int, script: list[tuple[int, set[int]]]) -> None:
    scheduler, asked, seen = Scheduler(slots, prefill_tokens=7), 0, set()
    for arrivals, retired in script:
        for _ in range(arrivals):
            scheduler.waiting.append(Sequence(Request(str(asked), [asked, 1], SamplingParams()), 1))
            asked += 1
        for sequence in scheduler.admit():
            assert sequence.request.request_id not in seen
            seen.add(sequence.request.request_id)
        for slot in retired & scheduler.running.keys():
            scheduler.retire(scheduler.running[slot])
        scheduler.compaction()
        assert all(sequence.slot == slot < scheduler.rows <= slots for slot, sequence in scheduler.running.items())
    assert asked == len(seen) + len(scheduler.waiting)


def test_sequence_keeps_its_spans() -> None:
    sequence = Sequence(Request("r", [1, 2], SamplingParams()), 9)
    for tokens, version in (([5], 0), ([6], 0), ([7, 8], 2), ([9], 3)):
        sequence.extend(tokens, [-0.5] * len(tokens), version)
    assert sequence.completion("stop", "").spans == [Span(0, 2, 0), Span(2, 4, 2), Span(4, 5, 3)]
    assert sequence.length == 7
    completion = sequence.completion("stop", "text")
    assert (completion.token_ids, completion.text, completion.finish_reason) == ([5, 6, 7, 8, 9], "text", "stop")
