"""Weight versions over torch.distributed: the trainer is rank 0 and offers a snapshot, an engine fetches it as rank 1.

Every transfer is a group of its own (NCCL between GPUs, gloo otherwise), met at one store that the trainer keeps open,
so an engine that was restarted fetches the same version again. An engine proves that it knows the token of the run
before it is sent anything, and uses nothing before it has compared every checksum.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
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

from shoal.errors import ConfigError, StorageError
from shoal.observability import manifest as manifests
from shoal.observability.token import read_token

log = logging.getLogger(__name__)
JOIN_S = 60.0  # for both ends of a transfer to meet
POLL_S = 0.02
WORLD = 2
MOST_AT_ONCE = 16  # engines that are sent a version at the same time
OFFERED, GONE, DENIED = "offered", "gone", "denied"
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
            "tensors": [describe(name, tensor) for name, tensor in tensors.items()],
            "adapter": adapter,
            "noise_seed": self._noise_seed,
        }

    def _serve(self, store: dist.TCPStore) -> None:
        """A thread for every engine that asks: one that died on the way holds nobody else up."""
        served = 0
        while not self._stop.wait(POLL_S):
            asked = int(store.add("asked", 0))
            for number in range(max(served, asked - MOST_AT_ONCE) + 1, asked + 1):
                name = f"weights-{number}"
                threading.Thread(target=self._send, args=(store, number), name=name, daemon=True).start()
            served = asked

    def _send(self, store: dist.TCPStore, number: int) -> None:
        with suppress(RuntimeError):  # the engine went away; it asks again if it comes back
            wanted, offer = store.get(f"{number}/wanted").decode("ascii", "replace"), self._offer
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
        for entry in listed:
            if describe(entry["name"], self._tensors[entry["name"]]) != dict(entry):
                raise StorageError(f"weights: {entry['name']} of version {version} arrived changed (checksum differs)")
        self.hash = manifests.version_hash(manifest)
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in listed}
        self.adapter: Mapping[str, Any] | None = manifest.get("adapter")

    def _fetch(self, manifest: Mapping[str, Any], version: int, where: str) -> None:
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), WORLD, False, _limit(), wait_for_workers=False)
        number = int(store.add("asked", 1))
        proof = _proof(read_token(self._token_file) or "", number, str(version))
        store.set(f"{number}/wanted", f"{version} {proof}")
        state = store.get(f"{number}/state").decode()
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

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def close(self) -> None:
        self._tensors.clear()


def describe(name: str, tensor: Tensor) -> dict[str, Any]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": kind, "shape": list(tensor.shape), "sha256": hashlib.sha256(raw.data).hexdigest()}


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
        raise ConfigError(
            f"train.weight_broadcast: cannot listen on {place.host}:{place.port}: {str(error).splitlines()[0]}; choose "
            "another train.weight_broadcast.port"
        ) from error
    sock.detach()  # it is the store's now
    return store


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
