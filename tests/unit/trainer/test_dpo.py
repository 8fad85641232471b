"""Preference training: the gradient of the step equals that of the complete loss, and held-out preferences are
learned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from shoal.config.preference import PreferenceLoss, PreferenceLossConfig
from shoal.core.errors import DataError
from shoal.core.types import Message, Sample, Task
from shoal.models.chat import Chat
from shoal.models.decoder import Decoder
from shoal.models.load import switch_off_dropout
from shoal.models.lora import LoraSettings, as_reference, attach
from shoal.trainer.optimizer import Schedule
from shoal.trainer.policy import Reference
from shoal.trainer.supervised import PreferenceSteps, pair_slopes, preference_pairs
from shoal.watch.glossary import checked_metrics
from support.models import EOS, TOKENIZER, small_decoder, small_model
from support.training import by_rollout, gradients, make_policy, pack, weights

CHAT = Chat(TOKENIZER)
WORDS = ("one", "two", "three", "four", "five", "six")
TASKS = [
    Task([{"role": "user", "content": f"Write {word}."}], {"chosen": word.upper(), "rejected": word * number})
    for number, word in enumerate(WORDS, start=1)
]
LOSSES: list[dict[str, Any]] = [
    {"type": "sigmoid", "beta": 0.3},
    {"type": "sigmoid", "beta": 0.3, "label_smoothing": 0.2, "sft_weight": 0.7},
    {"type": "robust", "beta": 0.2, "label_smoothing": 0.1},
    {"type": "hinge", "beta": 0.05},
    {"type": "ipo", "beta": 0.4, "sft_weight": 0.1},
]


def loss_of(keys: dict[str, Any]) -> PreferenceLoss:
    return TypeAdapter(PreferenceLossConfig).validate_python(keys)


def pairs() -> list[tuple[Sample, Sample]]:
    return preference_pairs(TASKS, CHAT, EOS, 100)[0]


def make_steps(
    loss: dict[str, Any] | None = None, batch_size: int = 3, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreferenceSteps:
    reference = Reference(small_decoder(seed=1, dtype=dtype))
    policy = make_policy(small_decoder(dtype=dtype), Schedule(1e-3, 100), reference)
    settings = {"token_budget": 100, "rows_per_micro_batch": 1, "micro_batch_tokens": None, "seed": 0, **changes}
    return PreferenceSteps(policy, pairs(), batch_size, loss=loss_of(loss or {}), **settings)


def formula(keys: dict[str, Any], c: Tensor, r: Tensor, n_c: Tensor, n_r: Tensor) -> Tensor:
    """The losses of pairs as the papers write them, with the sigmoid itself."""
    beta, e = keys["beta"], keys.get("label_smoothing", 0.0)
    m = beta * (c - r)
    good, bad = (1 / (1 + torch.exp(-m))).log(), (1 / (1 + torch.exp(m))).log()
    return {
        "sigmoid": -(1 - e) * good - e * bad,
        "robust": (-(1 - e) * good + e * bad) / (1 - 2 * e),
        "hinge": torch.relu(1 - m),
        "ipo": (c / n_c - r / n_r - 1 / (2 * beta)) ** 2,
    }[keys["type"]]


def sums_of(c: Iterable[Any], r: Iterable[Any]) -> dict[str, float]:
    sides = (("chosen", c), ("rejected", r))
    return {f"{i}/{side}": float(value) for side, found in sides for i, value in enumerate(found)}


@pytest.mark.parametrize("keys", LOSSES, ids=str)
def test_slopes_are_differences_of_the_formulas(keys: dict[str, Any]) -> None:
    """Central differences of the loss in float64."""
    random = torch.Generator().manual_seed(0)
    c, r, ref_c, ref_r = torch.randn(4, 5, generator=random, dtype=torch.float64) * 5 - 20
    n_c, n_r = torch.randint(1, 9, (2, 5), generator=random).double()

    def whole(c: Tensor, r: Tensor) -> float:
        mean = formula(keys, c - ref_c, r - ref_r, n_c, n_r).mean()
        return float(mean - keys.get("sft_weight", 0.0) * c.sum() / n_c.sum())

    slopes, metrics = pair_slopes(loss_of(keys), sums_of(c, r), sums_of(ref_c, ref_r), sums_of(n_c, n_r))
    assert metrics["dpo/loss"] == pytest.approx(whole(c, r), rel=1e-12)
    for i, step in enumerate(torch.eye(5, dtype=torch.float64) * 1e-5):
        assert slopes[f"{i}/chosen"] == pytest.approx((whole(c + step, r) - whole(c - step, r)) / 2e-5, abs=1e-7)
        assert slopes[f"{i}/rejected"] == pytest.approx((whole(c, r + step) - whole(c, r - step)) / 2e-5, abs=1e-7)
    assert metrics["dpo/margin"] == pytest.approx(keys["beta"] * float((c - ref_c - r + ref_r).mean()))
    assert metrics["dpo/accuracy"] == float((c - ref_c > r - ref_r).double().mean())


@pytest.mark.parametrize("keys", LOSSES, ids=str)
def test_extreme_margins_have_finite_slopes(keys: dict[str, Any]) -> None:
    zero = sums_of([0.0, 0.0], [0.0, 0.0])
    ones = sums_of([1.0, 1.0], [1.0, 1.0])
    slopes, metrics = pair_slopes(loss_of(keys), sums_of([1e5, -1e5], [-1e5, 1e5]), zero, ones)
    assert all(map(math.isfinite, [*slopes.values(), *metrics.values()]))


def full_loss(model: Any, reference: Any, keys: dict[str, Any]) -> torch.Tensor:
    """The loss of all pairs in one graph, one sequence after the other, with transformers' own forward pass."""

    def total(of: Any, sample: Sample) -> torch.Tensor:
        ids = torch.tensor(sample.token_ids)[None]
        found = of(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        return found[torch.tensor(sample.loss_mask)[1:]].sum()

    sides = list(zip(*pairs(), strict=True))
    sums = [torch.stack([total(model, sample) for sample in side]) for side in sides]
    with torch.no_grad():
        old = [torch.stack([total(reference, sample) for sample in side]) for side in sides]
    tokens = [torch.tensor([int(sample.loss_mask.sum()) for sample in side]) for side in sides]
    ratios = [now - before for now, before in zip(sums, old, strict=True)]
    return formula(keys, *ratios, *tokens).mean() - keys.get("sft_weight", 0.0) * sums[0].sum() / tokens[0].sum()


@pytest.mark.parametrize("keys", LOSSES, ids=str)
def test_gradient_is_autograd_through_the_whole_loss(keys: dict[str, Any]) -> None:
    """In float64; with both sides in one row, in different rows, and in different micro-batches."""
    model, reference = (small_model("qwen3", seed, torch.float64) for seed in (0, 1))
    wanted = full_loss(model, reference, keys)
    wanted.backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    layouts = [
        {"token_budget": 45, "rows_per_micro_batch": 1},
        {"token_budget": 45, "rows_per_micro_batch": 3},
        {"token_budget": 1000, "rows_per_micro_batch": None},
    ]
    for layout in layouts:
        steps = make_steps(keys, len(WORDS), torch.float64, **layout)
        rows = steps._batch(1).rows
        _, metrics = steps._gradient(rows)
        assert metrics["dpo/loss"] == pytest.approx(wanted.item(), rel=1e-6)
        found = gradients(steps.policy)
        assert found.keys() == expected.keys()
        scale = max(float(gradient.abs().max()) for gradient in found.values())
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-5, atol=1e-6 * scale, msg=name)
    assert len(rows) == 1 and (rows[0].segment_prefix >= 0).any(), "the last layout stores prompts once"


def test_pairs_end_with_eos_and_mask_the_prompt() -> None:
    for task, pair in zip(TASKS, pairs(), strict=True):
        prompt = CHAT.prompt_ids(task.messages)
        for side, sample in zip(("chosen", "rejected"), pair, strict=True):
            assert sample.token_ids[: len(prompt)].tolist() == prompt and not sample.loss_mask[: len(prompt)].any()
            trained = sample.token_ids[sample.loss_mask].tolist()
            assert trained[-1] == EOS and CHAT.text(trained) == task.data[side]


def test_pairs_with_a_side_that_is_too_long_are_counted() -> None:
    lengths = [max(sample.tokens for sample in pair) for pair in pairs()]
    kept, dropped = preference_pairs(TASKS, CHAT, EOS, max(lengths) - 1)
    assert (len(kept), dropped) == (5, 1) and all(s.tokens < max(lengths) for pair in kept for s in pair)
    with pytest.raises(DataError, match=r"none of the 6 pairs fits into train.sequence_len \(5\)"):
        preference_pairs(TASKS, CHAT, EOS, 5)


def test_step_number_without_checkpoint() -> None:
    whole, late = make_steps(), make_steps()
    for step in range(1, 5):
        whole.step(step)
        if step <= 2:
            late.step(step)
    other = PreferenceSteps(late.policy, pairs(), 3, 100, 1, None, 0, late.loss)
    for step in (3, 4):
        other.step(step)
    ours, theirs = weights(whole.policy.decoder), weights(late.policy.decoder)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_base_is_the_reference_of_an_adapter_and_dropout_is_off() -> None:
    """A new adapter changes nothing, so the first step starts at a margin of 0, and only the adapter moves."""
    model = attach(small_decoder().model, LoraSettings(rank=4, alpha=8, dropout=0.5))
    switch_off_dropout(model)
    decoder = Decoder(model)
    policy = make_policy(decoder, Schedule(1e-2, 100), Reference(decoder, lambda: as_reference(model)))
    steps = PreferenceSteps(policy, pairs(), 6, 100, 1, None, 0, loss_of({}))
    before = weights(decoder)
    first, second = steps.step(1), steps.step(2)
    assert (first["dpo/margin"], first["dpo/accuracy"]) == (0.0, 0.0)
    assert first["dpo/loss"] == pytest.approx(math.log(2))
    assert second["dpo/margin"] > 0
    moved = {name for name, value in weights(decoder).items() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    checked_metrics(first)


def keyed_tasks(numbers: range) -> list[Task]:
    """The key at the end of the prompt decides which of two answers is preferred."""
    tasks = []
    for number in numbers:
        key, text = "ab"[number % 2], f"{number * 7919 % 997}"
        chosen, rejected = ("yes", "not") if key == "a" else ("not", "yes")
        prompt: Message = {"role": "user", "content": text + key}
        tasks.append(Task([prompt], {"chosen": chosen, "rejected": rejected}))
    return tasks


def test_held_out_preferences_are_learned() -> None:
    """Prompts that are not trained: from chance to nearly all."""
    decoder = small_decoder()
    policy = make_policy(decoder, Schedule(3e-3, 100), Reference(small_decoder()))
    train, held_out = (preference_pairs(keyed_tasks(part), CHAT, EOS, 64)[0] for part in (range(64), range(64, 96)))
    steps = PreferenceSteps(policy, train, 16, 512, 2, None, 0, loss_of({"beta": 0.5}))
    rows = pack([[sample] for pair in held_out for sample in pair]).rows

    def accuracy() -> float:
        """How often the policy itself prefers the chosen answer."""
        found = by_rollout(rows, policy.logprobs(rows).read()[1])
        numbers = {name.partition("/")[0] for name in found}
        return float(np.mean([found[f"{n}/chosen"].sum() > found[f"{n}/rejected"].sum() for n in numbers]))

    before = accuracy()
    for step in range(1, 31):
        steps.step(step)
    assert before < 0.7 and accuracy() > 0.9
