"""What the commands of the split layout do: meet the other two, agree on one run, do one's part, end together.

`shoal grpo-orch` is `api.train` around other processes; `shoal grpo-train` answers its calls.
"""

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
from shoal.build import Given, as_rank, launch_command, ranks_to_start
from shoal.build.others import Company, serve_others
from shoal.build.remote import check_tied
from shoal.build.split import assemble_split, make_answerer
from shoal.build.trainee import make_trainee
from shoal.config.problems import Origins
from shoal.config.resolve import resolve_run
from shoal.config.schema import InferConfig, OrchConfig, RunConfig, TrainConfig
from shoal.config.split import check_split
from shoal.errors import LostRanksError, ShoalError, UsedFolderError
from shoal.observability.console import BaseConsole, PlainConsole
from shoal.observability.logs import setup_logging, stop_logging
from shoal.observability.token import WEIGHTS
from shoal.orchestrator.meeting import LOOK_S, Ended, Meeting, ending_of
from shoal.orchestrator.ranks import Alone
from shoal.orchestrator.service import Trainee, TrainingService, unless_ended
from shoal.orchestrator.signals import end_by
from shoal.protocols import Ranks
from shoal.transport.folder_calls import FOLDER as SAMPLES

EARLY_S = 2.0  # to see who else is there before a model loads


def orchestrate(
    section: OrchConfig, origins: Origins, *, resume: bool = False, next_command: str | None = None
) -> None:
    """`shoal grpo-orch`: the loop. It owns the run directory, and its end is everybody's."""
    with _console() as console, _taking_part("orch", section, console, ends_all=True) as meeting:
        asyncio.run(meeting.meet())
        config = _agreed(meeting, origins)
        notices = check_split(config).notice_lines()
        layout = api.Layout("orch", partial(assemble_split, meeting), trains=False)
        resume = resume or config.train.resume_from_checkpoint
        try:
            api.train(config, resume=resume, notices=notices, next_command=next_command, layout=layout)
        except UsedFolderError as error:
            raise UsedFolderError(f"{error}; grpo-infer and grpo-train wait for that, or end them too") from error


def serve_training(section: TrainConfig, origins: Origins, command: Sequence[str]) -> None:
    """`shoal grpo-train`: holds the policy and executes the orchestrator's calls until the run ends.

    Where it takes several processes and no launcher started them, each runs `command`.
    """
    if count := ranks_to_start(section, None):
        launch_command(command, count, section.save_deadline_s + section.deadline_s)
        return
    given = as_rank(None)
    ranks = _join(given, section)
    handler = setup_logging(Path(section.output_dir) / "logs", "train" if ranks.rank == 0 else f"train-{ranks.rank}")
    try:
        if ranks.rank > 0:
            with contextlib.suppress(Ended):
                asyncio.run(_follow(given, ranks))
            return
        with _console() as console, _taking_part("train", section, console) as meeting:
            asyncio.run(_answer_calls(meeting, origins, Team(given, ranks), console))
    finally:
        if isinstance(close := getattr(ranks, "close", None), Callable):
            close()
        stop_logging(handler)


def serve_inference(section: InferConfig, origins: Origins, tell: Callable[[str], None]) -> None:
    """`shoal grpo-infer`: a server, for whoever asks; in a run it takes part in the meeting and in the end."""
    from shoal.server.listen import bind

    bind(section.host, section.port).close()  # a port that is taken is said before anybody is told that this one came
    ended_by = None
    with _console() as console, _taking_part("infer", section, console) as meeting:
        if meeting.others_expected():
            # Whatever does not go together is said before a model loads, where the others are here already.
            with contextlib.suppress(TimeoutError):
                asyncio.run(asyncio.wait_for(meeting.meet(patient=True), EARLY_S))
                check_tied(meeting.agree(origins))
        accompany = partial(_accompany, meeting, origins)
        if section.engine != "embedded":
            company = Company(
                accompany,
                trouble=lambda seen: meeting.presence.tell(server=seen),
                failed=lambda error: meeting.end_all(*ending_of(error)),
            )
            ended_by = asyncio.run(serve_others(section, tell, company))
        else:
            from shoal.build import infer
            from shoal.transport.broadcast import BroadcastWeights

            fetch = partial(BroadcastWeights, meeting.presence.folder / WEIGHTS)
            ended_by = infer.serve(section, tell, {"broadcast": fetch}, accompany)
    if ended_by is not None:
        end_by(ended_by)  # not the end of the run, and a supervisor tells the two apart


async def _accompany(meeting: Meeting, origins: Origins) -> None:
    """Beside the server: nobody is waited for before there is a run, and no longer than the deadline after that."""
    met: str | None = None
    while True:
        await meeting.meet(patient=True)
        if meeting.incarnation_of("orch") != met:
            met = meeting.incarnation_of("orch")
            check_tied(meeting.agree(origins))
        meeting.watch("orch", "come back", time.monotonic() - meeting.peers.silent_s("orch"))
        await asyncio.sleep(LOOK_S)


@dataclass(frozen=True)
class Team:
    """The processes that train together."""

    given: Given
    ranks: Ranks

    async def make(self, agreed: Callable[[], RunConfig] | None, steps: int) -> Trainee:
        """The first process knows the configuration, and hands it on."""

        async def tell() -> str:
            assert agreed is not None
            return agreed().model_dump_json(by_alias=True)

        config = RunConfig.model_validate_json(await self.ranks.on_main(tell))
        return await make_trainee(config, self.ranks, self.given, steps)


async def _answer_calls(meeting: Meeting, origins: Origins, team: Team, console: BaseConsole) -> None:
    agreed: list[RunConfig] = []

    async def meet() -> None:
        await meeting.meet()
        agreed.append(_agreed(meeting, origins))

    await unless_ended(team.ranks, meet)
    first = agreed[0]

    async def make(steps: int) -> Trainee:
        """For the orchestrator that asks: one that was restarted may have other settings."""
        with console.progress(f"loading {first.train.model}"):
            return await team.make(partial(_agreed, meeting, origins), steps)

    service = TrainingService(make, team.ranks, Path(first.train.output_dir) / SAMPLES)
    answerer = await make_answerer(first.train, meeting)
    if answerer.address:
        meeting.presence.tell(calls=answerer.address)
    console.note(f"grpo-train is ready in {first.train.output_dir}")
    try:
        await service.run(answerer, meeting)
    finally:
        await service.close()
        await answerer.close()


async def _follow(given: Given, ranks: Ranks) -> None:
    service = TrainingService(partial(Team(given, ranks).make, None), ranks)
    await unless_ended(ranks)  # the first one meets the others
    try:
        await service.run(None, None)
    finally:
        await service.close()


def _join(given: Given, section: TrainConfig) -> Ranks:
    if given.processes == 1 and section.sharding == "none":
        return Alone()
    from shoal.trainer.ranks import ProcessRanks

    return ProcessRanks(section.deadline_s, given.processes, section.device)


def _agreed(meeting: Meeting, origins: Origins) -> RunConfig:
    return resolve_run(meeting.agree(origins))


@contextlib.contextmanager
def _taking_part(
    component: str, section: InferConfig | OrchConfig | TrainConfig, console: BaseConsole, *, ends_all: bool = False
) -> Iterator[Meeting]:
    """Present for as long as the block runs. An end that is meant is told to the others; a crash is not, of this one
    or of one that trains with it: it may be followed by a restart. Unless its end is the run's (`ends_all`).
    A command that was given wrongly is not: it is given again."""
    meeting = Meeting(component, section, console.note)
    error: BaseException | None = None
    try:
        yield meeting
    except Ended as ended:
        console.note(str(ended))
    except BaseException as raised:
        error = raised
        raise
    finally:
        alone = isinstance(error, LostRanksError | UsedFolderError)
        if not alone and (ends_all or isinstance(error, ShoalError)):
            meeting.end_all(*ending_of(error))
        meeting.close(error)


@contextlib.contextmanager
def _console() -> Iterator[BaseConsole]:
    """Without heartbeats: a process that waits says so itself, and a run has a console of its own."""
    console = PlainConsole(sys.stdout, heartbeat_s=float("inf"))
    try:
        yield console
    finally:
        console.close()


def resume_command(file: str, overrides: tuple[str, ...]) -> str:
    return shlex.join(["shoal", "grpo-orch", file, *overrides, "--resume"])
