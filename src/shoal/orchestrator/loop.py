"""The loop: collect, learn, publish, record, save. Everything it touches is a protocol or a plain function.

One step here is one version of the policy. A step that trained nothing (all groups flat) is a step all the same: it is
recorded, and the next one draws other prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.errors import EXIT_INTERRUPTED, EngineError, Interrupted, StorageError
from shoal.observability.metrics import Tally
from shoal.observability.spans import throughput
from shoal.observability.watchdog import within
from shoal.orchestrator.collect import Collected, Interruption, uniform_kind
from shoal.orchestrator.endings import ends, ends_badly_or_solved, outcome_of
from shoal.orchestrator.evaluate import unless_stopped
from shoal.orchestrator.learn import Learned
from shoal.orchestrator.notes import FailureNotes, tell_stale
from shoal.orchestrator.parts import Files, LoopSettings, Parts, Progress
from shoal.orchestrator.ranks import agree
from shoal.orchestrator.records import completion_lines, rollout_lines, tally_groups
from shoal.orchestrator.saving import Saving, read_state

__all__ = ["Files", "Loop", "LoopSettings", "Parts", "Progress"]


class Loop:
    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self.parts = parts
        self.settings = settings
        self.progress = Progress()
        self._stop = asyncio.Event()
        self._exit_code = EXIT_INTERRUPTED
        self._served = ""  # proof of the weights the sampler serves
        self._served_sigma = 0.0  # and the noise on them
        self._failures = FailureNotes(parts.events)
        self._saving = Saving(parts, settings)
        self.stopped_by_rule = False  # one of its own, which all ranks come to at once
        self._boundary: dict[str, Any] = {}  # the state between two steps; what a checkpoint holds

    def interrupt(self, exit_code: int = EXIT_INTERRUPTED) -> None:
        """Stop at the next safe point, with a checkpoint. Called from a signal handler."""
        self._exit_code = exit_code
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def run(self) -> str:
        """Train to the end; returns `finished` or `solved`. Raises Interrupted or StoppedByPolicy, state saved."""
        self.parts.phases.take()  # what it took to get here is no part of the first step
        await self._publish(self.progress.step, started=True)
        outcome = None
        try:
            await self._evaluate_at_start()
            outcome = await self._evaluate_owed()
        except Interruption:
            await self._interrupted()
        self._boundary = self.state()
        if outcome is not None:
            return outcome
        while self.progress.step < self.settings.max_steps:
            try:
                outcome = await self._step()
            except Interruption:
                outcome = "interrupted"
            if await agree(self.parts.ranks, self._stop.is_set()):
                await self._interrupted()
            if outcome is not None:
                await self.save()  # with more steps, or other prompts, it may go on from here
                return outcome
        self._failures.check_scored(self.progress)
        return "finished"

    async def _step(self) -> str | None:
        """One step; an outcome if it was the last by a rule of its own."""
        parts, progress = self.parts, self.progress
        step = parts.events.step = progress.step + 1
        tally = Tally()
        parts.doing(f"rollouts of step {step}")
        wanted = parts.collector.admission.groups_per_step
        with parts.console.progress(f"rollouts of step {step}", wanted, quiet=True) as bar:
            collected = await parts.collector.collect(progress.step, self._stop, bar.advance)
        parts.doing(f"training of step {step}")
        self._boundary = {}  # the weights move now; until the step is recorded there is nothing to save
        with parts.phases("train"):
            learned = await parts.learner.learn(collected.kept, tally)
        tally_groups(tally, collected.all, collected.kept, progress.step)
        if self.settings.sigma_at is not None:
            tally.value("noise/sigma", self._served_sigma)
        progress.step = step
        await self._publish(step)
        self._judge(learned, collected)
        metrics = {**tally.reduce(), **await self._evaluate(step), **parts.phases.take()}
        drawn = {"cursor": dict(parts.stream.cursor.positions), "set_aside": parts.stream.cursor.set_aside}
        if not (self._is_ending() or self._is_save_due(step)):
            parts.collector.begin(step)  # the sampler works while this step is written down
        await self._record(step, metrics, collected, learned, drawn)
        self._boundary = self.state()
        await self._save_if_due(step)
        return self._outcome()

    async def _publish(self, version: int, started: bool = False) -> None:
        """Hand the weights to the sampler, unless it is to keep the ones it has for now."""
        parts, admission = self.parts, self.parts.collector.admission
        if admission.syncs_at(version) or (started and admission.interval > 0):
            self._served_sigma = self._sigma(version)
            parts.doing(f"handing version {version} to the sampler")
            with parts.phases("sync"):
                sync, limit = self._sync(version), self.settings.sync_deadline_s
                self._served = await within(limit, sync, "the weight sync", "orch.sync_deadline_s")
            if len(set(await parts.ranks.exchange(self._served.encode()))) > 1:
                raise EngineError(f"the processes do not hold the same weights of version {version}")

    async def _sync(self, version: int) -> str:
        """What does not arrive whole is published once more: a file was damaged, or the sender was cut off."""
        weights, engine, sigma = self.parts.weights, self.parts.engine, {"sigma": self._served_sigma}
        manifest = await weights.publish(version)
        try:
            return await engine.load(version, {**manifest, **sigma})
        except StorageError as error:
            self.parts.events.warn("sync", f"version {version} did not arrive and is published again: {error}")
        return await engine.load(version, {**await weights.publish(version), **sigma})

    def _sigma(self, version: int) -> float:
        """Noise of the step that this version samples."""
        sigma_at = self.settings.sigma_at
        return sigma_at(version + 1) if sigma_at is not None and version < self.settings.max_steps else 0.0

    async def _evaluate_at_start(self) -> None:
        if self.progress.step > 0 or self.progress.evaluated_start:
            return
        metrics = await self._evaluate(0)
        if self.progress.owes_evaluation:
            self.progress.owes_evaluation = False  # before the first step nothing is recorded that could lack it
            raise Interruption
        self.progress.evaluated_start = True
        if metrics:
            self.parts.sinks.log(0, metrics)
            self.parts.console.step(0, metrics)

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics if due. Rollouts that run ahead go on meanwhile, unless noise must be taken off the sampler:
        then they are finished first, with the noise they were started with."""
        parts, cadence = self.parts, self.settings.evaluation
        if parts.evaluator is None or cadence is None or not cadence.due(step, self.settings.max_steps):
            return {}
        parts.doing(f"evaluation after step {step}")
        groups = parts.evaluator.groups
        with parts.phases("eval"), parts.console.progress(f"evaluation after step {step}", groups, quiet=True) as bar:
            if self._served_sigma > 0:
                await parts.collector.drain()
                await parts.engine.load(parts.engine.version, {"sigma": 0.0})
            elif step > 0:
                parts.collector.run_ahead(step)
            metrics = await parts.ranks.on_main(lambda: self._held_out(bar.advance))
            if self._served_sigma > 0:
                await parts.engine.load(parts.engine.version, {"sigma": self._served_sigma})
        self.progress.owes_evaluation = metrics is None
        if metrics is None:
            return {}
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        if means:
            self._note_best(step, sum(means) / len(means))
        return metrics

    async def _held_out(self, advance: Callable[[float], None]) -> dict[str, float] | None:
        assert self.parts.evaluator is not None
        evaluated = await unless_stopped(self.parts.evaluator.evaluate(advance), self._stop)
        return evaluated[0] if evaluated is not None else None

    async def _evaluate_owed(self) -> str | None:
        """What a signal cut short is made up for, with the step's weights and the same seeds: its metrics get it now.

        Where weights are synced every few steps only, these are newer than those the undisturbed run evaluates.
        """
        progress, step = self.progress, self.progress.step
        if not progress.owes_evaluation:
            return None
        progress.owes_evaluation = False
        metrics = await self._evaluate(step)
        if progress.owes_evaluation:
            raise Interruption
        self.parts.sinks.amend(step, metrics)
        self._saving.mark_best(progress)
        return self._outcome()

    def _note_best(self, step: int, value: float) -> None:
        progress = self.progress
        if progress.best is None or value > progress.best:
            progress.best, progress.best_step, progress.since_best = value, step, 0
        else:
            progress.since_best += 1

    def _judge(self, learned: Learned, collected: Collected) -> None:
        """Count what must not go on for ever."""
        progress, events = self.progress, self.parts.events
        self._failures.look(collected.all, progress)
        tell_stale(events, progress.step, collected.dropped, self.parts.collector.admission.oldest_allowed)
        progress.non_finite = progress.non_finite + 1 if learned.skipped else 0
        if learned.skipped:
            events.warn(
                "non-finite", f"step {progress.step}: the gradient is not finite; the optimizer step is skipped"
            )
        if learned.trained_rollouts and learned.moved:
            progress.flat, progress.flat_reasons = 0, []
            return
        reasons = {group.drop_reason or uniform_kind(group) or "nothing to train" for group in collected.all}
        events.warn("flat", f"step {progress.step} trained nothing: every group was {', '.join(sorted(reasons))}")
        progress.flat += 1
        progress.flat_reasons = sorted(reasons.union(progress.flat_reasons))

    def _is_ending(self) -> bool:
        """Whether no step follows this one."""
        last = self.progress.step >= self.settings.max_steps
        return last or self._stop.is_set() or ends(self.progress, self.settings.stop_after)

    def _outcome(self) -> str | None:
        self.stopped_by_rule = ends_badly_or_solved(self.progress)
        return outcome_of(self.progress, self.settings.stop_after, self.parts.events, self._failures.last)

    async def _record(
        self, step: int, metrics: dict[str, float], collected: Collected, learned: Learned, drawn: dict[str, Any]
    ) -> None:
        """Rollouts, metrics, then the journal: a step exists once its journal record does."""
        parts = self.parts
        lines = rollout_lines(collected.all, learned.policy_logprobs, parts.token_text)
        await asyncio.to_thread(parts.run_dir.write_rollouts, step, lines)
        metrics = metrics | throughput(metrics, learned.sample_tokens * bool(learned.trained_rollouts) or None)
        parts.sinks.log(step, metrics)
        parts.sinks.log_completions(step, collected.all)
        parts.run_dir.append_journal(
            step,
            {
                "version": step,
                "weights": self._served,
                "rollout_ids": learned.trained_rollouts,
                "dropped": {group.prompt.group_id: group.drop_reason for group in collected.dropped},
                **drawn,
            },
        )
        parts.console.step(step, metrics)
        if self.settings.show_completions:
            parts.console.completions(step, completion_lines(collected.all, self.settings.show_completions))

    def _is_save_due(self, step: int) -> bool:
        settings = self.settings
        best = settings.keep_best and self.progress.best_step == step and self.progress.best is not None
        last = step == settings.max_steps and not settings.save.off
        return best or last or settings.save.due(step)

    async def _save_if_due(self, step: int) -> None:
        if self._is_save_due(step):
            await self.save()
            self._saving.mark_best(self.progress)

    async def save(self) -> None:
        """A complete checkpoint of the state after the last step."""
        await self._saving.save(self.progress.step, self._boundary)

    def state(self) -> dict[str, Any]:
        stream, collector = self.parts.stream.state(), self.parts.collector.state()
        return {"progress": replace(self.progress), "cursor": stream, "collector": collector}

    async def restore(self, folder: Path) -> None:
        self.parts.doing(f"reading {folder.name}")
        state = read_state(folder)
        self.progress = Progress(**state["progress"])
        self.parts.stream.load_state(state["cursor"])
        self.parts.collector.load_state(state["collector"])
        self._saving.saved_step = self.progress.step
        await self.parts.on_device(self.parts.files.load, folder)

    async def _interrupted(self) -> None:
        """Save where the last step ended; what was in flight is drawn again, equal, when the run continues."""
        await self.save()
        await self.parts.collector.cancel()
        kept = "there is no checkpoint yet, so it starts again from the beginning"
        if self._saving.saved_step is not None:
            kept = f"the state after step {self._saving.saved_step} is saved"
        raise Interrupted(f"interrupted; {kept}", self._exit_code)
