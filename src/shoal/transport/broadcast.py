"""Weight versions over torch.distributed: the trainer is rank 0 and offers a snapshot, an engine fetches it as rank 1.

Every transfer is a group of its own (NCCL between GPUs, gloo otherwise), met at one store that the trainer keeps open,
so an engine that was restarted fetches the same version again. An engine proves that it knows the token of the run
before it is sent anything, each number is answered once, and it uses nothing before it has compared every checksum.
"""

from __future__ import annotations

import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError, StorageError
from shoal.observability import manifest as manifests
from shoal.observability.atomic import fault
from shoal.observability.digest import digest_buffers
from shoal.observability.token import read_token

log = logging.getLogger(__name__)
JOIN_S = 60.0  # for both ends of a transfer to meet
POLL_S = 0.02
WORLD = 2
BUSY_S = 0.5  # before an engine asks again
MOST_AT_ONCE = 16  # engines that are sent a version at the same time
MOST_ASKED = 1024  # between two polls; whoever moves the counter further than that asks for nothing
OFFERED, GONE, DENIED, BUSY = "offered", "gone", "denied", "busy"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
# The tensors of the current version on the host, by the names they have in files, and an adapter's settings.
Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], dict[str, Any] | None]]]


@dataclass(frozen=True)
class Offer:
    version: int
    tensors: Mapping[str, Tensor]


@dataclass(frozen=True)
class Place:
    """Where the trainer listens, and the secret of whoever may fetch."""

    host: str
    port: int  # 0 takes a free one
    token: str


class BroadcastWeightChannel:
    """The trainer's end. Holds one version on the host, so that training goes on while it is fetched."""

    def __init__(self, place: Place, snapshot: Snapshot, noise_seed: int = 0, device: str = "cpu") -> None:
        self._place = place
        self._snapshot = snapshot
        self._noise_seed = noise_seed
        self._device = torch.device(device)
        self._offer: Offer | None = None
        self._stop = threading.Event()
        self._slots = threading.BoundedSemaphore(MOST_AT_ONCE)
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
        """Every number is answered once, whatever becomes of the counter: a proof is worth nothing afterwards."""
        served, failed = 0, ""
        while not self._stop.wait(POLL_S):
            try:
                asked = _count(store, served)
                if asked - served > MOST_ASKED:
                    log.warning("weights: requests %d to %d are not answered", served + 1, asked - MOST_ASKED)
                first, served = max(served, asked - MOST_ASKED) + 1, max(served, asked)
                for number in range(first, asked + 1):
                    self._answer(store, number)
            except (RuntimeError, OSError) as error:  # torch's store, or no thread is left
                said = str(error).partition("\n")[0]
                if said != failed:
                    log.warning("weights: engines could not be answered, trying again: %s", said)
                failed = said

    def _answer(self, store: dist.TCPStore, number: int) -> None:
        """A thread for every engine that asks: one that died on the way holds nobody else up."""
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
            # A connection of its own: whoever waits on the shared one keeps it from everybody.
            self._offer_to(_connect(self._place.host, shared.port), number)
        except (RuntimeError, OSError) as error:  # the engine went away; it asks again if it comes back
            log.info("weights: request %d was not served: %s", number, str(error).partition("\n")[0])
        finally:
            self._slots.release()

    def _offer_to(self, store: dist.TCPStore, number: int) -> None:
        wanted, offer = store.get(f"{number}/wanted").decode("ascii", "replace"), self._offer
        store.delete_key(f"{number}/wanted")
        version, _, proof = wanted.partition(" ")
        if not hmac.compare_digest(proof.encode(), _proof(self._place.token, number, version).encode()):
            log.warning("weights: request %d does not know the token of this run and is sent nothing", number)
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
        """Nothing is offered any more, and the port is free."""
        self._stop.set()
        self._thread.join(JOIN_S)
        self._store = self._offer = None


class BroadcastWeights:
    """A version that an engine fetched: `models.own_weights.Incoming`, for manifests whose transport is broadcast.

    `token_file` is where the trainer left the token of this run.
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
        until = time.monotonic() + JOIN_S
        number, state = self._ask(store, version)
        while state == BUSY and time.monotonic() < until:
            time.sleep(BUSY_S)
            number, state = self._ask(store, version)
        if state == BUSY:
            raise StorageError(f"weights: the trainer at {where} was busy with {MOST_AT_ONCE} others for {JOIN_S:g} s")
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

    def _ask(self, store: dist.TCPStore, version: int) -> tuple[int, str]:
        """The number of the request, and what the trainer says to it."""
        number = int(store.add("asked", 1))
        proof = _proof(read_token(self._token_file) or "", number, str(version))
        store.set(f"{number}/wanted", f"{version} {proof}")
        return number, store.get(f"{number}/state").decode()

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


def _listen(place: Place) -> dist.TCPStore:
    """On the address that was asked for alone: left to itself, torch's store listens on every one the machine has."""
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
    sock.detach()  # it is the store's now
    return store


def _connect(host: str, port: int) -> dist.TCPStore:
    return dist.TCPStore(host, port, WORLD, False, _limit(), wait_for_workers=False)


def _count(store: dist.TCPStore, served: int) -> int:
    """How many asked. Read as text: to add to what is no number ends the connection, and this one has no other."""
    said = store.get("asked").decode("ascii", "replace") if store.check(["asked"]) else "0"
    if re.fullmatch(r"-?[0-9]{1,18}", said):
        return int(said)
    log.warning("weights: somebody wrote %r where requests are counted; counting goes on from %d", said[:40], served)
    store.set("asked", str(served))
    return served


def _proof(token: str, number: int, version: str) -> str:
    """That one knows the token, for this request alone."""
    return hmac.new(token.encode(), f"{number} {version}".encode(), "sha256").hexdigest()


def _group(store: dist.TCPStore, number: int, rank: int, device: torch.device, host: str) -> Any:
    """A group beside whatever this process trains with. On loopback its own connections stay there too."""
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
