"""grpo-infer: the HTTP server on the embedded engine with its own weights, or a vLLM or SGLang child process.

Called by split/commands.py and by `shoal infer`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.build.model import LoadedModel, load
from shoal.build.remote_engines import ENGINES, check_key, launch_of
from shoal.build.sampler import CLOSE_LIMIT_S, CPU_PREFILL_TOKENS
from shoal.build.signals import handled_signals
from shoal.config.infer import InferConfig
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, EngineError, ShoalError
from shoal.planning.memory import GPU_PREFILL_TOKENS
from shoal.rollout.remote.process import ServerProcess, check_interpreter
from shoal.runs.events import setup_logging, stop_logging
from shoal.runs.secrets import CONTROL, write_token
from shoal.server.access import LOOPBACK, Access, Listener, bind
from shoal.server.app import make_app
from shoal.server.completions import Completions, ServedModel
from shoal.server.control import Control, Names
from shoal.split.rendezvous import FOLDER as HANDSHAKE
from shoal.watch.machine import has_gpu

if TYPE_CHECKING:
    from shoal.build.memory_plan import MemoryPlan
    from shoal.engine.engine import EmbeddedEngine
    from shoal.models.served_weights import Reader, WeightLoader
    from shoal.rollout.embedded import EmbeddedRolloutEngine


LOOK_S = 0.5


async def _nothing() -> None: ...


@dataclass(frozen=True)
class RunMembership:
    """Connects a server to its run."""

    accompany: Callable[[], Awaitable[None]] = _nothing  # runs next to the server; an error of it ends the server
    trouble: Callable[[str | None], None] = lambda _: None  # receives problems that the server cannot report itself
    failed: Callable[[ShoalError], None] = lambda _: None  # called before the remaining processes are ended


def on_ending(end: Callable[[signal.Signals], None]) -> None:
    """Install the signal handlers of grpo-infer. Under nohup SIGHUP stays ignored."""
    for number in handled_signals():
        asyncio.get_running_loop().add_signal_handler(number, end, number)


async def serve_others(
    infer: InferConfig, tell: Callable[[str], None], membership: RunMembership | None = None
) -> signal.Signals:
    """Run a vLLM or SGLang server until a signal comes, and return the signal."""
    name = ENGINES[infer.engine].name
    if infer.engine_python is None:
        raise ConfigError(f"infer.engine_python: is not set; name the Python of the environment that has {name}")
    check_interpreter(infer.engine_python, infer.engine, name)
    check_key("infer", infer.api_key_var)
    on_cpu = not has_gpu()
    process = ServerProcess(launch_of(infer, Path(infer.output_dir), "float32" if on_cpu else "auto", on_cpu=on_cpu))
    ended: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()
    on_ending(lambda number: None if ended.done() else ended.set_result(number))
    process.start()
    launch = process.launch
    tell(f"{name} starts at http://{launch.host}:{launch.port}/v1; its log is {launch.log}")
    try:
        return await _watch_server(process, membership or RunMembership(), ended)
    finally:
        await process.close()


async def _watch_server(
    process: ServerProcess, membership: RunMembership, ended: asyncio.Future[signal.Signals]
) -> signal.Signals:
    """Wait for a signal. Raises the error that ended the server or the run."""
    beside, trouble = asyncio.ensure_future(membership.accompany()), None
    try:
        while not ended.done():
            if (failure := process.failure()) is not None:
                membership.failed(failure)
                raise failure
            if beside.done():
                beside.result()
            if (seen := process.stopped()) != trouble:
                trouble = seen
                membership.trouble(seen)
            await asyncio.wait([ended], timeout=LOOK_S)
        return ended.result()
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)


RECIPES = {"auto": "auto", "bfloat16": "bf16", "float32": "fp32"}
DEFAULT_CONTEXT_TOKENS = 2048  # as train.sequence_len
DEFAULT_SLOTS = 256
REFERENCE_SLOTS = 8  # texts are scored without the KV cache
DEFAULT_LORA_RANK = 16  # as train.lora_rank


@dataclass
class Inference:
    """The engine with its own weights, its facts for clients, and its device thread."""

    engine: EmbeddedRolloutEngine
    model: LoadedModel
    facts: dict[str, Any]
    plan: MemoryPlan
    device: ThreadPoolExecutor

    async def start(self, adapter: Path | None = None) -> str:
        """Serve version 0, with the adapter if one is given. Returns the hash of the weights."""
        found = await self.engine.load(0)
        return await self.engine.load_adapter(adapter) if adapter is not None else found

    async def close(self) -> None:
        await asyncio.wait_for(self.engine.close(), CLOSE_LIMIT_S)
        self.device.shutdown(wait=False, cancel_futures=True)


def train_config(infer: InferConfig) -> TrainConfig:
    """A training section for loading the model; nothing is trained."""
    lora = {"lora": True, "lora_rank": infer.max_lora_rank or DEFAULT_LORA_RANK} if infer.enable_lora else {}
    return TrainConfig.model_validate({"model": infer.model, "recipe": RECIPES[infer.dtype], **lora})


def infer_section(train: TrainConfig) -> dict[str, Any]:
    """The section of a server with the model of `train`, such as a reference."""
    dtypes = {recipe: dtype for dtype, recipe in RECIPES.items()}
    return {
        "model": str(train.model),
        "dtype": dtypes.get(train.recipe, "auto"),
        "max_model_len": train.sequence_len,
        "max_num_seqs": REFERENCE_SLOTS,
    }


def make_inference(infer: InferConfig, readers: Mapping[str, Reader] | None = None) -> Inference:
    """`readers` are further weight transports by name."""
    from shoal.rollout.embedded import EmbeddedRolloutEngine

    device = ThreadPoolExecutor(1, thread_name_prefix="device")
    try:
        model = device.submit(load, train_config(infer), {"chat_template": infer.chat_template}).result()
        inner, weights, plan = device.submit(_engine, infer, model, readers).result()
    except BaseException:
        device.shutdown(wait=False, cancel_futures=True)
        raise
    engine = EmbeddedRolloutEngine(inner, device, weights=weights)
    return Inference(engine, model, _facts(infer, model, inner), plan, device)


def _engine(
    infer: InferConfig, model: LoadedModel, readers: Mapping[str, Reader] | None
) -> tuple[EmbeddedEngine, WeightLoader, MemoryPlan]:
    from shoal.build.memory_plan import MemoryRequest
    from shoal.build.memory_probe import sampling_plan
    from shoal.engine.engine import EmbeddedEngine, EngineSettings
    from shoal.models.sampler_view import SamplerView
    from shoal.models.served_weights import WeightLoader

    model.decoder.model.requires_grad_(False)
    context = infer.max_model_len or min(DEFAULT_CONTEXT_TOKENS, model.decoder.max_positions or DEFAULT_CONTEXT_TOKENS)
    demand = MemoryRequest(
        row_tokens=context,
        step_tokens=context,
        rows_per_micro_batch=1,
        recompute=False,
        slots=infer.max_num_seqs or DEFAULT_SLOTS,
        context_tokens=context,
        utilization=infer.gpu_memory_utilization,
        prefill_tokens=GPU_PREFILL_TOKENS,
        narrowed=True,
    )
    plan = sampling_plan(model.decoder, model.layers, demand)
    prefill = GPU_PREFILL_TOKENS if model.decoder.device.type == "cuda" else CPU_PREFILL_TOKENS
    settings = EngineSettings(plan.slots, context, prefill, model.eos_token_ids)
    rank = (infer.max_lora_rank or DEFAULT_LORA_RANK) if infer.enable_lora else None
    engine = EmbeddedEngine(SamplerView(model.decoder), model.layers, settings, model.chat.text)
    return engine, WeightLoader(model.decoder, rank, readers), plan


def _facts(infer: InferConfig, model: LoadedModel, engine: EmbeddedEngine) -> dict[str, Any]:
    import shoal

    return {
        "engine": "embedded",
        "shoal": shoal.__version__,
        "dtype": str(model.decoder.dtype).removeprefix("torch."),
        "device": str(model.decoder.device),
        "max_model_len": engine.settings.context_tokens,
        "max_num_seqs": engine.settings.slots,
        "vocab_size": model.decoder.vocab_size,
        "eos_token_ids": list(model.eos_token_ids),
        "lora": bool(infer.enable_lora),
        "max_lora_rank": (infer.max_lora_rank or DEFAULT_LORA_RANK) if infer.enable_lora else None,
    }


def access_of(infer: InferConfig) -> Access:
    key = None
    if infer.api_key_var is not None:
        key = os.environ.get(infer.api_key_var, "").strip()
        if not key:
            raise ConfigError(f"infer.api_key_var: the environment variable {infer.api_key_var} is not set")
    return Access(key=key, loopback=infer.host in LOOPBACK)


async def start_server(
    infer: InferConfig,
    inference: Inference,
    sock: socket.socket,
    failed: Callable[[EngineError], None],
    adapter: Path | None = None,
    name: str | None = None,
) -> tuple[Listener, Control]:
    """Listening when it returns. `name` is that of the model for clients."""
    engine = inference.engine
    names = Names(name or str(infer.model), lambda: engine.version)
    folder, access = Path(infer.output_dir), access_of(infer)
    if access.key is None:
        access = replace(access, token=write_token(folder / HANDSHAKE / CONTROL))
    control = Control(engine, names, inference.facts, (folder,))
    control.hash = await inference.start(adapter)
    served = ServedModel(engine, inference.model.chat, names.model, inference.facts["max_model_len"])
    listener = Listener(make_app(Completions(served), names, control, access, failed), sock)
    await listener.start()
    return listener, control


def serve(
    infer: InferConfig,
    tell: Callable[[str], None],
    readers: Mapping[str, Reader] | None = None,
    beside: Callable[[], Awaitable[None]] | None = None,
    adapter: Path | None = None,
    name: str | None = None,
) -> signal.Signals:
    """Serve until a signal comes, and return the signal. Binds the port before loading the model, to fail early.

    `beside` runs next to the server; an error of it ends the server. `name` is that of the model for clients.
    """
    from shoal.build.memory_plan import cpu_share, lines_of, path_lines
    from shoal.models.tokenizer import check_found

    access_of(infer)
    sock = bind(infer.host, infer.port)
    handler = setup_logging(Path(infer.output_dir) / "logs", "infer")
    try:
        tell(f"loading {name or infer.model}")
        assert infer.model is not None
        check_found("infer.model", infer.model)
        inference = make_inference(infer, readers)
        if notice := cpu_share(infer, inference.model):
            tell(notice)
        for line in (*path_lines(inference.engine.path), *lines_of(inference.plan)):
            tell(line)
        start = functools.partial(start_server, infer, inference, sock, adapter=adapter, name=name)
        return asyncio.run(_serve(infer, inference, start, tell, beside))
    finally:
        sock.close()
        stop_logging(handler)


async def _serve(
    infer: InferConfig,
    inference: Inference,
    start: Callable[[Callable[[BaseException], None]], Awaitable[tuple[Listener, Control]]],
    tell: Callable[[str], None],
    beside: Callable[[], Awaitable[None]] | None,
) -> signal.Signals:
    ended: asyncio.Future[BaseException | signal.Signals] = asyncio.get_running_loop().create_future()

    def end(reason: BaseException | signal.Signals) -> None:
        if not ended.done():
            ended.set_result(reason)

    on_ending(end)
    listener, control = await start(end)
    about = control.about()
    shown = f"[{infer.host}]" if ":" in infer.host else infer.host
    tell(
        f"serving {control.names.model} at http://{shown}:{listener.port}/v1 ({about['dtype']} on {about['device']}, "
        f"{about['max_num_seqs']} sequences of {about['max_model_len']} tokens)"
    )
    watching = asyncio.ensure_future(_watch(beside, end)) if beside is not None else None
    try:
        reason = await ended
    finally:
        if watching is not None:
            watching.cancel()
        await listener.close()
        await inference.close()
    if isinstance(reason, BaseException):
        raise reason
    tell(f"stopped by {reason.name}")
    return reason


async def _watch(beside: Callable[[], Awaitable[None]], end: Callable[[BaseException], None]) -> None:
    try:
        await beside()
    except Exception as error:
        end(error)
