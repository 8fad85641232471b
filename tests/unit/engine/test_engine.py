"""Every outcome of a request, and the engine's use of slots and prompts."""

from __future__ import annotations

import gc
import random
from collections import deque

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.errors import NonFiniteError
from shoal.core.types import Span
from shoal.engine.decode_graphs import Window
from shoal.engine.engine import EngineSettings
from shoal.models.attention import Context, Packed
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from support.engines import ask, detokenize, greedy, make_engine, run
from support.models import EOS, random_prompts, small_decoder, small_model
from support.statistics import chi_square_p

DECODER = small_decoder()
(PROMPT,) = random_prompts(0, 10)


class CountingDecoder(Decoder):
    """Counts the tokens of forward passes, separately for prompts and single steps."""

    prefilled = 0
    decoded = 0

    def hidden(self, input_ids: Tensor, position_ids: Tensor, context: Context) -> Tensor:
        if isinstance(context, Packed):
            self.prefilled += input_ids.numel()
        else:
            self.decoded += input_ids.numel()
        return super().hidden(input_ids, position_ids, context)


def counting_engine(**settings):
    decoder = CountingDecoder(DECODER.model)
    engine = make_engine(decoder, fused=False, **settings)
    decoder.prefilled = decoder.decoded = 0
    return decoder, engine


def one(engine, prompt=PROMPT, **sampling):
    return run(engine, [ask("r", prompt, **sampling)])["r"]


@pytest.fixture(scope="module")
def free():
    """A completion of 20 plain characters without an end. Its seed is stored in the request id."""
    for seed in range(1000):
        answer = one(make_engine(DECODER), max_tokens=20, seed=seed)
        if min(answer.token_ids) >= 14 and len(set(answer.token_ids[:8])) == 8:
            answer.request_id = str(seed)
            return answer
    pytest.fail("every completion holds a special token")


# Ends of a completion


def test_length_is_the_end_unless_something_else_is() -> None:
    answer = one(make_engine(DECODER), max_tokens=20)
    assert answer.finish_reason == "length" and len(answer.token_ids) == len(answer.logprobs) == 20
    assert answer.spans == [Span(0, 20, 0)] and answer.kept_ids is None
    assert answer.text == detokenize(answer.token_ids)
    assert all(value < 0 for value in answer.logprobs)


def test_one_token() -> None:
    answer = one(make_engine(DECODER), max_tokens=1)
    assert answer.finish_reason == "length" and len(answer.token_ids) == 1


def test_end_token_is_kept_and_ends_the_completion(free) -> None:
    seed, end = int(free.request_id), free.token_ids[6]
    for engine, sampling in (
        (make_engine(DECODER, eos_token_ids=(end,)), {"max_tokens": 20}),
        (make_engine(DECODER), {"max_tokens": 20, "stop_token_ids": (end,)}),
        (make_engine(DECODER), {"max_tokens": 7, "stop_token_ids": (end,)}),  # an end on the last allowed token
    ):
        answer = one(engine, seed=seed, **sampling)
        assert answer.token_ids == free.token_ids[:7] and answer.finish_reason == "stop"


def test_special_end_token_is_not_in_the_text() -> None:
    engine = make_engine(DECODER, eos_token_ids=(EOS,))
    for seed in range(60):
        answer = one(engine, seed=seed, max_tokens=40)
        if answer.finish_reason == "stop":
            assert answer.token_ids[-1] == EOS and answer.text == detokenize(answer.token_ids[:-1])
            assert EOS not in answer.token_ids[:-1]
            return
    pytest.fail("no completion ended by itself")


def test_stop_string_ends_the_text_before_it_and_keeps_the_tokens(free) -> None:
    stop = free.text[5:7]  # across two tokens: every token is a character
    answer = one(make_engine(DECODER), max_tokens=20, stop=("never in it", stop), seed=int(free.request_id))
    assert answer.finish_reason == "stop"
    assert answer.token_ids == free.token_ids[:7] and answer.text == free.text[:5]
    assert answer.logprobs == free.logprobs[:7]


def test_earliest_of_two_stop_strings_cuts_the_text(free) -> None:
    answer = one(make_engine(DECODER), stop=(free.text[4], free.text[3:5]), seed=int(free.request_id))
    assert answer.token_ids == free.token_ids[:5] and answer.text == free.text[:3]


@pytest.mark.parametrize("min_tokens", (1, 4, 7))
def test_min_tokens_delays_every_end(min_tokens: int) -> None:
    """All ids but one end the completion, so it ends as soon as allowed."""
    ends = tuple(i for i in range(DECODER.vocab_size) if i != 50)
    answer = one(make_engine(DECODER), min_tokens=min_tokens, max_tokens=20, stop_token_ids=ends, seed=1)
    assert answer.token_ids[:min_tokens] == [50] * min_tokens
    assert answer.logprobs[:min_tokens] == [0.0] * min_tokens, "no other token could be sampled"
    assert answer.finish_reason == "stop" and len(answer.token_ids) == min_tokens + 1


def test_min_tokens_and_stop_strings(free) -> None:
    for min_tokens, tokens in ((0, 4), (4, 4), (5, 5), (9, 9)):
        sampling = {"stop": (free.text[3],), "min_tokens": min_tokens, "seed": int(free.request_id)}
        answer = one(make_engine(DECODER), max_tokens=20, **sampling)
        assert answer.token_ids == free.token_ids[:tokens] and answer.finish_reason == "stop"
        assert answer.text == free.text[:3]


# Prompts and the context


def test_prompts_at_the_border_of_the_context() -> None:
    engine = make_engine(DECODER, context_tokens=32)
    prompts = dict(zip(("fits", "one left", "full", "over"), random_prompts(1, 20, 31, 32, 50), strict=True))
    answers = run(engine, [ask(name, prompt, max_tokens=16) for name, prompt in prompts.items()])
    assert {name: len(answer.token_ids) for name, answer in answers.items()} == {
        "fits": 12, "one left": 1, "full": 0, "over": 0,
    }  # fmt: skip
    assert {answer.finish_reason for answer in answers.values()} == {"length"}
    assert answers["over"].spans == [] and answers["over"].text == ""


def test_empty_prompt_is_answered_with_nothing() -> None:
    answer = one(make_engine(DECODER), prompt=[])
    assert (answer.token_ids, answer.logprobs, answer.finish_reason) == ([], [], "length")


def test_prompt_longer_than_the_prefill_budget() -> None:
    prompts = random_prompts(2, 100, 3, 90)
    assert greedy(DECODER, prompts, 10, prefill_tokens=16) == greedy(DECODER, prompts, 10)


def test_cache_length_is_the_context_length() -> None:
    """Prompt and completion fill the context to the last token, across a border of padded keys."""
    (prompt,) = random_prompts(3, 120)
    engine = make_engine(DECODER, context_tokens=130)
    assert len(one(engine, prompt=prompt, max_tokens=50).token_ids) == 10


# Slots


def test_group_prompt_is_prefilled_once() -> None:
    decoder, engine = counting_engine(slots=16)
    (prompt, other) = random_prompts(4, 24, 16)
    answers = run(engine, [ask(f"{i}", prompt, seed=i, max_tokens=5) for i in range(8)])
    assert decoder.prefilled == 24 and len({tuple(a.token_ids) for a in answers.values()}) > 1
    assert decoder.decoded == 4 * 8, "the first token comes from the prefill"
    decoder.prefilled = 0
    run(engine, [ask(f"{p[0]}/{i}", p, max_tokens=2) for p in (prompt, other) for i in range(8)])
    assert decoder.prefilled == 24 + 16


def test_more_requests_than_slots() -> None:
    decoder, engine = counting_engine(slots=8)
    lengths = [1 + 5 * i % 17 for i in range(30)]
    answers = run(engine, [ask(f"{i}", PROMPT, seed=i, max_tokens=n) for i, n in enumerate(lengths)])
    assert [len(answers[f"{i}"].token_ids) for i in range(30)] == lengths
    assert engine.generated_tokens == sum(lengths)
    # Slots are refilled when they become free. A batch that waits for its longest request needs far more steps.
    in_fours = sum(max(lengths[i : i + 8]) for i in range(0, 30, 8))
    assert decoder.decoded / 8 < in_fours


def test_batch_shrinks_when_few_are_left() -> None:
    decoder, engine = counting_engine(slots=64)
    requests = [ask(f"{i}", PROMPT, seed=i, max_tokens=2) for i in range(63)]
    requests.append(ask("long", PROMPT, seed=99, max_tokens=40))
    answers = run(engine, requests)
    # One step of 64 rows, then the remaining sequence moves down and decodes in the smallest batch.
    assert decoder.decoded == 64 + 38 * 8
    assert answers["long"] == run(make_engine(DECODER), requests[-1:])["long"]


def test_abort_returns_the_sampled_tokens() -> None:
    engine = make_engine(DECODER, slots=8)
    for i in range(10):
        assert engine.add(ask(f"{i}", PROMPT, seed=i, max_tokens=30, top_k=5)) is None
    for _ in range(3):
        engine.step()
    dropped = {completion.request_id: completion for completion in engine.abort()}
    assert not engine.busy and len(dropped) == 10
    assert {len(completion.token_ids) for completion in dropped.values()} == {4, 0}
    assert {completion.finish_reason for completion in dropped.values()} == {"abort"}
    for completion in dropped.values():
        assert completion.kept_ids is not None and len(completion.kept_ids) == len(completion.token_ids)
    assert len(one(engine, max_tokens=5).token_ids) == 5, "and the engine continues"


def test_slots_come_in_multiples_of_the_row_padding() -> None:
    with pytest.raises(ValueError, match="multiple of 8"):
        EngineSettings(slots=3)


# Reports


def test_spans_have_the_version_of_each_token() -> None:
    view = SamplerView(DECODER)
    engine = make_engine(DECODER, view)
    engine.add(ask("r", PROMPT, max_tokens=9))
    engine.step()
    view.refresh(3)
    engine.step()
    engine.step()
    view.refresh(4)
    (answer,) = run(engine, []).values()
    assert answer.spans == [Span(0, 2, 0), Span(2, 4, 3), Span(4, 9, 4)]


@pytest.mark.parametrize("temperature", (1.0, 0.6))
@torch.no_grad()
def test_chi_square_of_first_and_second_tokens(temperature: float) -> None:
    """Through the engine, against the model's forward pass: first tokens, then second tokens after the most frequent
    first one.
    """
    model = small_model("qwen3", seed=5)
    reference = small_model("qwen3", seed=5)
    decoder = Decoder(model)
    requests = [ask(f"{i}", PROMPT, seed=7_000_000 + i, max_tokens=2, temperature=temperature) for i in range(4000)]
    answers = list(run(make_engine(decoder, slots=512), requests).values())

    def distribution(ids: list[int]) -> np.ndarray:
        return torch.softmax(reference(torch.tensor([ids])).logits[0, -1].double() / temperature, -1).numpy()

    first = np.array([answer.token_ids[0] for answer in answers])
    counts = np.bincount(first, minlength=decoder.vocab_size)
    assert chi_square_p(counts, distribution(PROMPT)) > 1e-3
    commonest = int(counts.argmax())
    second = np.array([answer.token_ids[1] for answer in answers if answer.token_ids[0] == commonest])
    assert chi_square_p(np.bincount(second, minlength=decoder.vocab_size), distribution([*PROMPT, commonest])) > 1e-3


def test_kept_ids_contain_the_token_and_have_the_requested_size() -> None:
    answer = one(make_engine(DECODER), top_k=6, max_tokens=12)
    assert answer.kept_ids is not None and [len(ids) for ids in answer.kept_ids] == [6] * 12
    assert all(token in ids for token, ids in zip(answer.token_ids, answer.kept_ids, strict=True))


def test_cancelled_requests_leave_waiting_or_running_and_the_others_draw_the_same() -> None:
    decoder = small_decoder()
    prompts = random_prompts(0, 10, 20, 15)
    requests = [ask(f"{i}", prompts[i % 3], seed=i, max_tokens=20) for i in range(12)]
    expected = run(make_engine(decoder), requests)
    engine = make_engine(decoder)
    for request in requests:
        engine.add(request)
    finished = [*engine.step(), *engine.step()]
    assert not finished and len(engine.scheduler.running) == 8 and len(engine.scheduler.waiting) == 4
    engine.cancel({"2", "5", "10", "unknown"})
    assert len(engine.scheduler.running) == 6 and len(engine.scheduler.waiting) == 3
    while engine.busy:
        finished += engine.step()
    assert {answer.request_id: answer for answer in finished} == {
        name: answer for name, answer in expected.items() if name not in ("2", "5", "10")
    }
    engine.cancel({"3"})
    assert not engine.busy


def test_nonfinite_weights_are_detected_at_once() -> None:
    """Not when the sequence ends a hundred tokens later. The error names the version."""
    decoder = small_decoder()
    engine = make_engine(decoder)
    engine.add(ask("long", PROMPT, max_tokens=100))
    assert not engine.step()
    with torch.no_grad():
        next(p for name, p in decoder.model.named_parameters() if "down_proj" in name)[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="log-probs of version 0 are not finite"):
        engine.step()
    assert len(engine.scheduler.running) == 1, "it was far from its end"


# Windows of steps


class InstantGraphs:
    """A device without delay: every row samples its own number, with log-probs 0, -1, -2, …"""

    def __init__(self) -> None:
        self.windows: deque[Window] = deque()
        self.steps = 0
        self.launched: list[int] = []  # steps of each window

    def draw(self, *_: object) -> None: ...

    def follow_weights(self) -> None: ...

    def clear(self) -> None: ...

    def begin(self, slots: np.ndarray, *_: object) -> None:
        self._add(1, len(slots))

    def launch(self, extent, steps: int, narrowed: bool) -> None:
        self.launched.append(steps)
        self._add(steps, extent.rows)

    def collect(self) -> Window:
        return self.windows.popleft()

    def _add(self, steps: int, rows: int) -> None:
        logprobs = -np.arange(self.steps, self.steps + steps, dtype=np.float32)
        self.windows.append(Window(np.tile(np.arange(rows), (steps, 1)), np.tile(logprobs, (rows, 1)).T, None))
        self.steps += steps


class CountingGraphs(InstantGraphs):
    """A device whose rows count from the length of their prompt, wherever they are moved."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self.at = np.zeros(slots, dtype=np.int64)

    def begin(self, slots: np.ndarray, positions: np.ndarray, *_: object) -> None:
        self.at[slots] = positions
        self._note(positions[None])

    def launch(self, extent, steps: int, narrowed: bool) -> None:
        self.launched.append(steps)
        self.at[: extent.rows] += steps
        self._note(self.at[: extent.rows] - np.arange(steps)[::-1, None])

    def move(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        self.at[targets.numpy()] = self.at[sources.numpy()]

    def _note(self, ids: np.ndarray) -> None:
        self.windows.append(Window(ids, -ids.astype(np.float32), None))


def test_windows_of_several_lengths_while_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches shrink and grow again across the size from which windows are shorter."""
    monkeypatch.setattr("shoal.engine.engine.MANY_ROWS", 16)
    chance = random.Random(5)
    lengths = [(chance.randint(1, 30), 1 + int(chance.expovariate(1 / 12))) for _ in range(120)]
    engine = make_engine(DECODER, slots=48, context_tokens=256)
    engine._graphs = graphs = CountingGraphs(48)  # type: ignore[assignment]
    moves = []
    monkeypatch.setattr(graphs, "move", lambda *at: (moves.append(1), CountingGraphs.move(graphs, *at)))
    answers = run(engine, [ask(str(i), PROMPT[:1] * prompt, max_tokens=new) for i, (prompt, new) in enumerate(lengths)])
    for i, (prompt, new) in enumerate(lengths):
        assert answers[str(i)].token_ids == list(range(prompt, prompt + new))
        assert answers[str(i)].logprobs == [-float(at) for at in range(prompt, prompt + new)]
    assert moves and {4, 8} <= set(graphs.launched), "all cases occurred"


@pytest.mark.parametrize(("slots", "longest"), ((1016, 8), (1024, 4)))
def test_windows_of_many_rows_are_shorter(slots: int, longest: int) -> None:
    engine = make_engine(DECODER, slots=slots, context_tokens=64)
    engine._graphs = graphs = InstantGraphs()  # type: ignore[assignment]
    answers = run(engine, [ask(str(i), PROMPT, max_tokens=20) for i in range(slots)])
    assert all(answers[str(i)].token_ids == [i] * 20 for i in range(slots))
    assert max(graphs.launched) == longest and sum(graphs.launched) == 19, "the first token comes from the prefill"


def test_long_windows_do_not_trigger_garbage_collection() -> None:
    """Thousands of objects that live as long as a window would make the garbage collector scan all of Python
    repeatedly while the device waits.
    """
    engine = make_engine(DECODER, slots=1024, context_tokens=272)
    engine._graphs = InstantGraphs()  # type: ignore[assignment]
    requests = [ask(str(i), PROMPT, max_tokens=256) for i in range(1024)]
    looked: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            looked.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        answers = run(engine, requests)
    finally:
        gc.callbacks.remove(note)
    assert all(answers[str(i)].token_ids == [i] * 256 for i in range(1024))
    assert all(answer.logprobs == [-float(step) for step in range(256)] for answer in answers.values())
    assert len(looked) < 32, "less than once per window"
