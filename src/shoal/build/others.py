"""grpo-infer with a server that is not ours: vLLM or SGLang, started here, watched, and ended with this process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.build.remote import ENGINES, check_key, launch_of
from shoal.config.infer import InferConfig
from shoal.errors import ConfigError, ShoalError
from shoal.observability.machine import has_gpu
from shoal.orchestrator.signals import heeded_signals
from shoal.rollout.launch import ServerProcess, check_interpreter

LOOK_S = 0.5


async def _nothing() -> None: ...


@dataclass(frozen=True)
class Company:
    """The run that a server belongs to."""

    accompany: Callable[[], Awaitable[None]] = _nothing  # runs next to the server and ends it by what it raises
    trouble: Callable[[str | None], None] = lambda _: None  # told what the server cannot say itself
    failed: Callable[[ShoalError], None] = lambda _: None  # told at once, before what is left of it is ended


def on_ending(end: Callable[[signal.Signals], None]) -> None:
    """What ends grpo-infer, whichever engine it serves. Under nohup a hangup stays ignored."""
    for number in heeded_signals():
        asyncio.get_running_loop().add_signal_handler(number, end, number)


async def serve_others(
    infer: InferConfig, tell: Callable[[str], None], company: Company | None = None
) -> signal.Signals:
    """Started with what a run needs, and ended with this process, by a signal, which is returned."""
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
        return await _watch(process, company or Company(), ended)
    finally:
        await process.close()


async def _watch(process: ServerProcess, company: Company, ended: asyncio.Future[signal.Signals]) -> signal.Signals:
    """Until a signal comes; raises what ended the server, or the run."""
    beside, trouble = asyncio.ensure_future(company.accompany()), None
    try:
        while not ended.done():
            if (failure := process.failure()) is not None:
                company.failed(failure)
                raise failure
            if beside.done():
                beside.result()
            if (seen := process.stopped()) != trouble:
                trouble = seen
                company.trouble(seen)
            await asyncio.wait([ended], timeout=LOOK_S)
        return ended.result()
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
