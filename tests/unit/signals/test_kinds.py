"""Loss kinds per token: policy gradient, cross-entropy and ignored, from the rollout to the gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.losses import LOSSES
from shoal.core.objective import Objective
from shoal.core.types import Rollout, Row
from shoal.trainer.device_batch import DeviceBatch, HostBatch
from unit.core.groups import make_prompt, make_turn
from unit.core.reference import PlainRow, grpo


def three_turns(index: int, kinds: list | None, context_weight: float = 0.0):
    """Prompt [1, 2]; each answer has two tokens, and the environment adds one token after it."""
    turns = [make_turn([3, 4], prompt_ids=[1, 2]), make_turn([6, 7], prompt_ids=[1, 2, 3, 4, 5])]
    turns.append(make_turn([2, 2], prompt_ids=[1, 2, 3, 4, 5, 6, 7, 5]))
    rollout = Rollout(make_prompt(0), index, turns, advantage=0.5, kinds=kinds)
    rollout.token_advantages = [[1.0, -1.0], [2.0, 2.0], [3.0, -3.0]]
    return rollout_samples(rollout, context_weight=context_weight)


def test_samples() -> None:
    (sample,) = three_turns(0, ["policy", "cross_entropy", "ignore"], 0.25)
    assert sample.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 1, 1, 1, 1, 0, 0]
    assert sample.signals["cross_entropy"].tolist() == [0, 0, 0, 0, 0.25, 1, 1, 0.25, 0, 0]
    assert sample.advantages[sample.loss_mask].tolist()[:2] == [1.0, -1.0]
    (plain,) = three_turns(0, None)
    assert plain.loss_mask.astype(int).tolist() == [0, 0, 1, 1, 0, 1, 1, 0, 1, 1] and not plain.signals


@pytest.mark.parametrize("together", [True, False])
def test_gradient_of_each_kind(together: bool) -> None:
    """In one micro-batch or in several: the denominators count all tokens in the loss."""
    samples = [three_turns(0, ["policy", "cross_entropy", "ignore"], 0.25), three_turns(1, None)]
    rows = make_batches(samples, Packing(10, "token-mean", 8, share_prefixes=False))[0].rows
    count = sum(int(row.loss_mask.sum()) for row in rows)
    assert len(rows) == 2 and count == 6 + 6
    for micro in [rows] if together else [[row] for row in rows]:
        check(micro, count)


def check(rows: list[Row], count: int) -> None:
    batch = DeviceBatch.upload(HostBatch.of(rows, torch.device("cpu")), torch.device("cpu"))
    rng = np.random.default_rng(1)
    size = len(batch.targets)
    leaf = torch.tensor(-rng.uniform(0.1, 2, size), requires_grad=True)
    inputs = batch.loss_inputs(leaf, "policy")
    total, metrics = Objective(LOSSES["grpo"]())(inputs, batch.scored["weights"])
    total.backward()
    at = [row.loss_mask for row in rows]
    kind = np.concatenate(
        [row.signals.get("cross_entropy", np.zeros(row.tokens))[m] for row, m in zip(rows, at, strict=True)]
    )
    lp, old = leaf.detach().numpy(), np.concatenate([r.sampler_logprobs[m] for r, m in zip(rows, at, strict=True)])
    advantages = np.concatenate([r.advantages[m] for r, m in zip(rows, at, strict=True)])
    row = PlainRow(lp, old, old, old, kind == 0, advantages, np.zeros(size, dtype=int), 1)
    loss, grad = grpo(row, np.ones(size))
    np.testing.assert_allclose(leaf.grad.numpy(), (grad - kind) / count, rtol=1e-6, atol=1e-12)  # type: ignore[union-attr]
    assert total.item() == pytest.approx((loss - kind * lp).sum() / count, rel=1e-6)
    assert int(metrics["policy/ratio_mean"][1]) == int((kind == 0).sum()), "metrics cover policy tokens only"
