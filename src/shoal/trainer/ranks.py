"""The processes of a data-parallel run: joined through torch.distributed, which a launcher has told who they are.

Weights are whole on every rank. Gradients are summed before an optimizer step, so all ranks take the same one.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.errors import ConfigError, DeadlineError, ShoalError

JOIN_LIMIT_S = 600.0  # processes of one launch may start minutes apart
TICK_S = 1.0
BUCKET_NUMBERS = 1 << 24
FAILED = "failed"


class ProcessRanks:
    """Made once a process, after the reward workers were forked and before the model is loaded."""

    def __init__(self, deadline_s: float) -> None:
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(f"{missing[0]} is not set; start the processes with accelerate launch or torchrun")
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._deadline_s = deadline_s
        self._owns = not dist.is_initialized()
        if self._owns:
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=max(deadline_s, JOIN_LIMIT_S)))
        self._talk = dist.new_group(backend="gloo", timeout=timedelta(seconds=deadline_s))

    async def exchange(self, mine: bytes) -> list[bytes]:
        return await asyncio.get_running_loop().run_in_executor(None, self._exchange, mine)

    def _exchange(self, mine: bytes) -> list[bytes]:
        try:
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._talk)
            room = max(1, *(int(size) for size in sizes))
            padded = torch.zeros(room, dtype=torch.uint8)
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
            parts = [torch.zeros(room, dtype=torch.uint8) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self._talk)
        except RuntimeError as error:
            raise DeadlineError(
                f"process {self.rank} of {self.world} lost the others, or waited {self._deadline_s:.0f} s for them: "
                f"{str(error).splitlines()[0]}"
            ) from error
        return [part[: int(size)].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]

    async def on_main(self, work: Callable[[], Awaitable[Any]]) -> Any:
        """A word every second while the work goes on: nobody runs into a timeout, however long it takes."""
        if self.rank != 0:
            while not (told := (await self.exchange(b""))[0]):
                pass
            answer = json.loads(told)
            if FAILED in answer:
                # Not one that is followed by a checkpoint: the main process is on its way out.
                raise (ConfigError if answer["input"] else DeadlineError)(f"the main process failed: {answer[FAILED]}")
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
        """Add up the gradients of all ranks; one that had no row of this step adds nothing."""
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
        if self._owns and dist.is_initialized():
            dist.destroy_process_group()
