"""The memory plan of a run, before its first step: measured on a GPU, and what it decides put into effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from shoal.build.model import Model
from shoal.build.sampler import GPU_PREFILL_TOKENS
from shoal.config.orch import EvalSamplingConfig, SamplingConfig
from shoal.config.schema import InferConfig, RunConfig
from shoal.config.train import TrainConfig
from shoal.observability.console import Console
from shoal.observability.events import EventLog

if TYPE_CHECKING:
    from shoal.trainer.memory import Demand, MemoryPlan
    from shoal.trainer.policy import TrainedPolicy


def make_plan(config: RunConfig, model: Model, policy: TrainedPolicy | None, ranks: Any = None) -> MemoryPlan:
    """On the device's thread. Without a policy (evaluation) only sampling is planned; without a GPU only the cache."""
    plan = _make_plan(config, model, policy)
    if model.sharded is not None:
        plan = agreed(plan, ranks)
    model.trained.recompute(plan.recompute)
    if policy is not None:
        policy.bound_graphs(plan.graphs.fits)
    return plan


def agreed(plan: MemoryPlan, ranks: Any) -> MemoryPlan:
    """Ranks that pass together cut their micro-batches alike: the smallest plan is everybody's."""
    tokens, keys, kept = ranks.smallest([plan.micro_batch_tokens, plan.keys_for_token, int(not plan.recompute)])
    return replace(plan, micro_batch_tokens=tokens, keys_for_token=keys, recompute=not kept)


def _make_plan(config: RunConfig, model: Model, policy: TrainedPolicy | None) -> MemoryPlan:
    from shoal.trainer.measuring import sampling_plan

    demand = _demand(config)
    if policy is None or model.decoder.device.type != "cuda":
        return sampling_plan(model.decoder, model.layers, demand)
    return _measured_plan(
        replace(demand, captures=policy.captures and not _narrows(config.orch.sampling)), model, policy
    )


def training_plan(train: TrainConfig, batch_size: int, model: Model, policy: TrainedPolicy) -> MemoryPlan | None:
    """Of a run that samples nothing, in effect; None on a CPU, where a row after another is as fast."""
    if model.decoder.device.type != "cuda":
        return None
    from shoal.trainer.memory import Demand

    demand = Demand(
        row_tokens=train.sequence_len,
        step_tokens=batch_size * train.sequence_len,
        rows_per_micro_batch=train.per_device_train_batch_size,
        recompute=train.recompute if isinstance(train.recompute, bool) else None,
        slots=0,
        context_tokens=1,
        utilization=None,
        captures=policy.captures,
        base=_base(train),
    )
    plan = _measured_plan(demand, model, policy)
    model.trained.recompute(plan.recompute)
    policy.bound_graphs(plan.graphs.fits)
    return plan


def _measured_plan(demand: Demand, model: Model, policy: TrainedPolicy) -> MemoryPlan:
    from shoal.trainer.measuring import measure
    from shoal.trainer.memory import decide

    def dry_run(rows: int) -> None:
        with _trainable(model):
            policy.dry_run(demand.row_tokens, rows, model.decoder)

    return decide(measure(model.decoder, model.layers, demand, policy.optimizer.moment_bytes, dry_run), demand)


def _narrows(sampling: SamplingConfig | EvalSamplingConfig) -> bool:
    """Whether draws are narrowed, whose passes are not captured and which take more memory. None: as nothing."""
    top_p = 1.0 if sampling.top_p is None else sampling.top_p
    return top_p < 1 or any((value or 0) > 0 for value in (sampling.top_k, sampling.min_p, sampling.min_tokens))


@contextmanager
def _trainable(model: Model) -> Iterator[None]:
    """The whole copy stands in for the shards: it takes no less, and running out of memory is one rank's own affair."""
    if model.sharded is None:
        yield
        return
    trained = [p.requires_grad for p in model.sharded.model.parameters()]
    for parameter, is_trained in zip(model.decoder.model.parameters(), trained, strict=True):
        parameter.requires_grad_(is_trained)
    model.decoder.model.train()
    try:
        yield
    finally:
        model.decoder.model.eval().requires_grad_(False)


def _demand(config: RunConfig) -> Demand:
    from shoal.trainer.memory import Demand

    train, infer, orch = config.train, config.infer, config.orch
    assert infer.max_model_len is not None and infer.max_num_seqs is not None and orch.seq_len is not None
    return Demand(
        row_tokens=train.sequence_len,
        step_tokens=max(train.sequence_len, orch.batch_size * orch.seq_len // train.minibatches),
        rows_per_micro_batch=train.per_device_train_batch_size,
        recompute=train.recompute if isinstance(train.recompute, bool) else None,
        slots=infer.max_num_seqs,
        context_tokens=infer.max_model_len,
        utilization=infer.gpu_memory_utilization,
        prefill_tokens=GPU_PREFILL_TOKENS,
        narrowed=any(map(_narrows, [orch.sampling, *([orch.eval.sampling] if orch.eval else [])])),
        base=_base(train),
    )


def _base(train: TrainConfig) -> Literal["trained", "frozen", "stored"]:
    return "stored" if train.quantised else "frozen" if train.lora else "trained"


def cpu_share(infer: InferConfig, model: Model) -> str | None:
    """What a key that is named after GPUs means on a CPU, if it was given."""
    share = infer.gpu_memory_utilization
    if share is None or infer.engine != "embedded" or model.decoder.device.type != "cpu":
        return None
    return f"infer.gpu_memory_utilization: on a CPU, {share:g} is the share of the free memory that the cache may take"


def path_lines(path: str) -> list[str]:
    """How tokens are drawn; on a CPU nobody expects anything else."""
    return [] if path == "eager" else [f"rollouts: {path}"]


def lines_of(plan: MemoryPlan) -> list[str]:
    """The plan as a table for people; nothing where nothing was measured."""
    return [f"memory  {name:<52} {size:>22}" for name, size in (plan.table() if plan.lines else [])]


def tell(plan: MemoryPlan, notice: str | None, console: Console, events: EventLog) -> None:
    """The plan as a table, for people and for the run directory."""
    if notice is not None:
        console.note(notice)
    for line in lines_of(plan):
        console.note(line)
    names = ("slots", "micro_batch_tokens", "keys_for_token", "recompute")
    data: dict[str, Any] = {name: getattr(plan, name) for name in names}
    events.emit("memory-plan", "what memory goes to", data={**data, "bytes": dict(plan.lines)})
