"""AdamW with fp32 masters, and learning-rate schedules. Parameters are updated in place.

bf16 parameters would lose small updates to rounding, so their masters and gradient sums are kept in fp32; an fp32
parameter is its own master. Moments are fp32, or 8-bit (bitsandbytes, one scale per 256 values). For sharded
parameters (DTensor) each rank steps its shard, and clipping uses the norm over all shards. A schedule is a pure
function of the step, so resuming needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

Kind = Literal["constant", "linear", "cosine", "wsd"]
# The decay phase of warm-up–stable–decay is the last fifth of the run.
WSD_DECAY_FRACTION = 0.2


@dataclass(frozen=True)
class Schedule:
    peak: float
    total_steps: int
    kind: Kind = "constant"
    warmup_steps: int = 0
    final_fraction: float = 0.0

    def __call__(self, step: int) -> float:
        """The learning rate of optimizer step `step`, counted from 1. It is above 0 in every step of the run.

        The first step after warm-up has the peak, and the floor would be reached one step after the last, as in
        transformers.
        """
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        start = self.warmup_steps
        if self.kind == "wsd":
            start = max(start, self.total_steps - math.ceil(WSD_DECAY_FRACTION * self.total_steps))
            if step <= start:
                return self.peak
        progress = min(1.0, (step - 1 - start) / max(1, self.total_steps - start))
        shape = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.peak * (self.final_fraction + (1 - self.final_fraction) * shape)


@dataclass(frozen=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    eight_bit: bool = False  # 8-bit moments; requires bitsandbytes


# State of bitsandbytes per parameter. Its two code maps are constant and not saved.
_EIGHT_BIT_STATE = ("state1", "state2", "absmax1", "absmax2")


class MasterAdamW:
    def __init__(self, parameters: dict[str, nn.Parameter], settings: AdamSettings) -> None:
        self.parameters = parameters
        self.masters: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.dtype in (torch.float32, torch.float64):
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float().clone()
                parameter.register_post_accumulate_grad_hook(self._accumulator(name))
        self._stepped = {name: local_part(master) for name, master in self.masters.items()}  # updated by Adam
        # Weight decay applies to matrices, not to norms and biases.
        decayed = [t for t in self._stepped.values() if t.ndim >= 2]
        plain = [t for t in self._stepped.values() if t.ndim < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        common = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
        self._stay = False  # keep gradient tensors: CUDA graphs add to them in place
        self._eight_bit = settings.eight_bit
        self._adam = _make_adam([g for g in groups if g["params"]], common, settings.eight_bit)

    def _accumulator(self, name: str):
        def add(parameter: Tensor) -> None:
            assert parameter.grad is not None
            master = self.masters[name]
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return add

    @torch.no_grad()
    def clip(self, max_norm: float) -> Tensor:
        """Clip the gradient to `max_norm`; returns its norm before clipping. Non-finite gradients are not changed."""
        grads = [local_part(m.grad) for m in self.masters.values() if m.grad is not None]
        if not grads:
            return torch.zeros(())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        if (shard := self._shard) is not None:
            square = norm.double() ** 2
            dist.all_reduce(square, group=shard.device_mesh.get_group())
            norm = square.sqrt().to(norm.dtype)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)
        return norm

    @property
    def _shard(self) -> DTensor | None:
        """One of the sharded parameters; all are sharded over the same ranks."""
        return next((m for m in self.masters.values() if isinstance(m, DTensor)), None)

    @torch.no_grad()
    def step(self, rate: float, settings: AdamSettings | None = None, norm: Tensor | None = None) -> None:
        """`settings` replace the current ones from this step on. If the gradient's `norm` is not finite, nothing is
        updated and no step is counted; the check runs on the device."""
        for group in self._adam.param_groups:
            group["lr"] = rate
            if settings is not None:
                group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.epsilon
                group["weight_decay"] = settings.weight_decay if group["params"][0].ndim >= 2 else 0.0
        for name, master in self.masters.items():
            if isinstance(master, DTensor) and master.grad is not None:
                self._stepped[name].grad = local_part(master.grad)
        if self._eight_bit:
            if norm is not None and not norm.isfinite():  # with bitsandbytes this needs a device sync
                return
            self._step_eight_bit()
        else:
            self._adam.found_inf = None if norm is None else (~norm.isfinite()).float()
            self._adam.step()
        shared = [(self.parameters[n], m) for n, m in self.masters.items() if m is not self.parameters[n]]
        if shared:
            torch._foreach_copy_([p for p, _ in shared], [m for _, m in shared])

    def _step_eight_bit(self) -> None:
        """The step of bitsandbytes without its device sync after every parameter."""
        for place, group, master in self._places():
            if master.grad is not None:
                if not self._adam.state[master]:
                    self._adam.init_state(group, master, *place)
                self._adam.update_step(group, master, *place)

    def _places(self) -> Iterator[tuple[tuple[int, int], dict[str, Any], Tensor]]:
        for number, group in enumerate(self._adam.param_groups):
            for index, master in enumerate(group["params"]):
                yield (number, index), group, master

    @property
    def state_bytes(self) -> int:
        """Bytes of masters and moments; a parameter that is its own master counts as the model's memory."""
        own = [m for name, m in self.masters.items() if m is not self.parameters[name]]
        moments = [value for name, value in self.state().items() if not name.startswith(("master/", "step/"))]
        return sum(local_part(t).numel() * t.element_size() for t in (*own, *moments))

    def zero_grad(self) -> None:
        if self._stay:
            torch._foreach_zero_([master.grad for master in self.masters.values() if master.grad is not None])
            return
        for tensor in (*self.masters.values(), *self._stepped.values()):
            tensor.grad = None

    def collect(self, loss: Tensor) -> None:
        """Compute the gradient and add it in place to tensors that persist, as CUDA graphs require."""
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        used = [(master, grad) for master, grad in zip(self.masters.values(), found, strict=True) if grad is not None]
        sums = []
        for master, _ in used:  # an unused parameter gets no gradient and no weight decay
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            sums.append(master.grad)
        self._stay = True
        torch._foreach_add_(sums, [grad for _, grad in used])

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments, allocated in the first step."""
        each = 1 if self._eight_bit else 4  # bitsandbytes keeps small tensors in 32 bits; they are negligible
        return sum(2 * each * tensor.numel() for tensor in self._stepped.values())

    def state(self) -> dict[str, Tensor]:
        """The full state for bit-equal resume, as flat named tensors; sharded state as DTensors."""
        tensors = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self._adam.state.get(self._stepped[name], {}).items():
                if self._eight_bit and key not in ("step", *_EIGHT_BIT_STATE):
                    continue
                tensor = value.detach() if isinstance(value, Tensor) else torch.tensor(float(value))
                tensors[f"{key}/{name}"] = tensor if key == "step" else _as_shard_like(tensor, master)
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        expected = {name for name in tensors if name.startswith("master/")}
        if expected != {f"master/{name}" for name in self.masters}:
            raise ValueError("the optimizer state belongs to another model")
        if any(name.startswith("state1/") for name in tensors) != self._eight_bit and len(tensors) > len(expected):
            raise ValueError("the optimizer state belongs to another train.optimizer")
        for name, master in self.masters.items():
            self._stepped[name].copy_(_part_for(tensors[f"master/{name}"], master))
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
        if self._eight_bit:
            self._load_eight_bit(tensors)
            return
        for name, master in self.masters.items():
            state = {
                key: _part_for(tensors[f"{key}/{name}"], master).to(master.device).clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}/{name}" in tensors
            }
            if state:
                self._adam.state[self._stepped[name]] = state

    def _load_eight_bit(self, tensors: dict[str, Tensor]) -> None:
        names = {master: name for name, master in self.masters.items()}
        for place, group, master in self._places():
            name = names[master]
            if f"step/{name}" not in tensors:
                continue
            self._adam.init_state(group, master, *place)
            state = self._adam.state[master]
            state["step"] = int(tensors[f"step/{name}"])
            for key in _EIGHT_BIT_STATE:
                if key in state:
                    state[key].copy_(tensors[f"{key}/{name}"])


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor (same memory), or the tensor itself if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_shard_like(part: Tensor, master: Tensor) -> Tensor:
    if not isinstance(master, DTensor):
        return part
    shape = {"shape": master.shape, "stride": master.stride()}
    return DTensor.from_local(part, master.device_mesh, master.placements, run_check=False, **shape)


def _part_for(value: Tensor, master: Tensor) -> Tensor:
    """This rank's part of a saved state, whole or sharded. Step counts are scalars and not sharded."""
    if value.ndim == 0 or isinstance(value, DTensor) or not isinstance(master, DTensor):
        return local_part(value)
    # Every rank has read the whole tensor, so no communication is needed.
    on_device = value.to(master.device)
    return local_part(distribute_tensor(on_device, master.device_mesh, master.placements, src_data_rank=None))


def _make_adam(groups: list[dict[str, Any]], common: dict[str, Any], eight_bit: bool) -> Any:
    if not eight_bit:
        return torch.optim.AdamW(groups, fused=True, **common)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **common)
