"""The orchestrator of the split layout: the loop, with the trainer and the engine in other processes.

What it shares with a co-located run is built by the functions of build/parts.py. The trainer is in trainer_process.py.
`RemoteTrainer` is the trainer as the loop uses it: a learner, policy files and a weight channel that send calls. A
restarted trainer first gets its state back: it loads the newest checkpoint and repeats the `learn` calls since then,
which are kept until a checkpoint covers them. Then the pending call is sent again.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.evaluate import make_evaluator
from shoal.build.load import Run
from shoal.build.model import make_chat
from shoal.build.parts import make_collector, make_observer, make_replay, make_run_group, running
from shoal.build.remote_engines import ExternalServer, facts_of_files, make_remote, shorten_deadline
from shoal.build.sampler import chat_options, loop_settings, make_runner, make_stream, total_steps
from shoal.build.workspace import LOADING, Workspace
from shoal.config.schema import RunConfig
from shoal.config.section_rules import port_of
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, EngineError, Interrupted, StoppedByPolicy
from shoal.core.learn import StepResult
from shoal.core.loop import Loop
from shoal.core.metrics import Tally
from shoal.core.protocols import RolloutEngine
from shoal.core.state import Parts
from shoal.core.types import RolloutGroup
from shoal.rollout.remote.client import WaitReporter
from shoal.runs.checkpoints import Checkpoint
from shoal.runs.files import remove_quietly, storage
from shoal.runs.secrets import CONTROL
from shoal.split.calls import FOLDER as SAMPLES
from shoal.split.calls import (
    Answer,
    Answerer,
    Call,
    Caller,
    FolderAnswerer,
    FolderCaller,
    Payload,
    TcpAnswerer,
    TcpCaller,
    pack_groups,
    raise_failed,
    unpack_learned,
    write_bulk,
)
from shoal.split.rendezvous import Rendezvous
from shoal.watch.observer import Phases
from shoal.watch.text import count

if TYPE_CHECKING:
    from shoal.models.chat import Chat


@asynccontextmanager
async def build_split(rendezvous: Rendezvous, run: Run, workspace: Workspace) -> AsyncIterator[Loop]:
    """The loop with engine and trainer in other processes. Imports no torch."""
    config, phases = run.config, Phases()
    chat = load_chat(config)
    stream = make_stream(config.orch, workspace.environments, chat, workspace.events)
    steps = total_steps(config, len(stream))
    engine = make_engine(config, rendezvous, chat)
    runner, endpoint = make_runner(config, workspace.environments, workspace.rewards, engine, chat)
    rendezvous.tell = workspace.report_wait
    trainer = RemoteTrainer(_resources(config, rendezvous, workspace, lambda: loop.stopping), steps)
    run_group = make_run_group(config.orch, runner, steps, phases, lambda: loop.progress.step)
    parts = Parts(
        engine=engine,
        weights=RemoteWeights(trainer),
        collector=make_collector(config.orch, run_group, stream, workspace.ranks, steps),
        stream=stream,
        learner=trainer,  # type: ignore[arg-type]
        files=RemoteFiles(trainer),  # type: ignore[arg-type]
        evaluator=make_evaluator(config.orch, workspace.environments, runner, chat),
        store=workspace.run_dir,
        observer=make_observer(config, workspace),
        phases=phases,
        on_device=run_inline,
        token_text=chat.token_text,
        replay=make_replay(config.orch),
    )
    loop = Loop(parts, loop_settings(config, steps, len(stream), run.command))

    async def close() -> None:
        if endpoint is not None:
            await endpoint.close()
        await engine.close()
        await trainer.parts.caller.close()
        remove_quietly(trainer.parts.folder)  # calls that no trainer will request again

    try:
        with workspace.stage("load", f"grpo-infer and grpo-train load {config.train.model}"):
            await asyncio.gather(check_engine(engine, config), trainer.start())
    except BaseException:
        await close()
        raise
    for notice in trainer.about.get("notices", []):
        workspace.console.note(notice)
    async with running(loop, workspace, close):
        yield loop


def _resources(
    config: RunConfig, rendezvous: Rendezvous, workspace: Workspace, stopping: Callable[[], bool]
) -> Resources:
    run_dir: Any = workspace.run_dir
    folder = run_dir.path / SAMPLES / rendezvous.presence.incarnation
    with storage(f"create {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    caller = make_caller(config.train, rendezvous)
    newest, covered = run_dir.newest_good_checkpoint, run_dir.checkpoints.newest_known_good
    return Resources(rendezvous, caller, folder, newest, covered, stopping, workspace.events.warn)


def load_chat(config: RunConfig) -> Chat:
    from shoal.models.tokenizer import torch_left_out

    assert config.train.model is not None
    with torch_left_out():
        return make_chat(config.train.model, **chat_options(config.orch))


def make_caller(train: TrainConfig, rendezvous: Rendezvous) -> Caller:
    if train.rollout_transport.type == "filesystem":
        return FolderCaller(train.output_dir, rendezvous.presence.incarnation)

    def address() -> str | None:
        peer = rendezvous.peers.get("train")
        return peer.about.get("calls") if peer is not None else None

    return TcpCaller(rendezvous.presence.folder, address)


async def make_answerer(train: TrainConfig, rendezvous: Rendezvous) -> Answerer:
    transport, incarnation = train.rollout_transport, rendezvous.presence.incarnation
    if transport.type == "tcp":
        return await TcpAnswerer.listen(rendezvous.presence.folder, incarnation, transport.host, transport.port)

    def session() -> str | None:
        rendezvous.look()
        return rendezvous.incarnation_of("orch")

    return FolderAnswerer(train.output_dir, incarnation, session)


def make_engine(config: RunConfig, rendezvous: Rendezvous, chat: Chat) -> RolloutEngine:
    """The client of grpo-infer. `check_engine` compares the server with the run before the first request."""
    waits = WaitReporter(lambda text: rendezvous.tell(text), lambda: rendezvous.peers.silent_s("infer"))
    where = functools.partial(describe_server_state, rendezvous, config)
    if config.infer.engine != "embedded":
        model = facts_of_files(str(config.train.model), chat)
        attach = ExternalServer(where, functools.partial(server_trouble, rendezvous))
        return make_remote(config, model, Path(config.train.output_dir), waits.report, attach)
    from shoal.rollout.remote.client import Address
    from shoal.rollout.remote.shoal import HttpRolloutEngine

    orch, client = config.orch, config.orch.client
    key = os.environ.get(client.api_key_var) if client.api_key_var is not None else None
    if client.api_key_var is not None and not key:
        raise ConfigError(f"orch.client.api_key_var: the environment variable {client.api_key_var} is not set")
    limit_s = shorten_deadline(orch.deadline_s)
    connections, token_file = max(64, 2 * orch.batch_size), rendezvous.presence.folder / CONTROL
    seen = {"whereabouts": where, "silent_s": functools.partial(silent_s, rendezvous)}
    address = Address(client.base_url, key, limit_s, client.timeout, connections, token_file=token_file, **seen)
    return HttpRolloutEngine(address, config.train.model, config.train.seed, waits.report, orch.model.lora_adapter)


def describe_server_state(rendezvous: Rendezvous, config: RunConfig) -> tuple[str, str]:
    """Why nothing answers at the address of grpo-infer, according to the shared folder, and what to do about it.

    Raises the error that ended the run, if another process ended it.
    """
    rendezvous.look()
    infer, asked = config.infer, port_of(config.orch.client.base_url)
    if not rendezvous.peers.is_alive("infer"):
        return "grpo-infer is not running", "start it with shoal grpo-infer"
    if (seen := server_trouble(rendezvous)) is not None:
        return seen, "check the machine of grpo-infer"
    host = f"[{infer.host}]" if ":" in infer.host else infer.host
    wrote = f"its recorded address is http://{host}:{infer.port}/v1"
    if asked in (None, infer.port):
        return (
            f"grpo-infer {LOADING}",
            f"{wrote}; check orch.client.base_url, or raise orch.deadline_s if it needs longer",
        )
    return f"grpo-infer is running, but does not answer at this address: {wrote}", "check orch.client.base_url"


def server_trouble(rendezvous: Rendezvous) -> str | None:
    """A problem that grpo-infer has found in the vLLM or SGLang server that it started."""
    rendezvous.look()
    peer = rendezvous.peers.get("infer")
    return peer.about.get("server") if peer is not None and rendezvous.peers.is_alive("infer") else None


def silent_s(rendezvous: Rendezvous) -> float:
    """Seconds since the last heartbeat of grpo-infer; 0 while it is alive, and before its first one."""
    rendezvous.peers.look()
    came, lives = rendezvous.peers.get("infer") is not None, rendezvous.peers.is_alive("infer")
    return rendezvous.peers.silent_s("infer") if came and not lives else 0.0


async def check_engine(engine: RolloutEngine, config: RunConfig) -> None:
    """Compare what the server reports with the run. Its section may have left these keys open."""
    await engine.connect()
    facts, train, orch = await engine.describe(), config.train, config.orch
    if not facts:
        return
    assert orch.seq_len is not None
    if int(facts["max_model_len"]) < orch.seq_len:
        raise ConfigError(
            f"orch.seq_len: is {orch.seq_len}, longer than the {facts['max_model_len']} tokens grpo-infer serves; "
            f"start it with infer.max_model_len={orch.seq_len}"
        )
    rank = facts.get("max_lora_rank") if facts.get("lora") else None
    if train.lora and (rank is None or int(rank) < train.lora_rank):
        serves = "serves no adapters" if rank is None else f"serves adapters of rank {rank} at most"
        raise ConfigError(
            f"train.lora_rank: is {train.lora_rank}, but grpo-infer {serves}; start it with infer.enable_lora=true "
            f"infer.max_lora_rank={train.lora_rank}"
        )


TRAIN = "train"


class Restarted(Exception):
    """The trainer was restarted."""


@dataclass(frozen=True)
class ReplayableLearn:
    """The `learn` call of a step, to be repeated if the trainer loses its state."""

    step: int
    bulk: Payload
    trained: tuple[str, ...]


@dataclass
class Resources:
    """What RemoteTrainer needs from the orchestrator."""

    meeting: Rendezvous
    caller: Caller
    folder: Path  # of kept calls
    newest_checkpoint: Callable[[], Checkpoint | None]  # read and verified, which is slow
    covered_step: Callable[[], int | None]  # step of the newest checkpoint known to this process
    stopping: Callable[[], bool]  # whether the run is stopping
    tell: Callable[[str, str], None]  # kind and text of an event


@dataclass
class RemoteTrainer:
    parts: Resources
    steps: int
    step: int = 0  # learned so far
    _incarnation: str | None = None
    _number: int = 0
    _kept: list[ReplayableLearn] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)

    async def start(self) -> None:
        """Start at step 0; `load` may continue from a checkpoint."""
        self._incarnation = self._present()
        await self.ask("load", {"folder": None, "steps": self.steps})

    async def ask(self, method: str, head: dict[str, Any], bulk: Payload | None = None) -> Mapping[str, Any]:
        while True:
            try:
                return await self._request(method, head, bulk)
            except Restarted:
                await self._restore()

    async def _request(self, method: str, head: dict[str, Any], bulk: Payload | None) -> Mapping[str, Any]:
        """One call to the current incarnation. Raises Restarted if it is replaced."""
        self._number += 1
        assert self._incarnation is not None
        meeting = self.parts.meeting
        call = Call(self._number, meeting.presence.incarnation, self._incarnation, method, head)
        since = time.monotonic()

        def watch() -> None:
            meeting.watch(TRAIN, WORDS[method], since)
            if self._present() != self._incarnation:
                raise Restarted
            if self.parts.stopping() and not meeting.peers.is_alive(TRAIN):
                raise Interrupted(
                    "interrupted while grpo-train was away; continue from the newest checkpoint with --resume"
                )

        answer: Answer = await self.parts.caller.ask(call, bulk, watch)
        raise_failed(answer, "grpo-train")
        if method == "load":
            self.about = dict(answer.value)
        return answer.value

    def _present(self) -> str:
        incarnation = self.parts.meeting.incarnation_of(TRAIN)
        if incarnation is None:
            raise EngineError("grpo-train is gone")
        return incarnation

    async def _restore(self) -> None:
        """Restore the state in a new incarnation, which may be replaced meanwhile too."""
        while True:
            self._incarnation = self._present()
            checkpoint = self.parts.newest_checkpoint()
            step = checkpoint.step if checkpoint is not None else 0
            again = [kept for kept in self._kept if kept.step > step]
            if step + len(again) < self.step:
                raise StoppedByPolicy(
                    f"grpo-train was restarted and step {step + 1} is not kept; continue with --resume"
                )
            repeats = f" and repeats {count(len(again), 'step')}" if again else ""
            self.parts.tell("restart", f"grpo-train was restarted; it goes back to step {step}{repeats}")
            with suppress(Restarted):
                folder = str(checkpoint.path.resolve()) if checkpoint is not None else None
                await self._request("load", {"folder": folder, "steps": self.steps}, None)
                for kept in again:
                    await self._repeat(kept)
                return

    async def _repeat(self, kept: ReplayableLearn) -> None:
        value = await self._request("learn", {"step": kept.step}, kept.bulk)
        if tuple(value["trained_rollouts"]) != kept.trained:
            raise EngineError(f"grpo-train learned other rollouts when step {kept.step} was repeated")

    async def load(self, folder: Path) -> None:
        found = re.fullmatch(r"step_(\d+)", folder.name)
        if found is None:
            raise EngineError(f"{folder} is not a checkpoint")
        self.step = int(found[1])
        await self.ask("load", {"folder": str(folder.resolve()), "steps": self.steps})

    async def learn(
        self, groups: Sequence[RolloutGroup], tally: Tally, stop: asyncio.Event | None = None
    ) -> StepResult:
        """A call is always answered, so `stop` has no effect."""
        self._forget()
        step = self.step + 1
        bulk = write_bulk(self.parts.folder / f"learn_{step:06d}.msgpack", pack_groups(groups))
        value = await self.ask("learn", {"step": step}, bulk)
        learned = unpack_learned(value, tally, groups)
        self.step = step
        self._kept.append(ReplayableLearn(step, bulk, tuple(learned.trained_rollouts)))
        return learned

    def _forget(self) -> None:
        """Remove kept calls that a checkpoint covers."""
        covered = self.parts.covered_step() if self._kept else None
        for kept in [kept for kept in self._kept if covered is not None and kept.step <= covered]:
            remove_quietly(kept.bulk.path)
            self._kept.remove(kept)


# Methods as wait messages name them.
WORDS = {
    "load": "load the model",
    "learn": "train a step",
    "publish": "publish the weights",
    "save": "write its checkpoint",
    "export": "write the trained model",
}


class RemoteFiles:
    """The policy files of a checkpoint, written by the trainer into the orchestrator's folder."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def save(self, folder: Path) -> None:
        await self._trainer.ask("save", {"folder": str(folder.resolve())})

    async def load(self, folder: Path) -> None:
        await self._trainer.load(folder)

    async def export(self, folder: Path) -> None:
        await self._trainer.ask("export", {"folder": str(folder.resolve())})


class RemoteWeights:
    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    async def publish(self, version: int) -> Mapping[str, Any]:
        return await self._trainer.ask("publish", {"version": version})


async def run_inline(function: Callable[..., Any], *arguments: Any) -> Any:
    """Replaces the device thread of the loop: the functions are coroutines that send calls."""
    return await function(*arguments)
