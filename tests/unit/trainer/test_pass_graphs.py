"""Micro-batches padded to the size of a graph: the same log-probs, metrics and gradients, and bounds that cover all
tokens.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from shoal.core.losses import LOSSES
from shoal.core.objective import Objective
from shoal.core.terms import CORRECTIONS, KLPenalty
from shoal.core.types import Row
from shoal.models.attention import Packed, upload
from shoal.models.graph_cache import CapturedGraph
from shoal.trainer.device_batch import DeviceBatch, HostBatch
from shoal.trainer.pass_graphs import (
    GRAPH_TOKENS,
    TIMED,
    GraphBucket,
    PassGraphs,
    PassOutput,
    Span,
    padded,
    sizes,
)
from shoal.trainer.policy import PendingPass, TrainedPolicy
from support.models import lora_decoder, small_decoder
from support.training import gradients, grouped_samples, make_policy, pack, random_samples

CPU = torch.device("cpu")
ALONE = random_samples(0, (4, 8), (10, 6), (2, 12), (7, 3))
LONG = random_samples(1, (900, 1100), (30, 570), (100, 1500))
LONG_SHARED = grouped_samples(1, (1100, (300, 900, 5)), (40, (610, 600)))
SHARED = grouped_samples(0, (9, (5, 8, 3)), (4, (6, 6)))
OBJECTIVES = {
    **{name: Objective(loss()) for name, loss in LOSSES.items()},
    **{f"grpo, {kind.choice()}": Objective(LOSSES["grpo"](correction=kind())) for kind in CORRECTIONS},
    "grpo, kl": Objective(LOSSES["grpo"](kl=KLPenalty(beta=0.1))),
}


def rows_of(samples: object, reference: bool, most: int = 40) -> list[Row]:
    rows = pack(samples, most, max_tokens=most).rows  # type: ignore[arg-type]
    for row in rows:
        row.old_logprobs = row.sampler_logprobs - 0.05
        row.reference_logprobs = row.sampler_logprobs + 0.1 if reference else None
    return rows


def filled(laid: HostBatch, extent: GraphBucket) -> DeviceBatch:
    """As for a graph, except for attention: without a GPU, segments are read from the host."""
    arrays = padded(laid, extent)
    starts, prefixes = laid.context.starts, laid.context.prefixes
    filling = [int(end) for end in np.unique(arrays["starts"]) if end > starts[-1]]
    more = None if prefixes is None else np.append(prefixes, [-1] * len(filling))
    context = Packed(np.append(starts, filling), CPU, prefixes=more)
    return DeviceBatch.made_of(upload(arrays, CPU), context, extent.segments)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("samples", (ALONE, SHARED), ids=("alone", "shared"))
def test_padding_changes_nothing(name: str, samples: object) -> None:
    """In float64, for every loss: padding has no effect."""
    objective = OBJECTIVES[name]
    rows = rows_of(samples, objective.needs_reference)
    policy = make_policy(small_decoder(dtype=torch.float64))
    metrics, logprobs = policy.forward_backward(rows, objective).read()
    expected = gradients(policy)
    laid = HostBatch.of(rows, CPU)
    extent = GraphBucket.covering(laid)
    assert extent.tokens > len(laid.arrays["token_ids"]) and extent.segments > laid.sequences
    with policy._training():
        passed = policy._differentiate(objective, "old", policy.optimizer.collect, filled(laid, extent))
    found, values = PendingPass(rows, passed).read()
    for key, pair in metrics.items():
        np.testing.assert_allclose(found[key], pair, rtol=1e-12, atol=1e-12, err_msg=key)
    for ours, theirs in zip(values, logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(gradients(policy), expected, rtol=1e-10, atol=1e-12)


def test_gradients_accumulate_in_place() -> None:
    """Accumulating twice doubles the gradient in place, also after a plain backward; and an optimizer step uses it."""
    rows = rows_of(ALONE, False)
    objective = OBJECTIVES["grpo"]
    policies = [make_policy(lora_decoder()) for _ in range(2)]
    for _ in range(2):
        policies[0].forward_backward(rows, objective)
    collect_twice(policies[1], rows, objective)
    places = {name: master.grad.data_ptr() for name, master in policies[1].optimizer.masters.items()}  # type: ignore[union-attr]
    for policy in policies:
        policy.forward_backward(rows, objective)
    expected, found = (
        {name: master.grad.clone() for name, master in policy.optimizer.masters.items()}  # type: ignore[union-attr]
        for policy in policies
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    outcomes = [policy.optim_step() for policy in policies]
    assert outcomes[0] == pytest.approx(outcomes[1], rel=1e-5)
    assert {name: m.grad.data_ptr() for name, m in policies[1].optimizer.masters.items()} == places  # type: ignore[union-attr]
    assert all(not m.grad.any() for m in policies[1].optimizer.masters.values())  # type: ignore[union-attr]


def collect_twice(policy: TrainedPolicy, rows: list[Row], objective: Objective) -> None:
    micro = DeviceBatch.upload(HostBatch.of(rows, CPU), CPU)
    with policy._training():
        for _ in range(2):
            policy._differentiate(objective, "old", policy.optimizer.collect, micro)


@pytest.mark.parametrize(
    "samples", (ALONE, SHARED, LONG, LONG_SHARED), ids=("alone", "shared", "long", "long and shared")
)
def test_bounds_cover_all(samples: object) -> None:
    """Every real segment has its queries and keys. Padding tokens attend to padding, and nothing attends to padding
    keys.
    """
    laid = HostBatch.of(rows_of(samples, False, 8000), CPU)
    extent = GraphBucket.covering(laid)
    arrays = padded(laid, extent)
    bounds = laid.context.bounds[0]
    real, count = len(bounds["starts"]) - 1, len(laid.arrays["token_ids"])
    starts = arrays["starts"]
    key_starts, keys = arrays.get("key_starts", starts), arrays.get("keys", np.arange(extent.tokens))
    assert len(starts) == len(key_starts) == extent.segments + 1
    assert starts[-1] == extent.tokens and key_starts[-1] == len(keys) == (extent.keys or extent.tokens)
    assert starts[: real + 1].tolist() == bounds["starts"].tolist()
    real_keys = bounds.get("keys", np.arange(bounds["starts"][-1]))
    np.testing.assert_array_equal(keys[: key_starts[real]], real_keys)
    queries, seen = (np.diff(ends) for ends in (starts, key_starts))
    assert (queries >= 0).all() and max(queries) <= extent.longest[0] and max(seen) <= extent.longest[1]
    assert ((seen >= queries) | (queries == 0)).all()
    filling = np.flatnonzero(queries[real:]) + real
    assert sum(queries[filling]) == extent.tokens - count and max(queries[filling]) <= 512
    for segment in filling:
        own = keys[key_starts[segment] : key_starts[segment + 1]]
        assert own.tolist() == list(range(starts[segment], starts[segment + 1]))
    spare = keys[key_starts[filling[-1] + 1] :]
    assert not len(spare) or np.bincount(spare).max() <= -(-len(spare) // extent.tokens)


def test_sizes() -> None:
    """Powers of two and three quarters of them, from 8,192 multiples of 2,048; always one token more than needed."""
    laid = HostBatch.of(rows_of(ALONE, False), CPU)
    assert GraphBucket.covering(laid) == GraphBucket(256, 0, 64, (512, 512))
    assert GraphBucket.covering(HostBatch.of(rows_of(SHARED, False), CPU)) == GraphBucket(256, 512, 64, (512, 512))
    for count, tokens in ((254, 256), (255, 256), (256, 384), (383, 384), (384, 512), (768, 1024), (1535, 1536)):
        long = random_samples(0, (count - 20, 20))
        found = GraphBucket.covering(HostBatch.of(pack(long, 4000, max_tokens=4000).rows, CPU))
        assert found.tokens == tokens, count
    assert sizes(0) == [] and sizes(100) == [256] and sizes(700) == [256, 384, 512, 768]
    assert sizes(3071)[-1] == 3072 and sizes(3072)[-1] == 4096 and sizes(GRAPH_TOKENS - 1) == sizes(100_000)
    assert sizes(100_000)[-4:] == [26_624, 28_672, 30_720, GRAPH_TOKENS]
    assert sizes(8191)[-1] == 8192 and sizes(8192)[-1] == 10_240 and sizes(10_240)[-1] == 12_288


class SetSpan(Span):
    """Returns preset times: 100 ms for eager passes, `graph_ms` for graphs."""

    made: list[SetSpan]
    graph_ms: float
    graphs: PassGraphs

    def __init__(self) -> None:
        self.made.append(self)
        self.entered = 0

    def __enter__(self) -> None:
        self.entered += 1

    def __exit__(self, *_: object) -> None: ...

    @property
    def ms(self) -> float:
        assert self.entered == 1
        return self.graph_ms if any(self in size.replays for size in self.graphs._sizes.values()) else 100.0


class SetGraph:
    def replay(self) -> None: ...


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> PassGraphs:
    """Without a GPU: the captured objects are preset."""
    monkeypatch.setattr(SetSpan, "made", [], raising=False)
    monkeypatch.setattr(SetSpan, "graph_ms", 50.0, raising=False)
    found = PassGraphs(CPU, SetSpan)
    monkeypatch.setattr(SetSpan, "graphs", found, raising=False)
    found._capture = capture  # type: ignore[method-assign]
    return found


def capture(arrays: dict[str, np.ndarray], extent: GraphBucket, work: object) -> Any:
    inputs = {name: torch.from_numpy(array).clone() for name, array in arrays.items()}
    return CapturedGraph(SetGraph(), inputs, GRAPHED)  # type: ignore[arg-type]


PLAIN, GRAPHED = PassOutput((), torch.zeros(1)), PassOutput((), torch.ones(1))


def passes(graphs: PassGraphs, count: int, kind: str = "policy", samples: object = ALONE) -> str:
    """How each pass was computed: eagerly or as a graph."""
    laid = HostBatch.of(rows_of(samples, False), CPU)
    found = [graphs.run(kind, laid, lambda _: pytest.fail("called"), lambda: PLAIN) for _ in range(count)]
    return "".join("pg"[int(passed.values[0])] for passed in found)


@pytest.mark.parametrize(("ms", "then"), [(50.0, "g"), (94.0, "g"), (96.0, "p"), (180.0, "p")])
def test_graph_is_kept_if_measured_faster(graphs: PassGraphs, ms: float, then: str) -> None:
    """Three passes of a size are timed eagerly, three as a graph. Then the decision is made."""
    SetSpan.graph_ms = ms
    assert passes(graphs, 10) == "pppggg" + then * 4 and len(SetSpan.made) == 2 * TIMED
    assert len(graphs.captured) == (then == "g")
    assert passes(graphs, 4, "reference") == "pppg"  # which is timed separately


def test_fastest_of_several_measurements_is_used(graphs: PassGraphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that compiled a kernel does not represent the next one."""
    times = iter([2936.0, 843.0, 115.0, 900.0, 118.0, 117.0])
    monkeypatch.setattr(SetSpan, "ms", property(lambda span: listed[id(span)]))
    assert passes(graphs, 6) == "pppggg"
    listed = {id(span): next(times) for span in SetSpan.made}
    assert passes(graphs, 2) == "pp" and not graphs.captured


@pytest.mark.parametrize("full", ("graphs", "bytes"))
def test_full_graph_pool_is_reset_later(graphs: PassGraphs, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    """The number and bytes of graphs are limited, and sizes that came early may not come again."""
    graphs._graphs.limit = 2 if full == "graphs" else 100
    monkeypatch.setattr("shoal.trainer.pass_graphs.POOL_PASSES", 20)
    graphs.fits = lambda tokens, keys, pool_bytes: pool_bytes < 200

    def capture_bytes(*given: Any) -> Any:
        graphs._graphs.pool_bytes += 100
        return capture(*given)

    graphs._capture = capture_bytes  # type: ignore[method-assign]
    assert [passes(graphs, 5, kind) for kind in "abc"] == ["pppgg", "pppgg", "ppppp"]
    assert passes(graphs, 3, "b") == "ggg"
    SetSpan.graph_ms = 180.0
    assert passes(graphs, 6, "c") == "pgggpp", "captured late, and still compared"
    assert not graphs.captured and graphs._graphs.pool_bytes == 0, "the pool is freed with its last graph"
    assert passes(graphs, 4, "a") == "gppp" and passes(graphs, 2, "b") == "gg"


def test_failed_pass_is_not_timed(graphs: PassGraphs) -> None:
    laid = HostBatch.of(rows_of(ALONE, False), CPU)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            graphs.run("policy", laid, lambda _: pytest.fail("called"), lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    assert passes(graphs, 4) == "pppg"


@pytest.mark.parametrize(
    ("error", "what", "tries"),
    [(RuntimeError, "training passes", 1), (torch.OutOfMemoryError, "training passes of 256 tokens", 2)],
)
def test_failed_capture_is_tried_once_and_reported(
    graphs: PassGraphs, caplog: pytest.LogCaptureFixture, error: type[RuntimeError], what: str, tries: int
) -> None:
    """Out of memory disables one size. If the model cannot be captured, all sizes are disabled."""
    tried: list[GraphBucket] = []

    def fail(arrays: object, extent: GraphBucket, work: object) -> NoReturn:
        tried.append(extent)
        raise error("not permitted when stream is capturing\nand more")

    graphs._capture = fail  # type: ignore[method-assign]
    assert passes(graphs, 6) == "p" * 6 and passes(graphs, 5, "reference") == "p" * 5
    assert tried == [GraphBucket.covering(HostBatch.of(rows_of(ALONE, False), CPU))] * tries
    told = f"no CUDA graph{'s' * (tries == 1)} for {what}: not permitted when stream is capturing"
    assert [record.getMessage() for record in caplog.records] == [told] * tries


def test_failed_capture_frees_its_memory(graphs: PassGraphs) -> None:
    """Its memory is in a pool that nothing else can use while a graph lives. The other graphs are captured again."""
    assert passes(graphs, 4) == "pppg"

    def fail(*_: object) -> NoReturn:
        raise torch.OutOfMemoryError("no memory")

    graphs._capture = fail  # type: ignore[method-assign]
    assert passes(graphs, 4, "reference") == "pppp" and not graphs.captured
    graphs._capture = capture  # type: ignore[method-assign]
    assert passes(graphs, 1) == "g" and passes(graphs, 1, "reference") == "p"


def test_graphs_without_planned_memory_are_not_captured(graphs: PassGraphs) -> None:
    asked: list[tuple[int, ...]] = []
    graphs.fits = lambda *room: bool(asked.append(room))
    graphs._graphs.pool_bytes = 7
    assert passes(graphs, 6, samples=SHARED) == "p" * 6
    assert asked == [(256, 512, 7)] * 3


def test_pass_results_are_read_in_one_copy() -> None:
    row = rows_of(ALONE, False)[0]
    scored = int(row.loss_mask.sum())
    values = torch.cat([torch.tensor([3.0, 4.0, 5.0, 0.0]), torch.arange(scored + 9)]).double()
    metrics, (logprobs,) = PendingPass([row], PassOutput(("one", "two"), values)).read()
    assert metrics == {"one": (3, 4), "two": (5, 0)}
    assert logprobs[row.loss_mask].tolist() == list(range(scored)) and not logprobs[~row.loss_mask].any()
