"""The orchestrator of the split layout: the loop around another process's trainer; and how calls travel between them.

What it has in common with a co-located run is made by the same functions; here is only what is different. The trainer
itself is in trainee.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.prepare import Prepared
from shoal.build.prompts import make_stream
from shoal.build.remote import Attached, before, facts_of_files, make_remote
from shoal.build.run import Assembled, Pieces, Watching, make_loop
from shoal.build.sampler import chat_options, make_runner
from shoal.build.schedule import total_steps
from shoal.build.waits import LOADING, tell_wait
from shoal.config.check_orch import port_of
from shoal.config.schema import RunConfig, TrainConfig
from shoal.errors import ConfigError
from shoal.observability.atomic import remove_quietly, storage
from shoal.observability.token import CONTROL
from shoal.orchestrator.meeting import Meeting, Waits
from shoal.orchestrator.remote import RemoteFiles, RemoteTrainer, RemoteWeights, Resources, here
from shoal.protocols import RolloutEngine
from shoal.rollout.remote import RemoteEngine
from shoal.transport.calls import Answerer, Caller
from shoal.transport.folder_calls import FOLDER as SAMPLES
from shoal.transport.folder_calls import FolderAnswerer, FolderCaller
from shoal.transport.tcp_calls import TcpAnswerer, TcpCaller

if TYPE_CHECKING:
    from shoal.models.chat import Chat
    from shoal.server.local import LocalEndpoint


@dataclass
class RemoteEnds:
    """What the orchestrator closes when it ends."""

    engine: RolloutEngine
    caller: Caller
    endpoint: LocalEndpoint | None
    kept: Path  # calls that no trainer will ask for again

    async def close(self) -> None:
        if self.endpoint is not None:
            await self.endpoint.close()
        await self.engine.close()
        await self.caller.close()
        remove_quietly(self.kept)


async def assemble_split(meeting: Meeting, config: RunConfig, prepared: Prepared, watching: Watching) -> Assembled:
    """The loop with engine and trainer in other processes. Imports no torch."""
    chat = load_chat(config)
    stream = make_stream(config.orch, prepared, chat, watching.events)
    steps = total_steps(config, len(stream))
    engine = make_engine(config, meeting, chat)
    runner, endpoint = make_runner(config, prepared, engine, chat)
    meeting.tell = functools.partial(tell_wait, watching)
    trainer = RemoteTrainer(_resources(config, meeting, watching, lambda: loop.stopping), steps)
    pieces = Pieces(engine, runner, chat, RemoteWeights(trainer), trainer, RemoteFiles(trainer), here)
    loop = make_loop(config, prepared, watching, stream, pieces)
    ends = RemoteEnds(engine, trainer.parts.caller, endpoint, trainer.parts.folder)
    try:
        with watching.stage("load", f"grpo-infer and grpo-train load {config.train.model}"):
            await asyncio.gather(check_engine(engine, config), trainer.start())
    except BaseException:
        await ends.close()
        raise
    for notice in trainer.about.get("notices", []):
        watching.console.note(notice)
    return Assembled(loop, pieces.files, ends, loop.parts.sinks)  # type: ignore[arg-type]


def _resources(config: RunConfig, meeting: Meeting, watching: Watching, stopping: Callable[[], bool]) -> Resources:
    run_dir: Any = watching.run_dir
    folder = run_dir.path / SAMPLES / meeting.presence.incarnation
    with storage(f"create {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
    caller = make_caller(config.train, meeting)
    newest, covered = run_dir.newest_good_checkpoint, run_dir.checkpoints.newest_known_good
    return Resources(meeting, caller, folder, newest, covered, stopping, watching.events.warn)


def load_chat(config: RunConfig) -> Chat:
    from shoal.models.chat import Chat
    from shoal.models.tokenizer import load_tokenizer, torch_left_out

    assert config.train.model is not None
    with torch_left_out():
        return Chat(load_tokenizer(config.train.model), **chat_options(config.orch))


def make_caller(train: TrainConfig, meeting: Meeting) -> Caller:
    if train.rollout_transport.type == "filesystem":
        return FolderCaller(train.output_dir, meeting.presence.incarnation)

    def address() -> str | None:
        peer = meeting.peers.get("train")
        return peer.about.get("calls") if peer is not None else None

    return TcpCaller(meeting.presence.folder, address)


async def make_answerer(train: TrainConfig, meeting: Meeting) -> Answerer:
    transport, incarnation = train.rollout_transport, meeting.presence.incarnation
    if transport.type == "tcp":
        return await TcpAnswerer.listen(meeting.presence.folder, incarnation, transport.host, transport.port)

    def session() -> str | None:
        meeting.look()
        return meeting.incarnation_of("orch")

    return FolderAnswerer(train.output_dir, incarnation, session)


def make_engine(config: RunConfig, meeting: Meeting, chat: Chat) -> RolloutEngine:
    """The way to grpo-infer. What it says about itself is compared before anything is asked of it."""
    waits = Waits(lambda text: meeting.tell(text), lambda: meeting.peers.silent_s("infer"))
    where = functools.partial(whereabouts, meeting, config)
    if config.infer.engine != "embedded":
        model = facts_of_files(str(config.train.model), chat)
        attach = Attached(where, functools.partial(server_trouble, meeting))
        return make_remote(config, model, Path(config.train.output_dir), waits.heard, attach)
    from shoal.rollout.http import HttpRolloutEngine
    from shoal.rollout.link import Address

    orch, client = config.orch, config.orch.client
    key = os.environ.get(client.api_key_var) if client.api_key_var is not None else None
    if client.api_key_var is not None and not key:
        raise ConfigError(f"orch.client.api_key_var: the environment variable {client.api_key_var} is not set")
    limit_s = before(orch.deadline_s)
    connections, token_file = max(64, 2 * orch.batch_size), meeting.presence.folder / CONTROL
    seen = {"whereabouts": where, "silent_s": functools.partial(silent_s, meeting)}
    address = Address(client.base_url, key, limit_s, client.timeout, connections, token_file=token_file, **seen)
    return HttpRolloutEngine(address, config.train.model, config.train.seed, waits.heard)


def whereabouts(meeting: Meeting, config: RunConfig) -> tuple[str, str]:
    """What the shared folder says of grpo-infer while nothing answers at the address, and what to do about it.

    Raises what the run was ended with, if it was: grpo-infer whose server is gone says why and ends.
    """
    meeting.look()
    infer, asked = config.infer, port_of(config.orch.client.base_url)
    if not meeting.peers.is_alive("infer"):
        return "grpo-infer is not there", "start it with shoal grpo-infer"
    if (seen := server_trouble(meeting)) is not None:
        return seen, "see to it where grpo-infer runs"
    host = f"[{infer.host}]" if ":" in infer.host else infer.host
    wrote = f"it wrote down http://{host}:{infer.port}/v1"
    if asked in (None, infer.port):
        return (
            f"grpo-infer {LOADING}",
            f"{wrote}; check orch.client.base_url, or raise orch.deadline_s if it needs longer",
        )
    return f"grpo-infer is there, but does not answer at this address: {wrote}", "check orch.client.base_url"


def server_trouble(meeting: Meeting) -> str | None:
    """What grpo-infer says of the server that it started, and which cannot say so itself."""
    meeting.look()
    peer = meeting.peers.get("infer")
    return peer.about.get("server") if peer is not None and meeting.peers.is_alive("infer") else None


def silent_s(meeting: Meeting) -> float:
    """Seconds since the last sign of life of a grpo-infer that was here and shows none any more; 0 while it does."""
    meeting.peers.look()
    came, lives = meeting.peers.get("infer") is not None, meeting.peers.is_alive("infer")
    return meeting.peers.silent_s("infer") if came and not lives else 0.0


async def check_engine(engine: Any, config: RunConfig) -> None:
    """The server's own facts against the run: what its section left open is only known now."""
    if isinstance(engine, RemoteEngine):
        await engine.connect()
        return
    facts, train, orch = await engine.about(), config.train, config.orch
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
