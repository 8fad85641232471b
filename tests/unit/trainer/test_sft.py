"""Supervised training: the loss is on the completion and its end, and it falls."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError
from shoal.core.types import Sample, Task
from shoal.models.chat import Chat
from shoal.trainer.optimizer import Schedule
from shoal.trainer.supervised import SupervisedSteps, supervised_samples, train_supervised
from support.models import EOS, TOKENIZER, small_decoder, small_model
from support.training import make_policy, weights

CHAT = Chat(TOKENIZER)
WORDS = ("one", "two", "three", "four", "five", "six")
TASKS = [Task([{"role": "user", "content": f"Write {word}."}], {"completion": word}) for word in WORDS]


def samples() -> list[Sample]:
    return supervised_samples(TASKS, CHAT, EOS, 100)[0]


def items() -> list[list[Sample]]:
    return [[sample] for sample in samples()]


def make_steps(batch_size: int = 3) -> SupervisedSteps:
    policy = make_policy(small_decoder(), Schedule(3e-3, 100))
    return SupervisedSteps(policy, items(), batch_size, 100, rows_per_micro_batch=1, micro_batch_tokens=None, seed=0)


def test_mask_is_on_the_completion_and_its_end() -> None:
    for task, sample in zip(TASKS, samples(), strict=True):
        prompt = CHAT.prompt_ids(task.messages)
        assert sample.token_ids[: len(prompt)].tolist() == prompt
        assert not sample.loss_mask[: len(prompt)].any() and sample.loss_mask[len(prompt) :].all()
        trained = sample.token_ids[sample.loss_mask].tolist()
        assert trained[-1] == EOS and CHAT.text(trained) == task.data["completion"]
        assert trained.count(EOS) == 1 and (sample.temperatures == 1).all()


def test_rows_that_are_too_long_are_counted() -> None:
    lengths = [sample.tokens for sample in samples()]
    kept, dropped = supervised_samples(TASKS, CHAT, EOS, min(lengths))
    assert len(kept) == lengths.count(min(lengths)) and dropped == len(TASKS) - len(kept)
    with pytest.raises(DataError, match=r"none of the 6 rows fits into train.sequence_len \(5\)"):
        supervised_samples(TASKS, CHAT, EOS, 5)


def test_row_of_100_mb_is_counted_fast() -> None:
    """Without the tokenizer, which would take minutes."""
    long = [Task(TASKS[0].messages, {"completion": "x" * 100_000_000})]
    began = time.monotonic()
    assert supervised_samples([*TASKS, *long], CHAT, EOS, 64)[1] == supervised_samples(TASKS, CHAT, EOS, 64)[1] + 1
    assert time.monotonic() - began < 2


@torch.no_grad()
def test_loss_is_transformers_own() -> None:
    """Labels of -100 on everything else, averaged over the trained tokens of the step."""
    steps = make_steps(batch_size=6)
    reference, total, count = small_model("qwen3"), 0.0, 0
    for sample in samples():
        ids = torch.tensor(sample.token_ids)[None]
        labels = torch.where(torch.tensor(sample.loss_mask)[None], ids, -100)
        size = int(sample.loss_mask.sum())
        total, count = total + float(reference(ids, labels=labels).loss) * size, count + size
    with torch.enable_grad():
        metrics = steps.step(1)
    assert metrics["sft/loss"] == pytest.approx(total / count, abs=1e-5)
    assert metrics["tokens/completion"] == count
    assert {"optim/lr", "optim/grad_norm", "optim/skipped"} <= set(metrics)


def test_out_of_memory_step_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same step as single rows. A failure with one row is an error."""
    most, sizes = [1], []
    ours, alone = (make_steps(batch_size=6) for _ in range(2))
    for steps in (ours, alone):
        steps.token_budget = 40
    ours.rows_per_micro_batch = None
    pass_over = ours.policy.forward_backward

    def short_of_memory(rows: Any, *rest: Any) -> Any:
        sizes.append(len(rows))
        if len(rows) > most[0]:
            raise torch.OutOfMemoryError("no memory")
        return pass_over(rows, *rest)

    monkeypatch.setattr(ours.policy, "forward_backward", short_of_memory)
    assert ours.step(1)["sft/loss"] == pytest.approx(alone.step(1)["sft/loss"], abs=1e-6)
    assert sizes[0] > 1 and sizes[-1] == 1
    for mine, other in zip(weights(ours.policy.decoder).values(), weights(alone.policy.decoder).values(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    most[0] = 0
    with pytest.raises(torch.OutOfMemoryError):
        ours.step(2)


def test_training_memorises_a_small_set() -> None:
    steps, losses = make_steps(batch_size=6), []

    def note(step: int, metrics: dict[str, float]) -> bool:
        losses.append(metrics["sft/loss"])
        return metrics["sft/loss"] < 0.05

    done = train_supervised(steps, 1, 100, note)
    assert done == len(losses) < 100, "after_step stops it"
    assert losses[0] > 3 and losses[-1] < 0.05


def test_every_epoch_takes_every_sample_in_another_order() -> None:
    steps = make_steps(batch_size=2)
    assert steps.steps_per_epoch == 3
    orders = []
    for epoch in range(2):
        seen: list[str] = []
        for step in range(3):
            seen += [i for row in steps._batch(epoch * 3 + step + 1).rows for i in row.rollout_ids]
        assert sorted(seen) == sorted(sample.rollout_id for sample in samples())
        orders.append(seen)
    assert orders[0] != orders[1]


def test_step_number_without_checkpoint() -> None:
    whole, late = make_steps(), make_steps()
    for step in range(1, 6):
        whole.step(step)
        if step <= 3:
            late.step(step)
    other = SupervisedSteps(late.policy, items(), late.batch_size, 100, 1, None, seed=0)
    for step in (4, 5):
        other.step(step)
    ours, theirs = weights(whole.policy.decoder), weights(late.policy.decoder)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_packing_and_micro_batches_do_not_change_the_step() -> None:
    found = []
    for budget, rows, tokens in ((40, 1, None), (40, 3, None), (1000, 1, None), (40, None, 90)):
        policy = make_policy(small_decoder(dtype=torch.float64), Schedule(3e-3, 100))
        SupervisedSteps(policy, items(), 6, budget, rows, tokens, seed=0).step(1)
        found.append(np.concatenate([w.flatten().numpy() for w in weights(policy.decoder).values()]))
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=0, atol=1e-8)


def test_fewer_samples_than_a_batch() -> None:
    steps = make_steps(batch_size=50)
    assert steps.steps_per_epoch == 1
    assert steps.step(1)["tokens/completion"] == sum(int(s.loss_mask.sum()) for s in samples())
