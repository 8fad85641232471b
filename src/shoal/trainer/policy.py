"""The model being trained: log-probs of packed rows, gradients of an objective, optimizer steps.

Runs on one thread, the device's. Knows no algorithm: the objective turns log-probs into a loss and metrics.
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

from shoal.algorithms.inputs import LossInputs, Metrics, MismatchSource
from shoal.models.decoder import Decoder
from shoal.models.logprobs import Scored, token_logprobs
from shoal.models.sharded import ShardedDecoder
from shoal.trainer.graphs import Passed, PassGraphs, Work
from shoal.trainer.micro_batch import Laid, MicroBatch, spread_over_rows
from shoal.trainer.optimizer import AdamSettings, MasterAdamW
from shoal.trainer.schedule import Schedule
from shoal.types import Row

Objective = Callable[[LossInputs, Tensor], tuple[Tensor, Metrics]]


@dataclass(frozen=True)
class Reference:
    """Where reference log-probs come from: the decoder itself under `within` (adapter off), or a frozen copy."""

    decoder: Decoder
    within: Callable[[], AbstractContextManager[None]] = nullcontext


@dataclass(frozen=True)
class OwnStep:
    """One optimizer step's numbers. Without `adam`, betas, epsilon and decay stay as they are."""

    rate: float
    max_grad_norm: float
    adam: AdamSettings | None = None


@dataclass
class RowResults:
    """What one micro-batch came to, still on the device; `read` waits for it, once."""

    _rows: Sequence[Row]
    _passed: Passed

    def read(self) -> tuple[dict[str, tuple[float, float]], list[np.ndarray]]:
        """Everything in one copy."""
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
    ) -> None:
        self.decoder = decoder
        self.optimizer = optimizer
        self.schedule = schedule
        self.max_grad_norm = max_grad_norm
        self.reference = reference
        self.optimizer_steps = 0
        self.shares_prefixes = not _is_random(decoder)
        self._sum_gradients = sum_gradients  # over the processes that train together
        self._graphs = graphs

    @property
    def captures(self) -> bool:
        """Whether passes may become graphs."""
        return self._graphs is not None

    def bound_graphs(self, fits: Callable[[int, int, int], bool]) -> None:
        if self._graphs is not None:
            self._graphs.fits = fits

    @property
    def passes_together(self) -> bool:
        """True where weights are sharded: a pass of one rank is a pass of all of them."""
        return isinstance(self.decoder, ShardedDecoder)

    def logprobs(self, rows: Sequence[Row]) -> RowResults:
        return self._logprobs(rows, self.decoder, "policy")

    def reference_logprobs(self, rows: Sequence[Row]) -> RowResults:
        if self.reference is None:
            raise RuntimeError("this policy has no reference model")
        with self.reference.within():
            return self._logprobs(rows, self.reference.decoder, "reference")

    @torch.no_grad()
    def _logprobs(self, rows: Sequence[Row], decoder: Decoder, whose: str) -> RowResults:
        if not rows:  # a pass over one token that nobody reads: the other ranks need this one's share of the weights
            _score_anything(decoder, 1, 1)
            return RowResults(rows, Passed((), torch.zeros(0)))
        laid = Laid.of(rows, decoder.device)

        def score(micro: MicroBatch) -> Passed:
            return Passed((), self._score(decoder, micro).logprobs)

        return RowResults(rows, self._pass(decoder, whose, laid, score, score))

    def forward_backward(
        self, rows: Sequence[Row], objective: Objective, mismatch_from: MismatchSource = "old"
    ) -> RowResults:
        """Add the gradient of one micro-batch, its rows laid end to end. No rows: pass only because others do."""
        if not rows:
            with self._training():
                (_score_anything(self.decoder, 1, 1).logprobs.sum() * 0).backward()
            return RowResults(rows, Passed((), torch.zeros(0)))
        laid = Laid.of(rows, self.decoder.device)
        plain = partial(self._differentiate, objective, mismatch_from, torch.Tensor.backward)
        work = partial(self._differentiate, objective, mismatch_from, self.optimizer.collect)
        kind = (objective, mismatch_from) if getattr(objective, "is_fixed", False) else None
        with self._training():
            return RowResults(rows, self._pass(self.decoder, kind, laid, work, plain))

    def _differentiate(
        self, objective: Objective, mismatch_from: MismatchSource, collect: Callable[[Tensor], None], micro: MicroBatch
    ) -> Passed:
        scored = self._score(self.decoder, micro)
        inputs = micro.loss_inputs(scored.logprobs, mismatch_from)
        loss, metrics = objective(inputs, micro.scored["weights"])
        collect(loss)
        metrics["policy/entropy"] = inputs.token_metric(scored.entropy)
        return Passed.of(metrics, scored.logprobs)

    def _pass(self, decoder: Decoder, kind: Hashable, laid: Laid, work: Work, plain: Work) -> Passed:
        """`work` as a graph, where it can be one: what is made twice, or differs from pass to pass, cannot."""

        def plainly() -> Passed:
            return plain(MicroBatch.upload(laid, decoder.device))

        if self._graphs is None or kind is None or decoder.fused is None or not self.shares_prefixes:
            return plainly()
        if torch.is_grad_enabled() and decoder.fused.recompute:
            return plainly()
        return self._graphs.run(kind, laid, work, plainly)

    def dry_run(self, tokens: int, rows: int, decoder: Decoder | None = None) -> None:
        """A gradient over full rows of arbitrary tokens, computed and dropped: what a micro-batch costs."""
        decoder = decoder or self.decoder
        with self._training():
            (_score_anything(decoder, tokens, rows).logprobs.sum() * 0).backward()
        self._forget_gradient(decoder)

    def drop_gradient(self) -> None:
        """Before a step is computed anew, with less at once."""
        self._forget_gradient(self.decoder)
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()

    def _forget_gradient(self, decoder: Decoder) -> None:
        for parameter in decoder.model.parameters():
            parameter.grad = None
        self.optimizer.zero_grad()

    def optim_step(self, own: OwnStep | None = None) -> dict[str, float]:
        """Step, unless the gradient is not finite: then nothing moves, and `optim/skipped` says so.

        `own` takes the place of the schedule, for loops that are written outside.
        """
        own = own or OwnStep(self.schedule(self.optimizer_steps + 1), self.max_grad_norm)
        rate = own.rate
        if self._sum_gradients is not None:
            self._sum_gradients(self.optimizer.masters)
        found = self.optimizer.clip(own.max_grad_norm)
        self.optimizer.step(rate, own.adam, found)
        self.optimizer.zero_grad()
        norm = float(found)  # a wait, but for all that the step launched
        skipped = not np.isfinite(norm)
        self.optimizer_steps += 1
        result = {"optim/lr": rate, "optim/skipped": float(skipped)}
        return result if skipped else {**result, "optim/grad_norm": norm}

    def _score(self, decoder: Decoder, micro: MicroBatch) -> Scored:
        """Log-probs of the masked tokens of the rows, one after another."""

        def score() -> tuple[Tensor, Tensor]:
            with decoder.scoring():
                hidden = decoder.hidden(micro.token_ids[None], micro.position_ids[None], micro.context)[0]
            # The state before a token predicts it. For the first after a shared prefix that is the prefix's last.
            states, temperatures = hidden[micro.before], micro.scored["temperatures"]
            scored = token_logprobs(decoder.head, states, micro.targets, temperatures, decoder.vocab_size, micro.kept)
            return scored.logprobs, scored.entropy

        return Scored(*decoder.gathered(score))

    @contextmanager
    def _training(self) -> Iterator[None]:
        self.decoder.model.train()
        try:
            with self.decoder.scoring():
                yield
        finally:
            self.decoder.model.eval()


def _score_anything(decoder: Decoder, tokens: int, rows: int) -> Scored:
    """Log-probs of full rows of arbitrary tokens, none in a position that the model was not made for."""
    ids = torch.arange(tokens * rows, device=decoder.device)
    longest = min(tokens, decoder.max_positions or tokens)

    def score() -> tuple[Tensor, Tensor]:
        context = decoder.pack(np.array([*range(0, len(ids), longest), len(ids)]))
        hidden = decoder.hidden((ids % decoder.vocab_size)[None], (ids % longest)[None], context)[0]
        ones = torch.ones(len(ids), device=decoder.device)
        scored = token_logprobs(decoder.head, hidden, ids % decoder.vocab_size, ones, decoder.vocab_size)
        return scored.logprobs, scored.entropy

    return Scored(*decoder.gathered(score))


def _is_random(decoder: Decoder) -> bool:
    """True if two passes over one prompt may differ in training: then each rollout draws its own, and none is shared.

    Modules show the dropout of adapters; some models apply it as a function, or jitter a router, and name only a rate.
    """
    modules = decoder.model.modules()
    rates = {name: value for name, value in decoder.config.to_dict().items() if "drop" in name or "jitter" in name}
    return any(isinstance(module, _DropoutNd) and module.p > 0 for module in modules) or any(
        isinstance(rate, float) and rate > 0 for rate in rates.values()
    )
