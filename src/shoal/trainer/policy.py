"""The model being trained: log-probs of packed rows, gradients of an objective, optimizer steps.

Runs on the device thread. Independent of the algorithm: the objective turns log-probs into a loss and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.dropout import _DropoutNd

from shoal.core.loss_inputs import LossInputs, MismatchSource
from shoal.core.terms import Metrics
from shoal.core.types import Row
from shoal.models.decoder import Decoder
from shoal.models.logprobs import TokenScores, token_logprobs
from shoal.models.sharded import ShardedDecoder
from shoal.trainer.device_batch import DeviceBatch, HostBatch, spread_over_rows
from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
from shoal.trainer.pass_graphs import PassGraphs, PassOutput, Work

Objective = Callable[[LossInputs, Tensor], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Reference:
    """Source of reference log-probs: the decoder itself under `within` (adapter off), or a frozen copy."""

    decoder: Decoder
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class OptimizerSettings:
    """Settings of one optimizer step. `adam` None: betas, epsilon and weight decay are not changed."""

    rate: float
    max_grad_norm: float
    adam: AdamSettings | None = None


@dataclass
class PendingPass:
    """Results of one micro-batch, on the device; `read` synchronises once."""

    _rows: Sequence[Row]
    _passed: PassOutput

    def read(self) -> tuple[dict[str, tuple[float, float]], list[np.ndarray]]:
        """Metrics and log-probs per row, in one copy to the host."""
        names, values = self._passed.names, self._passed.values.cpu()
        numbers, logprobs = values[: 2 * len(names)].tolist(), values[2 * len(names) :]
        metrics = dict(zip(names, zip(numbers[::2], numbers[1::2], strict=True), strict=True))
        return metrics, spread_over_rows(self._rows, logprobs)


class TrainedPolicy:
    def __init__(
        self,
        decoder: Decoder,
        optimizer: MasterAdamW,
        schedule: Schedule,
        max_grad_norm: float = 1.0,
        reference: Reference | None = None,
        sum_gradients: Callable[[Mapping[str, Tensor]], None] | None = None,
        graphs: PassGraphs | None = None,
        teacher: Decoder | None = None,
    ) -> None:
        self.decoder = decoder
        self.teacher = teacher
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.reference = reference
        self.optimizer_steps = 0
        self.signal_state: dict[str, float] = {}  # of learning signals that change during a run; saved in checkpoints
        self.shares_prefixes = not _is_random(decoder) and not decoder.has_states
        self._sum_gradients = sum_gradients  # over the ranks
        self._graphs = graphs

    @property
    def captures(self) -> bool:
        """Whether passes may be captured as CUDA graphs."""
        return self._graphs is not None

    def bound_graphs(self, fits: Callable[[int, int, int], bool]) -> None:
        if self._graphs is not None:
            self._graphs.fits = fits

    @property
    def passes_together(self) -> bool:
        """Whether weights are sharded, so that all ranks must run each pass together."""
        return isinstance(self.decoder, ShardedDecoder)

    def logprobs(self, rows: Sequence[Row]) -> PendingPass:
        return self._logprobs(rows, self.decoder, "policy")

    def entropies(self, rows: Sequence[Row]) -> PendingPass:
        """Entropy of the policy at the tokens in the loss, instead of log-probs."""
        return self._logprobs(rows, self.decoder, "entropy", entropy=True)

    def teacher_logprobs(self, rows: Sequence[Row]) -> PendingPass:
        if self.teacher is None:
            raise RuntimeError("this policy has no teacher model")
        return self._logprobs(rows, self.teacher, "teacher")

    def reference_logprobs(self, rows: Sequence[Row]) -> PendingPass:
        if self.reference is None:
            raise RuntimeError("this policy has no reference model")
        with self.reference.within():
            return self._logprobs(rows, self.reference.decoder, "reference")

    @torch.no_grad()
    def _logprobs(self, rows: Sequence[Row], decoder: Decoder, whose: str, entropy: bool = False) -> PendingPass:
        if not rows:  # a pass over one unused token: other ranks need this rank's shards
            _score_anything(decoder, 1, 1)
            return PendingPass(rows, PassOutput((), torch.zeros(0)))
        laid = _host_batch(rows, decoder)

        def score(micro: DeviceBatch) -> PassOutput:
            scored = self._score(decoder, micro)
            return PassOutput((), scored.entropy if entropy else scored.logprobs)

        return PendingPass(rows, self._pass(decoder, whose, laid, score, score))

    def forward_backward(
        self, rows: Sequence[Row], objective: Objective, mismatch_from: MismatchSource = "old"
    ) -> PendingPass:
        """Add the gradient of one micro-batch. Without rows, run a pass without effect: all ranks must take part."""
        if not rows:
            with self._training():
                (_score_anything(self.decoder, 1, 1).logprobs.sum() * 0).backward()
            return PendingPass(rows, PassOutput((), torch.zeros(0)))
        laid = _host_batch(rows, self.decoder)
        plain = partial(self._differentiate, objective, mismatch_from, torch.Tensor.backward)
        work = partial(self._differentiate, objective, mismatch_from, self.optimizer.collect)
        fixed = getattr(objective, "is_fixed", False) and "entropy_coef" not in laid.arrays
        kind = (objective, mismatch_from) if fixed else None
        with self._training():
            return PendingPass(rows, self._pass(self.decoder, kind, laid, work, plain))

    def _differentiate(
        self, objective: Objective, mismatch_from: MismatchSource, collect: Callable[[Tensor], None], micro: DeviceBatch
    ) -> PassOutput:
        needed = micro.needs_entropy_gradient or getattr(objective, "needs_entropy_gradient", False)
        scored = self._score(self.decoder, micro, entropy_gradient=needed)
        inputs = micro.loss_inputs(scored.logprobs, mismatch_from, scored.entropy)
        loss, metrics = objective(inputs, micro.scored["weights"])
        collect(loss)
        metrics["policy/entropy"] = inputs.token_metric(scored.entropy)
        return PassOutput.of(metrics, scored.logprobs)

    def _pass(self, decoder: Decoder, kind: Hashable, laid: HostBatch, work: Work, plain: Work) -> PassOutput:
        """Run `work` as a CUDA graph if possible: not with checkpointing, nor if passes differ (dropout)."""

        def plainly() -> PassOutput:
            return plain(DeviceBatch.upload(laid, decoder.device))

        if self._graphs is None or kind is None or decoder.fused is None or not self.shares_prefixes:
            return plainly()
        if torch.is_grad_enabled() and decoder.fused.recompute:
            return plainly()
        return self._graphs.run(kind, laid, work, plainly)

    def dry_run(self, tokens: int, rows: int, decoder: Decoder | None = None) -> None:
        """Compute and drop a gradient over full rows of arbitrary tokens, to measure the memory of a micro-batch."""
        decoder = decoder or self.decoder
        with self._training():
            (_score_anything(decoder, tokens, rows).logprobs.sum() * 0).backward()
        self._forget_gradient(decoder)

    def discard_gradient(self) -> None:
        """Drop the gradient before a step is repeated with smaller micro-batches."""
        self._forget_gradient(self.decoder)
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget_gradient(self, decoder: Decoder) -> None:
        for parameter in decoder.model.parameters():
            parameter.grad = None
        self.optimizer.zero_grad()

    def optim_step(self, own: OptimizerSettings | None = None) -> dict[str, float]:
        """Step. If the gradient is not finite, nothing is updated and `optim/skipped` is 1.

        `own` replaces the schedule, for custom loops.
        """
        own = own or OptimizerSettings(self.schedule(self.optimizer_steps + 1), self.max_grad_norm)
        rate = own.rate
        if self._sum_gradients is not None:
            self._sum_gradients(self.optimizer.masters)
        found = self.optimizer.clip(own.max_grad_norm)
        self.optimizer.step(rate, own.adam, found)
        self.optimizer.zero_grad()
        norm = float(found)  # the only device sync of the step
        skipped = not np.isfinite(norm)
        self.optimizer_steps += 1
        result = {"optim/lr": rate, "optim/skipped": float(skipped)}
        return result if skipped else {**result, "optim/grad_norm": norm}

    def _score(self, decoder: Decoder, micro: DeviceBatch, entropy_gradient: bool = False) -> TokenScores:
        """Log-probs and entropies of the rows' tokens under the loss mask."""

        def score() -> tuple[Tensor, Tensor]:
            with decoder.scoring():
                hidden = decoder.hidden(micro.token_ids[None], micro.position_ids[None], micro.context)[0]
            # The state before a token predicts it; after a shared prefix that is the prefix's last state.
            states, temperatures = hidden[micro.before], micro.scored["temperatures"]
            head, width = decoder.head, decoder.vocab_size
            scored = token_logprobs(head, states, micro.targets, temperatures, width, micro.kept, entropy_gradient)
            return scored.logprobs, scored.entropy

        return TokenScores(*decoder.gathered(score))

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.decoder.model.train()
        try:
            with self.decoder.scoring():
                yield
        finally:
            self.decoder.model.eval()


def _host_batch(rows: Sequence[Row], decoder: Decoder) -> HostBatch:
    batch = HostBatch.of(rows, decoder.device)
    decoder.check_length(int(batch.arrays["position_ids"].max()) + 1)
    return batch


def _score_anything(decoder: Decoder, tokens: int, rows: int) -> TokenScores:
    """Log-probs of full rows of arbitrary tokens, at positions within the model's maximum."""
    ids = torch.arange(tokens * rows, device=decoder.device)
    longest = min(tokens, decoder.max_positions or tokens)

    def score() -> tuple[Tensor, Tensor]:
        context = decoder.pack(np.array([*range(0, len(ids), longest), len(ids)]))
        hidden = decoder.hidden((ids % decoder.vocab_size)[None], (ids % longest)[None], context)[0]
        ones = torch.ones(len(ids), device=decoder.device)
        scored = token_logprobs(decoder.head, hidden, ids % decoder.vocab_size, ones, decoder.vocab_size)
        return scored.logprobs, scored.entropy

    return TokenScores(*decoder.gathered(score))


def _is_random(decoder: Decoder) -> bool:
    """Whether two training passes over one prompt may differ; then rollouts cannot share their prompt's states.

    Adapters have dropout modules; some models apply dropout or router jitter as a function, seen only in the config.
    """
    modules = decoder.model.modules()
    rates = {name: value for name, value in decoder.config.to_dict().items() if "drop" in name or "jitter" in name}
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules) or any(
        isinstance(rate, float) and rate > 0 for rate in rates.values()
    )
