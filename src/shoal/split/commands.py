"""The commands of the split layout. Each joins the rendezvous, agrees on one configuration with the others, and ends
with them. `shoal grpo-orch` runs `api.train`, `shoal grpo-train` answers its calls, `shoal grpo-infer` samples."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal import api
from shoal.build.load import PythonObjects, Run
from shoal.build.ranks import as_rank, launch_command, ranks_to_start
from shoal.build.remote_engines import check_tied
from shoal.build.signals import end_by
from shoal.config.infer import InferConfig
from shoal.config.orch import OrchConfig
from shoal.config.problems import Origins
from shoal.config.resolve import resolve_run
from shoal.config.rules import check_split
from shoal.config.schema import RunConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import LostRanksError, ShoalError, UsedFolderError
from shoal.core.protocols import Ranks
from shoal.core.ranks import SingleProcess
from shoal.rollout.remote.client import Waiting, WaitReporter
from shoal.runs.events import setup_logging, stop_logging
from shoal.runs.secrets import WEIGHTS
from shoal.split.calls import FOLDER as SAMPLES
from shoal.split.inference_process import RunMembership, serve_others
from shoal.split.orchestrator import build_split, make_answerer
from shoal.split.rendezvous import LOOK_S, Rendezvous, RunEndedByPeer, ending_of
from shoal.split.trainer_process import TrainerState, TrainingService, make_trainer_state, unless_ended
from shoal.watch.console import BaseConsole, PlainConsole

EARLY_S = 2.0  # to compare configurations with running processes before a model loads


def orchestrate(
    section: OrchConfig, origins: Origins, *, resume: bool = False, next_command: str | None = None
) -> None:
    """`shoal grpo-orch`: the loop. It owns the run directory, and when it ends, the other processes end too."""
    with _console() as console, _joined_rendezvous("orch", section, console, ends_all=True) as rendezvous:
        asyncio.run(rendezvous.meet())
        config = _agreed(rendezvous, origins)
        notices = tuple(check_split(config).notice_lines())
        resume = resume or config.train.resume_from_checkpoint
        run = Run(config, resume, notices=notices, next_command=next_command, component="orch")
        try:
            api.train(run, partial(build_split, rendezvous))
        except UsedFolderError as error:
            raise UsedFolderError(f"{error}; grpo-infer and grpo-train are still waiting, or stop them too") from error


def serve_training(section: TrainConfig, origins: Origins, command: Sequence[str]) -> None:
    """`shoal grpo-train`: holds the policy and executes the orchestrator's calls until the run ends.

    If train.gpus requires several processes and no launcher started them, each rank runs `command`.
    """
    if count := ranks_to_start(section, None):
        launch_command(command, count, section.save_deadline_s + section.deadline_s)
        return
    given = as_rank(None)
    ranks = _join(given, section)
    handler = setup_logging(Path(section.output_dir) / "logs", "train" if ranks.rank == 0 else f"train-{ranks.rank}")
    try:
        if ranks.rank > 0:
            with contextlib.suppress(RunEndedByPeer):
                asyncio.run(_follow(given, ranks))
            return
        with _console() as console, _joined_rendezvous("train", section, console) as rendezvous:
            asyncio.run(_answer_calls(rendezvous, origins, TrainerRanks(given, ranks), console))
    finally:
        ranks.close()
        stop_logging(handler)


def serve_inference(section: InferConfig, origins: Origins, tell: Callable[[str], None]) -> None:
    """`shoal grpo-infer`: a server for any client. In a run it also joins the rendezvous."""
    from shoal.server.access import bind

    bind(section.host, section.port).close()  # fail on a used port before joining the others
    ended_by = None
    with _console() as console, _joined_rendezvous("infer", section, console) as rendezvous:
        if rendezvous.expects_peers():
            # If the others are running already, contradictions are reported before a model loads.
            with contextlib.suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(rendezvous.meet(patient=True), EARLY_S))
                check_tied(rendezvous.agree(origins))
        accompany = partial(_watch_orchestrator, rendezvous, origins)
        if section.engine != "embedded":
            company = RunMembership(
                accompany,
                trouble=lambda seen: rendezvous.presence.tell(server=seen),
                failed=lambda error: rendezvous.end_all(*ending_of(error)),
            )
            ended_by = asyncio.run(serve_others(section, tell, company))
        else:
            from shoal.split import inference_process as infer
            from shoal.split.weight_broadcast import BroadcastWeights

            fetch = partial(BroadcastWeights, rendezvous.presence.folder / WEIGHTS)
            ended_by = infer.serve(section, tell, {"broadcast": fetch}, accompany)
    if ended_by is not None:
        end_by(ended_by)  # so that a supervisor can tell a signal from the end of the run


async def _watch_orchestrator(rendezvous: Rendezvous, origins: Origins) -> None:
    """Watches the orchestrator while the server runs: raises if it is gone for longer than the deadline."""
    met: str | None = None
    while True:
        await rendezvous.meet(patient=True)
        if rendezvous.incarnation_of("orch") != met:
            met = rendezvous.incarnation_of("orch")
            check_tied(rendezvous.agree(origins))
        rendezvous.watch("orch", "come back", time.monotonic() - rendezvous.peers.silent_s("orch"))
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class TrainerRanks:
    """The processes that train together."""

    given: PythonObjects
    ranks: Ranks

    async def make(
        self, agreed: Callable[[], RunConfig] | None, steps: int, waiting: Waiting = lambda _: None
    ) -> TrainerState:
        """Rank 0 knows the configuration and sends it to the others."""

        async def tell() -> str:
            assert agreed is not None
            return agreed().model_dump_json(by_alias=True)

        config = RunConfig.model_validate_json(await self.ranks.on_main(tell))
        return await make_trainer_state(config, self.ranks, self.given, steps, waiting)


async def _answer_calls(rendezvous: Rendezvous, origins: Origins, team: TrainerRanks, console: BaseConsole) -> None:
    agreed: list[RunConfig] = []

    async def meet() -> None:
        await rendezvous.meet()
        agreed.append(_agreed(rendezvous, origins))

    await unless_ended(team.ranks, meet)
    first = agreed[0]
    waits = WaitReporter(rendezvous.tell, whom="the teacher")

    async def make(steps: int) -> TrainerState:
        """For each orchestrator that connects, since a restarted one may have other settings."""
        with console.progress(f"loading {first.train.model}"):
            return await team.make(partial(_agreed, rendezvous, origins), steps, waits.report)

    service = TrainingService(make, team.ranks, Path(first.train.output_dir) / SAMPLES)
    answerer = await make_answerer(first.train, rendezvous)
    if answerer.address:
        rendezvous.presence.tell(calls=answerer.address)
    console.note(f"grpo-train is ready in {first.train.output_dir}")
    try:
        await service.run(answerer, rendezvous)
    finally:
        await service.close()
        await answerer.close()


async def _follow(given: PythonObjects, ranks: Ranks) -> None:
    service = TrainingService(partial(TrainerRanks(given, ranks).make, None), ranks)
    await unless_ended(ranks)  # rank 0 joins the rendezvous
    try:
        await service.run(None, None)
    finally:
        await service.close()


def _join(given: PythonObjects, section: TrainConfig) -> Ranks:
    if given.processes == 1 and section.sharding == "none":
        return SingleProcess()
    from shoal.trainer.process_ranks import ProcessRanks

    return ProcessRanks(section.deadline_s, given.processes, section.device)


def _agreed(rendezvous: Rendezvous, origins: Origins) -> RunConfig:
    return resolve_run(rendezvous.agree(origins))


@contextlib.contextmanager
def _joined_rendezvous(
    component: str, section: InferConfig | OrchConfig | TrainConfig, console: BaseConsole, *, ends_all: bool = False
) -> Iterator[Rendezvous]:
    """Join the rendezvous while the block runs.

    Its end is sent to the other processes if it is intended (an error of Shoal), or always with `ends_all`. It is not
    sent after a crash or after the loss of a rank, since a restart may follow, nor after a wrong command.
    """
    rendezvous = Rendezvous(component, section, console.note)
    error: BaseException | None = None
    try:
        yield rendezvous
    except RunEndedByPeer as ended:
        console.note(str(ended))
    except BaseException as raised:
        error = raised
        raise
    finally:
        alone = isinstance(error, LostRanksError | UsedFolderError)
        if not alone and (ends_all or isinstance(error, ShoalError)):
            rendezvous.end_all(*ending_of(error))
        rendezvous.close(error)


@contextlib.contextmanager
def _console() -> Iterator[BaseConsole]:
    """Without heartbeat lines: waits are reported separately, and a run has its own console."""
    console = PlainConsole(sys.stdout, heartbeat_s=float("inf"))
    try:
        yield console
    finally:
        console.close()


def resume_command(file: str, overrides: tuple[str, ...]) -> str:
    return shlex.join(["shoal", "grpo-orch", file, *overrides, "--resume"])
