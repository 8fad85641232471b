"""The orchestrator of the split layout: `build_split` puts together the loop with engine and trainer elsewhere.

What it shares with a co-located run is built by the functions of build/parts.py. The trainer is in trainer_process.py.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.evaluate import make_evaluator
from shoal.build.load import Run
from shoal.build.model import make_chat
from shoal.build.parts import make_collector, make_observer, make_replay, make_run_group, running
from shoal.build.prompts import loop_settings, make_stream, total_steps
from shoal.build.remote_engines import ExternalServer, facts_of_files, make_remote, shorten_deadline
from shoal.build.sampler import chat_options, make_runner
from shoal.build.workspace import LOADING, Workspace
from shoal.config.schema import RunConfig
from shoal.config.section_rules import port_of
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError
from shoal.core.loop import Loop
from shoal.core.protocols import RolloutEngine
from shoal.core.state import Parts
from shoal.rollout.remote.client import WaitReporter
from shoal.runs.files import remove_quietly, storage
from shoal.runs.secrets import CONTROL
from shoal.split.calls import FOLDER as SAMPLES
from shoal.split.calls import Answerer, Caller, FolderAnswerer, FolderCaller
from shoal.split.remote_trainer import RemoteFiles, RemoteTrainer, RemoteWeights, Resources, run_inline
from shoal.split.rendezvous import Rendezvous
from shoal.split.tcp_calls import TcpAnswerer, TcpCaller
from shoal.watch.observer import Phases

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
