"""Training passes as CUDA graphs against eager passes: log-probs, metrics and gradients, over several steps."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.losses import LOSSES
from shoal.core.objective import Objective
from shoal.core.types import Row
from shoal.models import fused
from shoal.models.decoder import Decoder
from shoal.models.lora import as_reference
from shoal.trainer.device_batch import DeviceBatch, HostBatch
from shoal.trainer.pass_graphs import GRAPH_TOKENS, TIMED, PassGraphs, PassOutput, Span
from shoal.trainer.policy import Reference, TrainedPolicy
from support.models import as_decoder, hybrid_decoder, lora_decoder, small_model
from support.training import gradients, grouped_samples, make_policy, pack, random_samples

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
KINDS_OF_BASE = {"lora": None, "stored fp8": "fp8", "stored fp4": "fp4", "stored nf4": "nf4"}
# Two bucket sizes, each used several times with other lengths, and one row whose segments share nothing.
MICRO_BATCHES = [
    grouped_samples(0, (90, (50, 80, 30)), (40, (60, 60))),
    grouped_samples(1, (80, (55, 70, 40)), (45, (50, 61))),
    random_samples(2, (100, 200), (120, 300)),
    grouped_samples(3, (85, (40, 85, 35)), (41, (60, 55))),
    random_samples(4, (90, 220), (110, 290)),
]


class Kept(Span):
    """All graphs are kept, because these tests are not about their speed."""

    @property
    def ms(self) -> float:
        return 0.0


def decoder_of(kind: str) -> Decoder:
    """A decoder of a family, or with adapters on a quantised base."""
    if kind == "hybrid":
        made = hybrid_decoder("qwen2", True)
    elif kind in KINDS_OF_BASE:
        made = lora_decoder("qwen2", dtype=torch.bfloat16, stored=KINDS_OF_BASE[kind], device="cuda")
    else:
        made = as_decoder(small_model(kind, dtype=torch.bfloat16))
    decoder = Decoder(made.model.to(CUDA))
    fused.attach(decoder, decoder.verify())
    assert decoder.fused is not None
    return decoder


def policy_of(kind: str, graphs: bool) -> TrainedPolicy:
    decoder = decoder_of(kind)
    adapted = kind == "hybrid" or kind in KINDS_OF_BASE
    reference = Reference(decoder, partial(as_reference, decoder.model) if adapted else nullcontext)  # type: ignore[arg-type]
    policy = make_policy(decoder, reference=reference)
    policy._graphs = PassGraphs(CUDA, Kept) if graphs else None
    return policy


def rows_of(samples: Any) -> list[Row]:
    rows = pack(samples, 1000, max_tokens=1000).rows
    for row in rows:
        row.old_logprobs = row.sampler_logprobs - 0.05
    return rows


def gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The relative difference of all numbers together."""
    difference = sum(float((ours[name] - theirs[name]).double().square().sum()) for name in theirs)
    return (difference / sum(float(value.double().square().sum()) for value in theirs.values())) ** 0.5


@pytest.mark.parametrize("kind", ("llama", "qwen2", "qwen3", "mistral", "smollm3", "hybrid", *KINDS_OF_BASE))
def test_passes_in_cuda_graphs(kind: str) -> None:
    """Over optimizer steps, whose weights graphs must use. Each micro-batch runs twice per step, and gradients add up.

    With adapters, the reference is the base without adapters.
    """
    if kind == "stored nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    ours, theirs = policy_of(kind, True), policy_of(kind, False)
    objective = Objective(LOSSES["grpo"]())
    for step in range(4):
        for samples in MICRO_BATCHES:
            rows = rows_of(samples)
            for way in ("logprobs", "reference_logprobs"):
                found, wanted = (getattr(policy, way)(rows).read()[1] for policy in (ours, theirs))
                for mine, other in zip(found, wanted, strict=True):
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
        with torch.no_grad():  # so that rounding differences of a step do not accumulate
            for name, parameter in ours.optimizer.parameters.items():
                parameter.copy_(theirs.optimizer.parameters[name])
                ours.optimizer.masters[name].copy_(theirs.optimizer.masters[name])
    assert {kind for kind, *_ in captured(ours)} == {"policy", "reference", (objective, "old")}
    assert len(captured(ours)) == 6


def captured(policy: TrainedPolicy) -> list[Any]:
    return policy._graphs.captured  # type: ignore[union-attr]


class Slow(Span):
    """Graphs take longer in all cases; eager passes take no time."""

    asked = 0

    @property
    def ms(self) -> float:
        Slow.asked += 1
        return 9.0 - Slow.asked  # replays are measured first


def test_small_passes_are_faster_as_graphs() -> None:
    """Measured: launching kernels takes most of the time of eager passes."""
    policy = policy_of("llama", True)
    policy._graphs = PassGraphs(CUDA)
    for _ in range(2 * TIMED + 1):
        policy.forward_backward(rows_of(MICRO_BATCHES[0]), Objective(LOSSES["grpo"]()))
    assert len(captured(policy)) == 1
    (size,) = policy._graphs._sizes.values()
    assert 0 < min(span.ms for span in size.replays) < min(span.ms for span in size.plain)
    assert size.judged and policy._graphs._graphs.pool_bytes > 0


def test_dropped_graph_frees_space_for_others() -> None:
    """The only graph of its pool is slower than eager: the next size is still captured and computes the same result."""
    ours, theirs = policy_of("llama", True), policy_of("llama", False)
    ours._graphs = PassGraphs(CUDA, Slow)
    for samples in (MICRO_BATCHES[0], MICRO_BATCHES[2]):
        rows = rows_of(samples)
        Slow.asked = 0
        for number in range(2 * TIMED + 2):
            for mine, other in zip(ours.logprobs(rows).read()[1], theirs.logprobs(rows).read()[1], strict=True):
                np.testing.assert_allclose(mine, other, rtol=0, atol=0.06)
            assert len(captured(ours)) == (TIMED <= number < 2 * TIMED)
    torch.randn(3, device=CUDA)  # no capture is active


def test_uncapturable_work_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    """Work that syncs with the device runs eagerly, and so does later work, on the same stream."""
    graphs, laid = PassGraphs(CUDA, Kept), HostBatch.of(rows_of(MICRO_BATCHES[0]), CUDA)
    stream = torch.cuda.current_stream()

    def work(micro: DeviceBatch) -> PassOutput:
        return PassOutput((), torch.full((1,), float(micro.token_ids.sum().item()), device=CUDA, dtype=torch.float64))

    passed = [graphs.run("asks", laid, work, lambda: work(DeviceBatch.upload(laid, CUDA))) for _ in range(TIMED + 2)]
    torch.randn(3, device=CUDA)  # random generators are no longer registered with a capture
    assert {float(one.values) for one in passed} == {float(laid.arrays["token_ids"].sum())}
    assert not graphs.captured and torch.cuda.current_stream() == stream
    assert ["no CUDA graphs for training passes" in record.getMessage() for record in caplog.records] == [True]
    assert not torch.cuda.is_current_stream_capturing()
    ours, theirs = (
        policy_of("llama", True),
        policy_of("llama", False),
    )  # and graphs of another object can still be captured
    for _ in range(TIMED + 1):
        rows = rows_of(MICRO_BATCHES[0])
        for mine, other in zip(ours.logprobs(rows).read()[1], theirs.logprobs(rows).read()[1], strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=0.06)
    assert len(captured(ours)) == 1


def test_graphs_are_disabled_where_unsupported() -> None:
    """Large micro-batches, truncated sampling and activation checkpointing always run eagerly."""
    policy = policy_of("llama", True)
    objective = Objective(LOSSES["grpo"]())
    large = rows_of(random_samples(0, *((400, 600),) * (GRAPH_TOKENS // 1000 + 1)))
    narrowed = rows_of(random_samples(1, (20, 30)))
    for row in narrowed:
        row.kept_ids = [[int(token), 3] for token in row.token_ids]
    plain = rows_of(random_samples(2, (20, 30)))
    for _ in range(TIMED + 1):
        for rows in (large, narrowed):
            policy.forward_backward(rows, objective)
            policy.logprobs(rows).read()[1]
        policy.decoder.recompute(True)
        policy.forward_backward(plain, objective)
        policy.decoder.recompute(False)
    assert not captured(policy) and gradients(policy)
