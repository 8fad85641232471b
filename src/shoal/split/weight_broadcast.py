"""Weight versions over torch.distributed: the trainer (rank 0) offers a snapshot, an engine (rank 1) fetches it.

Every transfer has its own process group (NCCL between GPUs, gloo otherwise), created through a store that the trainer
keeps open, so a restarted engine can fetch the same version again. An engine must prove that it knows the token of the
run, each request number is answered once, and an engine uses no tensor before all checksums match.
"""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.config.rules import LOOPBACK
from shoal.core.errors import ConfigError, StorageError
from shoal.rollout.remote.client import retry_blocking
from shoal.runs import weight_files as manifests
from shoal.runs.files import digest_buffers, fault
from shoal.runs.secrets import read_token

log = logging.getLogger(__name__)
JOIN_S = 60.0  # for both ends of a transfer to connect
POLL_S = 0.02
WORLD = 2
MAX_TRANSFERS = 16  # at the same time
MAX_REQUESTS = 1024  # between two polls; more are ignored, since only a faulty client sends them
OFFERED, GONE, DENIED, BUSY = "offered", "gone", "denied", "busy"
# Returns the tensors of the current version on the host, by their names in files, and the adapter configuration.
Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], dict[str, Any] | None]]]


class TrainerBusy(StorageError):
    """The trainer already serves MAX_TRANSFERS engines."""


@dataclass(frozen=True)
class Offer:
    version: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class BroadcastAddress:
    """Where the trainer listens, and the token of the run."""

    host: str
    port: int  # 0 = any free port
    token: str


class BroadcastWeightChannel:
    """The trainer's end. Holds one version on the host, so training continues during a transfer."""

    def __init__(self, place: BroadcastAddress, snapshot: Snapshot, noise_seed: int = 0, device: str = "cpu") -> None:
        self._place = place
        self._snapshot = snapshot
        self._noise_seed = noise_seed
        self._device = torch.device(device)
        self._offer: Offer | None = None
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MAX_TRANSFERS)
        self._store: dist.TCPStore | None = _listen(place)
        self._address = f"{place.host}:{self._store.port}"
        self._thread = threading.Thread(target=self._serve, args=(self._store,), name="weights", daemon=True)
        self._thread.start()

    async def publish(self, version: int) -> Mapping[str, Any]:
        tensors, adapter = await self._snapshot()
        self._offer = Offer(version, tensors)
        return {
            "version": version,
            "kind": "full" if adapter is None else "lora",
            "transport": "broadcast",
            "address": self._address,
            "world": WORLD,
            "backend": "nccl" if self._device.type == "cuda" else "gloo",
            "tensors": described(tensors),
            "adapter": adapter,
            "noise_seed": self._noise_seed,
        }

    def _serve(self, store: dist.TCPStore) -> None:
        """Answer every request number once, even if the counter is changed, so no intercepted proof can be reused."""
        served, failed = 0, ""
        while not self._stop.wait(POLL_S):
            try:
                requests = _count(store, served)
                if requests - served > MAX_REQUESTS:
                    log.warning("weights: requests %d to %d are not answered", served + 1, requests - MAX_REQUESTS)
                first, served = max(served, requests - MAX_REQUESTS) + 1, max(served, requests)
                for number in range(first, requests + 1):
                    self._answer(store, number)
            except (RuntimeError, OSError) as error:  # from torch's store, or no thread is left
                reason = str(error).partition("\n")[0]
                if reason != failed:
                    log.warning("weights: requests could not be answered, trying again: %s", reason)
                failed = reason

    def _answer(self, store: dist.TCPStore, number: int) -> None:
        """One thread per request, so an engine that dies does not block others."""
        if not self._slots.acquire(blocking=False):
            store.set(f"{number}/state", BUSY)
            return
        try:
            threading.Thread(target=self._send, args=(store, number), name=f"weights-{number}", daemon=True).start()
        except RuntimeError:
            self._slots.release()
            store.set(f"{number}/state", BUSY)
            raise

    def _send(self, shared: dist.TCPStore, number: int) -> None:
        try:
            # Its own connection: waiting on the shared one would block all requests.
            self._offer_to(_connect(self._place.host, shared.port), number)
        except (RuntimeError, OSError) as error:  # the engine is gone; a restarted one sends a new request
            log.info("weights: request %d was not served: %s", number, str(error).partition("\n")[0])
        finally:
            self._slots.release()

    def _offer_to(self, store: dist.TCPStore, number: int) -> None:
        wanted, offer = store.get(f"{number}/wanted").decode("ascii", "replace"), self._offer
        store.delete_key(f"{number}/wanted")
        version, _, proof = wanted.partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(self._place.token, number, version).encode()):
            log.warning("weights: request %d has no valid token proof and is denied", number)
            store.set(f"{number}/state", DENIED)
            return
        if offer is None or str(offer.version) != version:
            store.set(f"{number}/state", GONE)
            return
        store.set(f"{number}/state", OFFERED)
        group = _group(store, number, 0, self._device, self._place.host)
        for tensor in offer.tensors.values():
            _broadcast(group, tensor.to(self._device))
            fault("broadcast:sent")

    def close(self) -> None:
        """Stop serving and free the port."""
        self._stop.set()
        self._thread.join(JOIN_S)
        self._store = self._offer = None


class BroadcastWeights:
    """A fetched version: the `ReceivedVersion` weights of models/served_weights for manifests with transport broadcast.

    `token_file` contains the token of the run, written by the trainer.
    """

    def __init__(self, token_file: Path, manifest: Mapping[str, Any]) -> None:
        self._token_file = token_file
        self._tensors: dict[str, Tensor] = {}
        listed = manifest["tensors"]
        version, where = int(manifest["version"]), str(manifest["address"])
        try:
            self._fetch(manifest, version, where)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise StorageError(f"weights: version {version} could not be fetched from {where}: {reason}") from error
        for entry, arrived in zip(listed, described(self._tensors), strict=True):
            if arrived != dict(entry):
                raise StorageError(f"weights: {entry['name']} of version {version} arrived changed (checksum differs)")
        self.hash = manifests.version_hash(manifest)
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in listed}
        self.adapter: Mapping[str, Any] | None = manifest.get("adapter")

    def _fetch(self, manifest: Mapping[str, Any], version: int, where: str) -> None:
        host, _, port = where.rpartition(":")
        store = _connect(host, int(port))
        number, state = retry_blocking(TrainerBusy, JOIN_S)(self._ask, store, version, where)
        if state == DENIED:
            raise StorageError(f"weights: the trainer at {where} has another token than {self._token_file}")
        if state != OFFERED:
            raise StorageError(f"weights: the trainer at {where} does not offer version {version} any more")
        device = torch.device("cuda" if manifest.get("backend") == "nccl" else "cpu")
        group = _group(store, number, 1, device, host)
        for entry in manifest["tensors"]:
            tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]), device=device)
            _broadcast(group, tensor)
            self._tensors[entry["name"]] = tensor.cpu()

    def _ask(self, store: dist.TCPStore, version: int, where: str) -> tuple[int, str]:
        """The number of the request and the trainer's reply."""
        number = int(store.add("asked", 1))
        proof = _proof(read_token(self._token_file) or "", number, str(version))
        store.set(f"{number}/wanted", f"{version} {proof}")
        state = store.get(f"{number}/state").decode()
        if state == BUSY:
            raise TrainerBusy(f"weights: the trainer at {where} was busy with {MAX_TRANSFERS} engines for {JOIN_S:g} s")
        return number, state

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


def described(tensors: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data for tensor in tensors.values()]
    return [
        {"name": name, "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape), "digest": digest}
        for (name, tensor), digest in zip(tensors.items(), digest_buffers(raw), strict=True)
    ]


def _listen(place: BroadcastAddress) -> dist.TCPStore:
    """Listens only on the given address; by default torch's store listens on all interfaces."""
    family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((place.host, place.port))
        sock.listen()
        port = int(sock.getsockname()[1])
        store = dist.TCPStore(
            place.host, port, WORLD, True, _limit(), wait_for_workers=False, master_listen_fd=sock.fileno()
        )
    except (OSError, RuntimeError) as error:
        with suppress(OSError):
            sock.close()
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(
            f"train.weight_broadcast: cannot listen on {place.host}:{place.port}: {why}; choose "
            "another train.weight_broadcast.port"
        ) from error
    sock.detach()  # owned by the store now
    return store


def _connect(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, WORLD, False, _limit(), wait_for_workers=False)


def _count(store: dist.TCPStore, served: int) -> int:
    """The number of requests. Read as text, because `add` on a value that is not a number closes the connection."""
    value = store.get("asked").decode("ascii", "replace") if store.check(["asked"]) else "0"
    if re.fullmatch(r"-?[0-9]{1,18}", value):
        return int(value)
    log.warning("weights: the request counter was overwritten with %r; counting continues from %d", value[:40], served)
    store.set("asked", str(served))
    return served


def _proof(token: str, number: int, version: str) -> str:
    """Proof of knowing the token, valid for this request only."""
    return hmac.new(token.encode(), f"{number} {version}".encode(), "sha256").hexdigest()


def _group(store: dist.TCPStore, number: int, rank: int, device: torch.device, host: str) -> Any:
    """A process group separate from the one used for training. On loopback its connections stay on loopback too."""
    prefixed = dist.PrefixStore(f"{number}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _limit()
        return dist.ProcessGroupNCCL(prefixed, rank, WORLD, options)
    if host not in LOOPBACK:
        return dist.ProcessGroupGloo(prefixed, rank, WORLD, _limit())
    gloo: Any = dist.ProcessGroupGloo
    near = gloo._Options()
    near._timeout, near._devices = _limit(), [gloo.create_device(hostname=host)]
    return gloo(prefixed, rank, WORLD, near)


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def _limit() -> timedelta:
    return timedelta(seconds=JOIN_S)
