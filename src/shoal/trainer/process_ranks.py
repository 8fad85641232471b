"""The ranks that train one policy, joined through torch.distributed with the environment set by a launcher.

Replicated weights: gradients are summed before an optimizer step, so all ranks take the same step. Sharded weights:
FSDP sums them, over the mesh created here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.core.errors import ConfigError, LostRanksError, ShoalError

JOIN_LIMIT_S = 600.0  # processes of one launch may start minutes apart
TICK_S = 1.0
BUCKET_NUMBERS = 1 << 24
FAILED = "failed"
# Words that identify transport errors among the RuntimeErrors that training raises.
_TRANSPORTS = ("gloo", "NCCL", "ProcessGroup", "TCPStore")


class ProcessRanks:
    """Created once per process, after the reward workers were forked and before the model is loaded."""

    def __init__(self, deadline_s: float, processes: int = 1, device: str = "auto") -> None:
        self._deadline_s = deadline_s
        self._lost = False
        on_gpu = device != "cpu" and torch.cuda.is_available()
        self._owns = not dist.is_initialized()
        if self._owns:
            backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
            _join(backend, processes, timedelta(seconds=max(deadline_s, JOIN_LIMIT_S)))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))
        self.mesh: DeviceMesh = init_device_mesh("cuda" if on_gpu else "cpu", (self.world,))

    @property
    def cpu_group(self) -> Any:
        """The gloo group for control messages; gradients and weights use the default group."""
        return self._talk

    @contextlib.contextmanager
    def watch_peers(self) -> Iterator[None]:
        """Wrap communication with other ranks: transport errors become LostRanksError."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, ShoalError) or not _is_transport(error):
                raise
            self._lost = True
            raise LostRanksError(
                f"process {self.rank} of {self.world} lost the others or timed out after {self._deadline_s:.0f} s: "
                f"{str(error).splitlines()[0]}"
            ) from error

    def gather_full(self, tensor: Any) -> Tensor:
        """Gather a sharded tensor on every rank; a collective call."""
        with self.watch_peers():
            return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def minimum(self, numbers: list[int]) -> list[int]:
        """The element-wise minimum over all ranks."""
        with self.watch_peers():
            agreed = torch.tensor(numbers, dtype=torch.int64)
            dist.all_reduce(agreed, dist.ReduceOp.MIN, group=self._talk)
            return [int(number) for number in agreed]

    async def exchange(self, mine: bytes) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(None, self._exchange, mine)

    def _exchange(self, mine: bytes) -> list[bytes]:
        with self.watch_peers():
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._talk)
            room = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(room, dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
            parts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self._talk)
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """Run `work` on rank 0 and return its result on all ranks. A message every second prevents timeouts."""
        if self.rank != 0:
            while not (told := (await self.exchange(b""))[0]):
                pass
            answer = json.loads(told)
            if FAILED in answer:
                # Error types that are not followed by a checkpoint, since rank 0 is exiting.
                raise (ConfigError if answer["input"] else LostRanksError)(f"the main process failed: {answer[FAILED]}")
            return answer["result"]
        task = asyncio.ensure_future(work())
        try:
            while not (await asyncio.wait({task}, timeout=TICK_S))[0]:
                await self.exchange(b"")
            result = task.result()
        except BaseException as error:
            reason = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
            answer = {FAILED: reason, "input": isinstance(error, ConfigError)}
            await self.exchange(json.dumps(answer).encode())
            raise
        await self.exchange(json.dumps({"result": result}).encode())
        return result

    @torch.no_grad()
    def sum_gradients(self, masters: Mapping[str, Tensor]) -> None:
        """Sum the gradients of all ranks; a rank without rows in this step adds zeros."""
        with self.watch_peers():
            self._sum_gradients(masters)

    def _sum_gradients(self, masters: Mapping[str, Tensor]) -> None:
        bucket: list[Tensor] = []
        for master in masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            bucket.append(master.grad)
            if sum(grad.numel() for grad in bucket) >= BUCKET_NUMBERS:
                self._sum(bucket)
                bucket = []
        if bucket:
            self._sum(bucket)

    def _sum(self, grads: list[Tensor]) -> None:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(total.view_as(grad))

    def close(self) -> None:
        if self._owns and dist.is_initialized() and not self._lost:  # with lost ranks this could hang
            dist.destroy_process_group()


def _join(backend: str, processes: int, timeout: timedelta) -> None:
    if processes == 1 and "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ConfigError(f"{missing[0]} is not set; start the processes with accelerate launch or torchrun")
    try:
        dist.init_process_group(backend, timeout=timeout)
    except dist.DistError as error:
        raise LostRanksError(f"the processes of this run could not connect: {str(error).splitlines()[0]}") from error


def _is_transport(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(name in str(error) for name in _TRANSPORTS)
