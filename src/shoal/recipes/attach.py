"""Trainers and servers with an id, below `log_path`. `setup_infra` attaches to them, also from another process.

A server is a grpo-infer that outlives the process that started it; its handshake files contain its address. A trainer
lives in the process of the loop. Another process continues from its checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from shoal.build.remote_engines import shorten_deadline
from shoal.build.signals import outside_event_loop
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError, DeadlineError, EngineError
from shoal.core.types import Completion, Request
from shoal.recipes.datums import Datum
from shoal.rollout.remote.client import Address, ConnectionLost, HttpClient, retry
from shoal.rollout.remote.shoal import COMPLETIONS, HttpRolloutEngine
from shoal.runs.checkpoints import CheckpointStore
from shoal.runs.files import RunLock, find_holder, storage, write_atomic
from shoal.runs.secrets import CONTROL
from shoal.split.inference_process import infer_section
from shoal.split.rendezvous import FOLDER as HANDSHAKE
from shoal.split.supervisor import free_port

TRAINERS, DEPLOYMENTS = "trainers", "deployments"  # folders in log_path, with one folder per id
KEPT_CHECKPOINTS = 2
COMPARED = ("model", "dtype", "max_model_len", "enable_lora", "max_lora_rank")
START_S = 300.0
STOP_S = 30.0
LOOK_S, CHECK_S = 0.05, 0.5
CONCURRENT = 32  # scoring requests
LAST_CHARACTERS = 600  # of the server's output, in an error message


class TrainerFolder:
    """The lock and the checkpoints of a trainer with an id. `every`: optimizer steps between checkpoints, 0 = none."""

    def __init__(self, id: str, run: RunConfig, every: int) -> None:
        self._every = every
        train = run.train
        self._about = {"model": train.model, "lora": train.lora, "lora_rank": train.lora_rank, "recipe": train.recipe}
        self._id = id
        folder = Path(train.output_dir) / TRAINERS / id
        with storage(f"create {folder}"):
            (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(folder, taken=f"setup_infra: the trainer {id!r} runs in another process:")
        self._store = CheckpointStore(folder / "checkpoints", id)

    def restore(self, load: Callable[[Path], None]) -> int:
        """Load the newest good checkpoint, and return its step; 0 without one."""
        found = self._store.newest_good()
        if found is None:
            return 0
        for key, ours in self._about.items():
            if found.manifest.get(key) != ours:
                raise ArgumentError(
                    f"setup_infra: the checkpoint of trainer {self._id!r} has train.{key} {found.manifest.get(key)!r}, "
                    f"not {ours!r}; use another id"
                )
        load(found.path)
        return found.step

    def save_if_due(self, step: int, save: Callable[[Path], None]) -> None:
        if self._every and step % self._every == 0:
            with self._store.write(step, self._about) as folder:
                save(folder)
            self._store.prune(KEPT_CHECKPOINTS)

    def release(self) -> None:
        self._lock.release()


class BackgroundEngine:
    """An HTTP engine on an event loop in a thread of its own.

    A connection belongs to one event loop, but a script starts a new one with each `asyncio.run`. `check` is called
    during requests, and raises if the server has ended.
    """

    def __init__(self, engine: HttpRolloutEngine, check: Callable[[], None]) -> None:
        self._engine = engine
        self._check = check
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server client", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        return self._engine.version

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return outside_event_loop(lambda: asyncio.run(self._await(work)))

    async def _await(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of the work, which has its own deadline."""
        future = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        try:
            while not (await asyncio.wait([future], timeout=CHECK_S))[0]:
                self._check()
            return future.result()
        finally:
            future.cancel()  # no effect if it is done

    async def generate(self, request: Request) -> Completion:
        return await self._await(self._engine.generate(request))

    async def load(self, version: int, manifest: Mapping[str, Any] | None = None) -> str:
        return await self._await(self._engine.load(version, manifest))

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.close(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(STOP_S)
        self._loop.close()


class Server:
    """A grpo-infer process with an id, started or attached to. One process at a time uses it."""

    def __init__(self, place: str, id: str, run: RunConfig, section: dict[str, Any]) -> None:
        self.run = run
        self.users = 0  # Infra objects of this process
        self.folder = Path(run.train.output_dir).resolve() / place / id
        self._name = f"the {place.removesuffix('s')} {id!r}"
        self._process: subprocess.Popen[bytes] | None = None
        self._section = {**section, "output_dir": str(self.folder)}
        for part in (HANDSHAKE, "logs"):
            with storage(f"create {self.folder / part}"):
                (self.folder / part).mkdir(parents=True, exist_ok=True)
        self._lock = RunLock(self.folder, "client.lock", f"setup_infra: {self._name} is used by another process:")
        try:
            self.engine = self._connect(run)
        except BaseException:
            if self._process is not None:
                self._process.kill()
            self._lock.release()
            raise

    @property
    def pid(self) -> int | None:
        """The process id of the server; None if it has ended."""
        holder = find_holder(self.folder / HANDSHAKE, "infer.lock")
        return holder.get("pid") if holder is not None else None

    def _connect(self, run: RunConfig) -> BackgroundEngine:
        if self.pid is None:
            self._start()
        port = self._wait_until_up()
        self.address = Address(
            f"http://127.0.0.1:{port}/v1",
            deadline_s=shorten_deadline(run.orch.deadline_s),
            request_s=run.orch.client.timeout,
            connections=max(64, 2 * run.orch.batch_size),
            name=self._name,
            token_file=self.folder / HANDSHAKE / CONTROL,
        )
        http = HttpRolloutEngine(self.address, self._section["model"], run.train.seed)
        engine = BackgroundEngine(http, self._check_alive)
        try:
            engine.run(http.connect())
        except BaseException:
            engine.close()
            raise
        return engine

    def _start(self) -> None:
        file, log = self.folder / "infer.yaml", self.folder / "logs" / "infer.out"
        write_atomic(file, json.dumps({**self._section, "port": free_port()}, indent=1).encode())
        with storage(f"write {log}"), log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shoal", "grpo-infer", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal of the loop does not end it
            )

    def _wait_until_up(self) -> int:
        """The port on which the server listens."""
        limit = time.monotonic() + START_S
        while True:
            about = self._about()
            if about is not None and _listens(port := int(about["section"]["port"])):
                return port
            ended = self.pid is None if self._process is None else self._process.poll() is not None
            if ended:
                log = self.folder / "logs" / "infer.out"
                said = log.read_text(errors="replace")[-LAST_CHARACTERS:].strip() if log.is_file() else ""
                raise EngineError(f"{self._name} ended before it was ready; see {log}: {said}")
            if time.monotonic() > limit:
                raise DeadlineError(f"{self._name} did not start within {START_S:g} s; see {self.folder / 'logs'}")
            time.sleep(LOOK_S)

    def _about(self) -> dict[str, Any] | None:
        """What the running server wrote about itself; None while it starts. Raises if it has other settings."""
        try:
            about = json.loads((self.folder / HANDSHAKE / "infer.json").read_bytes())
        except (OSError, ValueError):
            return None
        if about.get("pid") != self.pid:
            return None
        self._check(about)
        return about

    def _check(self, about: Mapping[str, Any]) -> None:
        if about["host"] != socket.gethostname():
            raise ArgumentError(
                f"setup_infra: {self._name} runs on {about['host']}; attach to it there, or use another id"
            )
        for key in COMPARED:
            ours, theirs = self._section.get(key), about["section"].get(key)
            if ours != theirs:
                raise ArgumentError(
                    f"setup_infra: {self._name} is running with infer.{key} {theirs!r}, not {ours!r}; use another id, "
                    f"or stop it first (process {about['pid']})"
                )

    def _check_alive(self) -> None:
        if self.pid is None:
            raise EngineError(
                f"{self._name} has ended; setup_infra starts it again (its log is in {self.folder / 'logs'})"
            )

    def logprobs(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        """N-1 log-probs of the N tokens of each datum."""
        if any(datum.sample.kept_ids is not None for datum in datums):
            raise ArgumentError(
                f"reference.forward: datums: {self._name} cannot score tokens that were sampled with top_k, top_p or "
                "min_p; remove infra.ref_trainer_id"
            )
        return self.engine.run(self._score(datums))

    async def _score(self, datums: Sequence[Datum]) -> list[np.ndarray]:
        client, limit = HttpClient(self.address), asyncio.Semaphore(CONCURRENT)

        async def score(ids: list[int], temperature: float) -> np.ndarray:
            body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": temperature}
            async with limit:
                send = retry(ConnectionLost, self.address.deadline_s)
                answer, _ = await send(client.post, COMPLETIONS, body, self.address.request_s)
            return np.array(answer["choices"][0]["logprobs"]["token_logprobs"][1:], dtype=np.float32)

        async def score_datum(datum: Datum) -> np.ndarray:
            """Sampled tokens have the temperature of sampling, the others 1: one request for each."""
            ids, given = [int(token) for token in datum.sample.token_ids], datum.sample.temperatures[1:]
            values = np.zeros(len(given), dtype=np.float32)
            for temperature in np.unique(given):
                values = np.where(given == temperature, await score(ids, float(temperature)), values)
            return values

        try:
            return list(await asyncio.gather(*map(score_datum, datums)))
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineError(f"the answer of {self._name} cannot be read: {error!r}") from error
        except ConnectionLost as error:
            raise EngineError(f"{self._name} does not respond: {error}") from error
        finally:
            await client.close()

    def detach(self) -> None:
        """Leave the server running, for another process."""
        self.engine.close()
        self._lock.release()

    def stop(self) -> None:
        if (pid := self.pid) is not None:
            limit = time.monotonic() + STOP_S
            os.kill(pid, signal.SIGTERM)
            while self.pid == pid and time.monotonic() < limit:
                time.sleep(LOOK_S)
            if self.pid == pid:
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.detach()


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def start_deployment(id: str, run: RunConfig) -> Server:
    """Start a deployment, or attach to the running one with this id."""
    rank = {"enable_lora": True, "max_lora_rank": run.train.lora_rank} if run.train.lora else {}
    slots = run.infer.max_num_seqs or run.orch.batch_size
    limits = {"max_model_len": run.orch.seq_len, "max_num_seqs": slots}
    memory = run.infer.gpu_memory_utilization
    share = {"gpu_memory_utilization": memory} if memory is not None else {}
    return Server(DEPLOYMENTS, id, run, {**infer_section(run.train), **limits, **rank, **share})


def start_reference(id: str, run: RunConfig) -> Server:
    """Start a forward-only trainer, or attach to the running one with this id (`shoal grpo-train --forward-only`)."""
    return Server(TRAINERS, id, run, infer_section(run.train))
