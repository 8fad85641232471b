"""The training loop: collect groups, learn, publish the weights, evaluate, record, save. `api.train` runs it.

One step makes one version of the policy. A step without anything to train (only zero-variance groups) counts as well:
it is recorded, and the next step draws other prompts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.core.collect import CollectedGroups, StopRequested
from shoal.core.deadlines import unless_stopped, within
from shoal.core.errors import EXIT_INTERRUPTED, EngineError, Interrupted, StorageError
from shoal.core.learn import StepResult
from shoal.core.metrics import Tally, tally_groups, throughput
from shoal.core.protocols import NoiseMeter
from shoal.core.ranks import any_rank
from shoal.core.state import LoopSettings, Parts, Progress, Saving
from shoal.core.stop_rules import StopRules


class Loop:
    def __init__(self, parts: Parts, settings: LoopSettings) -> None:
        self.parts = parts
        self.settings = settings
        self.progress = Progress()
        self._stop = asyncio.Event()
        self._exit_code = EXIT_INTERRUPTED
        self._served = ""  # hash of the weights that the sampler serves
        self._served_sigma = 0.0  # standard deviation of the noise on them
        self._applied_sigma = 0.0  # the same after rounding
        self._stop_rules = StopRules(parts.observer, settings.stop_after)
        self._saving = Saving(parts, settings)
        self.stopped_by_rule = False  # by a rule that stops all ranks at the same step, so that they can save together
        self._boundary: dict[str, Any] = {}  # the state between two steps, which a checkpoint stores

    def interrupt(self, exit_code: int = EXIT_INTERRUPTED) -> None:
        """Stop at the next safe point, with a checkpoint. Called from a signal handler."""
        self._exit_code = exit_code
        self._stop.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    async def run(self) -> str:
        """Train to the end; returns `finished` or `solved`. Saves the state before it raises Interrupted."""
        self.parts.phases.take()  # start-up time is not part of the first step
        await self._publish(self.progress.step, at_start=True)
        outcome = None
        try:
            await self._evaluate_before_first_step()
            outcome = await self._finish_evaluation()
        except StopRequested:
            await self._save_and_interrupt()
        self._boundary = self.state()
        if outcome is not None:
            return outcome
        while self.progress.step < self.settings.max_steps:
            try:
                outcome = await self._step()
            except StopRequested:
                outcome = "interrupted"  # stopped within the step: the state from before the step is saved
            if await any_rank(self.parts.ranks, self._stop.is_set()):  # a signal to one rank stops all at the same step
                await self._save_and_interrupt()
            if outcome is not None:
                await self.save()  # the run may continue with more steps or other prompts
                return outcome
            await self._saving.finish(wait=False)  # a write that failed ends the run here
        with self.parts.phases("save"):
            await self._saving.finish()
        self._stop_rules.require_some_reward(self.progress)
        return "finished"

    async def _step(self) -> str | None:
        """Train one step. Returns an outcome if a stop rule ends the run here."""
        parts, progress, tally = self.parts, self.progress, Tally()
        step = progress.step + 1
        parts.observer.begin_step(step)
        parts.observer.doing(f"rollouts of step {step}")
        wanted = parts.collector.admission.groups_per_step
        with parts.observer.progress(f"rollouts of step {step}", wanted) as bar:
            collect = parts.collector.collect
            collected = await collect(progress.step, self._stop, bar.advance, parts.observer.refilling)
        rollouts = [rollout for group in collected.all for rollout in group.rollouts]
        tried = any(rollout.status not in ("error", "timeout") for rollout in rollouts)
        failed_first = step == 1 and not await any_rank(parts.ranks, tried)
        parts.observer.doing(f"training of step {step}")
        # The weights change now: nothing can be saved until the step is recorded.
        boundary, self._boundary = self._boundary, {}
        groups = parts.replay.mix(collected.kept, progress.step) if parts.replay is not None else collected.kept
        with parts.phases("train"):
            try:
                result = await parts.learner.learn(groups, tally, self._stop)
            except StopRequested:
                self._boundary = boundary  # the weights are unchanged
                raise
        tally_groups(tally, collected.all, collected.kept, progress.step)
        tally.values(parts.stream.shares(collected.all))
        if parts.replay is not None:
            tally.values(parts.replay.metrics)
        if (passed_over := parts.stream.passed_over) is not None:
            tally.value("batch/passed_over", passed_over)
        if parts.collector.admission.synchronous:
            tally.value("throughput/surplus_groups", collected.surplus)
        if self.settings.sigma_at is not None:
            tally.value("noise/sigma", self._served_sigma)
            if isinstance(parts.engine, NoiseMeter):
                tally.value("noise/applied", self._applied_sigma)
        progress.step = step
        await self._publish(step)
        self._stop_rules.observe(progress, collected, result, parts.collector.admission.oldest_allowed)
        metrics = {**tally.reduce(), **await self._evaluate(step), **parts.phases.take()}
        # Read before `begin`, which draws the prompts of the next step.
        drawn = {"cursor": dict(parts.stream.cursor.positions), "set_aside": parts.stream.cursor.set_aside}
        drawn |= {"passed_over": passed_over} if passed_over is not None else {}
        replayed = [group.prompt.group_id for group in groups if group.prompt.attempt > 0]
        drawn |= {"replayed": replayed} if replayed else {}
        if not (failed_first or self._is_ending() or self._is_save_due(step)):
            parts.collector.begin(step)  # the engine samples while this step is written to disk
        await self._record(metrics, collected, result, drawn)
        self._boundary = self.state()
        if failed_first:
            raise self._stop_rules.first_step_failed(rollouts)
        await self._save_if_due(step)
        return self._outcome()

    async def _publish(self, version: int, at_start: bool = False) -> None:
        """Send the weights to the sampler if this version is due for it. All ranks compare the hash."""
        parts, admission = self.parts, self.parts.collector.admission
        if admission.syncs_at(version) or (at_start and admission.interval > 0):
            self._served_sigma = self._sigma(version)
            parts.observer.doing(f"publishing version {version} to the sampler")
            with parts.phases("sync"):
                sync, limit = self._sync(version), self.settings.sync_deadline_s
                self._served = await within(limit, sync, "the weight sync", "orch.sync_deadline_s")
            if isinstance(parts.engine, NoiseMeter):
                self._applied_sigma = parts.engine.applied_sigma
            if len(set(await parts.ranks.exchange(self._served.encode()))) > 1:
                raise EngineError(f"the weights of version {version} differ between the processes")

    async def _sync(self, version: int) -> str:
        """Publish and load a version. If it arrives damaged or incomplete, it is published a second time."""
        weights, engine, sigma = self.parts.weights, self.parts.engine, {"sigma": self._served_sigma}
        manifest = await weights.publish(version)
        try:
            return await engine.load(version, {**manifest, **sigma})
        except StorageError as error:
            self.parts.observer.warn("sync", f"version {version} did not arrive intact and is published again: {error}")
        return await engine.load(version, {**await weights.publish(version), **sigma})

    def _sigma(self, version: int) -> float:
        """Standard deviation of the noise for the step that this version samples."""
        sigma_at = self.settings.sigma_at
        return sigma_at(version + 1) if sigma_at is not None and version < self.settings.max_steps else 0.0

    async def _evaluate_before_first_step(self) -> None:
        if self.progress.step > 0 or self.progress.evaluated_start:
            return
        metrics = await self._evaluate(0)
        if self.progress.owes_evaluation:
            self.progress.owes_evaluation = False  # step 0 has no record to complete: the resumed run evaluates again
            raise StopRequested
        self.progress.evaluated_start = True
        if metrics:
            self.parts.observer.log(0, metrics)
            self.parts.observer.show_step(0, metrics)

    async def _evaluate(self, step: int) -> dict[str, float]:
        """Held-out metrics if an evaluation is due.

        Rollouts that run ahead continue meanwhile. With noise on the sampler they finish first, because the evaluation
        removes the noise that they started with.
        """
        parts, cadence = self.parts, self.settings.evaluation
        if parts.evaluator is None or cadence is None or not cadence.due(step, self.settings.max_steps):
            return {}
        parts.observer.doing(f"evaluation after step {step}")
        groups = parts.evaluator.groups
        with parts.phases("eval"), parts.observer.progress(f"evaluation after step {step}", groups) as bar:
            if self._served_sigma > 0:
                await parts.collector.drain()
                await parts.engine.load(parts.engine.version, {"sigma": 0.0})
            elif step > 0:
                parts.collector.run_ahead(step)
            metrics = await parts.ranks.on_main(lambda: self._held_out(step, bar.advance))
            if self._served_sigma > 0:
                await parts.engine.load(parts.engine.version, {"sigma": self._served_sigma})
        self.progress.owes_evaluation = metrics is None
        if metrics is None:
            return {}
        means = [value for name, value in metrics.items() if name.endswith("/mean")]
        if means:
            self._note_best(step, sum(means) / len(means))
        return metrics

    async def _held_out(self, step: int, advance: Callable[[float], None]) -> dict[str, float] | None:
        parts = self.parts
        assert parts.evaluator is not None
        evaluated = await unless_stopped(parts.evaluator.evaluate(advance), self._stop)
        if evaluated is None:
            return None
        metrics, groups = evaluated
        await asyncio.to_thread(parts.store.record_evaluation, step, groups, parts.token_text)
        return metrics

    async def _finish_evaluation(self) -> str | None:
        """Repeat an evaluation that a signal cut short, with the same seeds, and add it to the metrics of its step.

        With a window longer than one step it uses newer weights than an undisturbed run, because a resume publishes the
        current version, not the first one of the window.
        """
        progress, step = self.progress, self.progress.step
        if not progress.owes_evaluation:
            return None
        progress.owes_evaluation = False
        metrics = await self._evaluate(step)
        if progress.owes_evaluation:
            raise StopRequested
        self.parts.observer.amend(step, metrics)
        self._saving.mark_best(progress)
        return self._outcome()

    def _note_best(self, step: int, value: float) -> None:
        progress = self.progress
        if progress.best is None or value > progress.best:
            progress.best, progress.best_step, progress.since_best = value, step, 0
        else:
            progress.since_best += 1

    def _is_ending(self) -> bool:
        """Whether no step follows this one."""
        last = self.progress.step >= self.settings.max_steps
        return last or self._stop.is_set() or self._stop_rules.ends(self.progress)

    def _outcome(self) -> str | None:
        self.stopped_by_rule = self._stop_rules.stops_all_ranks(self.progress)
        return self._stop_rules.outcome(self.progress)

    async def _record(
        self, metrics: dict[str, float], collected: CollectedGroups, result: StepResult, drawn: dict[str, Any]
    ) -> None:
        """Write rollouts, then metrics, then the journal. The step exists once it is in the journal."""
        parts, step, groups = self.parts, self.progress.step, collected.all
        await asyncio.to_thread(parts.store.record_rollouts, step, groups, result.policy_logprobs, parts.token_text)
        metrics = metrics | throughput(metrics, result.sample_tokens * bool(result.trained_rollouts) or None)
        parts.observer.log(step, metrics)
        parts.observer.log_completions(step, groups)
        parts.store.append_journal(
            step,
            {
                "version": step,
                "weights": self._served,
                "rollout_ids": result.trained_rollouts,
                "dropped": {group.prompt.group_id: group.drop_reason for group in collected.dropped},
                **drawn,
            },
        )
        parts.observer.show_step(step, metrics)
        if self.settings.show_completions:
            parts.observer.show_completions(step, groups, self.settings.show_completions)

    def _is_save_due(self, step: int) -> bool:
        settings = self.settings
        best = settings.keep_best and self.progress.best_step == step and self.progress.best is not None
        last = step == settings.max_steps and not settings.save.off
        return best or last or settings.save.due(step)

    async def _save_if_due(self, step: int) -> None:
        if self._is_save_due(step):
            await self._saving.save(self.progress.step, self._boundary)
            self._saving.mark_best(self.progress)

    async def save(self) -> None:
        """Write a checkpoint of the state after the last step, and wait until it is on disk."""
        await self._saving.save(self.progress.step, self._boundary)
        await self._saving.finish()

    async def end_saving(self) -> None:
        """Wait for a checkpoint in flight. The run ends with an error already, so an error of the write is ignored."""
        with suppress(Exception):
            await self._saving.finish()

    def state(self) -> dict[str, Any]:
        """The state between two steps. `store` writes it into a checkpoint."""
        stream, collector = self.parts.stream.state(), self.parts.collector.state()
        replay = self.parts.replay.state() if self.parts.replay is not None else []
        return {"progress": replace(self.progress), "cursor": stream, "collector": collector, "replay": replay}

    async def restore(self, folder: Path) -> None:
        """Continue from the checkpoint in `folder`."""
        self.parts.observer.doing(f"reading {folder.name}")
        state = self.parts.store.read_state(folder)
        self.progress = Progress(**state["progress"])
        self.parts.stream.load_state(state["cursor"])
        self.parts.collector.load_state(state["collector"])
        if self.parts.replay is not None:
            self.parts.replay.load_state(state.get("replay", []))
        self._saving.saved_step = self.progress.step
        await self.parts.on_device(self.parts.files.load, folder)

    async def _save_and_interrupt(self) -> None:
        """Save the state after the last step. The resumed run samples rollouts in flight again, with equal results."""
        await self.save()
        await self.parts.collector.cancel()
        kept = "there is no checkpoint yet, so a resumed run starts from the beginning"
        if self._saving.saved_step is not None:
            kept = f"the state after step {self._saving.saved_step} is saved"
        raise Interrupted(f"interrupted; {kept}", self._exit_code)
