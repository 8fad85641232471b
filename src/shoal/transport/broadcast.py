"""Weight versions over torch.distributed: the trainer is rank 0 and offers a snapshot, an engine fetches it as rank 1.

Every transfer is a group of its own (NCCL between GPUs, gloo otherwise), met at one store that the trainer keeps open,
so an engine that was restarted fetches the same version again. Nothing is used before every checksum is compared.
"""

from __future__ import annotations

import hashlib
import socket
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError, StorageError

JOIN_S = 60.0  # for both ends of a transfer to meet
POLL_S = 0.02
WORLD = 2
OFFERED, GONE = "offered", "gone"
# The tensors of the current version on the host, by the names they have in files, and an adapter's settings.
Snapshot = Callable[[], Awaitable[tuple[dict[str, Tensor], dict[str, Any] | None]]]


@dataclass(frozen=True)
class Offer:
    version: int
    tensors: Mapping[str, Tensor]


class BroadcastWeightChannel:
    """The trainer's end. Holds one version on the host, so that training goes on while it is fetched."""

    def __init__(self, host: str, port: int, snapshot: Snapshot, noise_seed: int = 0, device: str = "cpu") -> None:
        self._host = host
        self._snapshot = snapshot
        self._noise_seed = noise_seed
        self._device = torch.device(device)
        self._offer: Offer | None = None
        self._stop = threading.Event()
        port = port or _free_port(host)
        try:
            self._store: dist.TCPStore | None = dist.TCPStore(host, port, WORLD, True, _limit(), wait_for_workers=False)
        except RuntimeError as error:
            raise ConfigError(
                f"train.weight_broadcast: cannot listen on {host}:{port}: {str(error).splitlines()[0]}; choose another "
                "train.weight_broadcast.port"
            ) from error
        self._address = f"{host}:{port}"
        self._serving = threading.Thread(target=self._serve, args=(self._store,), name="weights", daemon=True)
        self._serving.start()

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
            for number in range(served + 1, asked + 1):
                name, arguments = f"weights-{number}", (store, number)
                threading.Thread(target=self._send, args=arguments, name=name, daemon=True).start()
            served = asked

    def _send(self, store: dist.TCPStore, number: int) -> None:
        with suppress(RuntimeError):  # the engine went away; it asks again if it comes back
            wanted, offer = int(store.get(f"{number}/wanted")), self._offer
            if offer is None or offer.version != wanted:
                store.set(f"{number}/state", GONE)
                return
            store.set(f"{number}/state", OFFERED)
            group = _group(store, number, 0, self._device)
            for tensor in offer.tensors.values():
                _broadcast(group, tensor.to(self._device))

    def close(self) -> None:
        """The port is free again once nobody holds the store."""
        self._stop.set()
        self._serving.join(JOIN_S)
        self._store = self._offer = None


class BroadcastWeights:
    """A version that an engine fetched: `models.own_weights.Incoming`, for manifests whose transport is broadcast."""

    def __init__(self, manifest: Mapping[str, Any]) -> None:
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
        self.hash = version_hash(version, listed)
        self.shapes = {entry["name"]: tuple(entry["shape"]) for entry in listed}
        self.adapter: Mapping[str, Any] | None = manifest.get("adapter")

    def _fetch(self, manifest: Mapping[str, Any], version: int, where: str) -> None:
        host, _, port = where.rpartition(":")
        store = dist.TCPStore(host, int(port), WORLD, False, _limit(), wait_for_workers=False)
        number = int(store.add("asked", 1))
        store.set(f"{number}/wanted", str(version))
        if store.get(f"{number}/state") != OFFERED.encode():
            raise StorageError(f"weights: the trainer at {where} does not offer version {version} any more")
        device = torch.device("cuda" if manifest.get("backend") == "nccl" else "cpu")
        group = _group(store, number, 1, device)
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


def version_hash(version: int, listed: list[Mapping[str, Any]]) -> str:
    digest = hashlib.blake2b(str(version).encode(), digest_size=16)
    for entry in sorted(listed, key=lambda entry: entry["name"]):
        digest.update(f"\n{entry['name']} {entry['sha256']}".encode())
    return digest.hexdigest()


def _group(store: dist.TCPStore, number: int, rank: int, device: torch.device) -> Any:
    """A group beside whatever this process trains with."""
    prefixed = dist.PrefixStore(f"{number}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _limit()
        return dist.ProcessGroupNCCL(prefixed, rank, WORLD, options)
    return dist.ProcessGroupGloo(prefixed, rank, WORLD, _limit())


def _broadcast(group: Any, tensor: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    group.broadcast([tensor], options).wait()


def _limit() -> timedelta:
    return timedelta(seconds=JOIN_S)


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return int(found.getsockname()[1])
