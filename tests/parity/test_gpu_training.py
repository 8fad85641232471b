"""Training passes as CUDA graphs against the same ones launch by launch: log-probs, metrics, gradients, over steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from shoal.algorithms.losses import LOSSES
from shoal.algorithms.objective import Objective
from shoal.models import fused
from shoal.models.decoder import Decoder
from shoal.trainer.graphs import GRAPH_TOKENS, PassGraphs
from shoal.trainer.policy import Reference, TrainedPolicy
from shoal.types import Row
from support.models import as_decoder, lora_decoder, small_model
from support.training import gradients, grouped_samples, make_policy, pack, random_samples

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
# Two sizes that graphs tell apart, each met several times with other lengths; and one whose segments share nothing.
MICRO_BATCHES = [
    grouped_samples(0, (90, (50, 80, 30)), (40, (60, 60))),
    grouped_samples(1, (80, (55, 70, 40)), (45, (50, 61))),
    random_samples(2, (100, 200), (120, 300)),
    grouped_samples(3, (85, (40, 85, 35)), (41, (60, 55))),
    random_samples(4, (90, 220), (110, 290)),
]


def decoder_of(kind: str) -> Decoder:
    made = lora_decoder(dtype=torch.bfloat16) if kind == "lora" else as_decoder(small_model(kind, dtype=torch.bfloat16))
    decoder = Decoder(made.model.to(CUDA))
    fused.attach(decoder, decoder.verify())
    assert decoder.fused is not None
    return decoder


def policy_of(kind: str, graphs: bool) -> TrainedPolicy:
    decoder = decoder_of(kind)
    policy = make_policy(decoder, reference=Reference(decoder))
    policy._graphs = PassGraphs(CUDA) if graphs else None
    return policy


def rows_of(samples: Any) -> list[Row]:
    rows = pack(samples, 1000, max_tokens=1000).rows
    for row in rows:
        row.old_logprobs = row.sampler_logprobs - 0.05
    return rows


def gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Of all numbers together, relative."""
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return (difference / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5


@pytest.mark.parametrize("kind", ("llama", "qwen2", "qwen3", "mistral", "lora"))
def test_passes_in_graphs(kind: str) -> None:
    """Through optimizer steps, which graphs see; each micro-batch twice in a step, which adds up."""
    ours, theirs = policy_of(kind, True), policy_of(kind, False)
    objective = Objective(LOSSES["grpo"]())
    for step in range(4):
        for samples in MICRO_BATCHES:
            rows = rows_of(samples)
            for way in ("logprobs", "reference_logprobs"):
                for mine, other in zip(getattr(ours, way)(rows), getattr(theirs, way)(rows), strict=True):
                    np.testing.assert_allclose(mine, other, rtol=0, atol=0.06, err_msg=f"{way}, step {step}")
            results = [policy.forward_backward(rows, objective) for policy in (ours, theirs) for _ in range(2)]
            (metrics, logprobs), (expected, other) = results[1].read(), results[3].read()
            assert list(metrics) == list(expected)
            for name, (total, count) in expected.items():
                assert metrics[name][1] == count, name
                assert metrics[name][0] == pytest.approx(total, rel=0.05, abs=0.05 * max(1, count) ** 0.5), name
            for mine, value in zip(logprobs, other, strict=True):
                np.testing.assert_allclose(mine, value, rtol=0, atol=0.06)
            sums = [{name: m.grad.clone() for name, m in policy.optimizer.masters.items()} for policy in (ours, theirs)]  # type: ignore[union-attr]
            assert gap(*sums) < 0.03, f"{kind}, step {step}: {gap(*sums):.3f}"
        assert all(policy.optim_step()["optim/skipped"] == 0 for policy in (ours, theirs))
        with torch.no_grad():  # so that what a step rounds otherwise does not add up
            for name, parameter in ours.optimizer.parameters.items():
                parameter.copy_(theirs.optimizer.parameters[name])
                ours.optimizer.masters[name].copy_(theirs.optimizer.masters[name])
    kinds = {key[0] for key in ours._graphs._graphs}  # type: ignore[union-attr,index]
    assert kinds == {"policy", "reference", (objective, "old")}
    assert len(ours._graphs._graphs) == 6  # type: ignore[union-attr]


def test_graphs_take_no_part_where_they_cannot() -> None:
    """Large micro-batches, narrowed draws, activations made twice: launch by launch, however often they come."""
    policy = policy_of("llama", True)
    objective = Objective(LOSSES["grpo"]())
    large = rows_of(random_samples(0, *((400, 600),) * (GRAPH_TOKENS // 1000 + 1)))
    narrowed = rows_of(random_samples(1, (20, 30)))
    for row in narrowed:
        row.kept_ids = [[int(token), 3] for token in row.token_ids]
    plain = rows_of(random_samples(2, (20, 30)))
    for _ in range(3):
        for rows in (large, narrowed):
            policy.forward_backward(rows, objective)
            policy.logprobs(rows)
        policy.decoder.recompute(True)
        policy.forward_backward(plain, objective)
        policy.decoder.recompute(False)
    assert not policy._graphs._graphs and gradients(policy)  # type: ignore[union-attr]
