"""AdamW with fp32 masters. The model's own parameters are written in place, so whoever shares them sees the step.

A bf16 parameter loses most small updates to rounding; its master and its gradient sum live here in fp32. An fp32
parameter is its own master. The two moments are fp32, or through bitsandbytes 8 bits with a scale for every 256.
Of a sharded parameter (DTensor) this rank's shard is stepped; the norm to clip by is that of all shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


@dataclass(frozen=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    eight_bit: bool = False  # moments in 8 bits; needs bitsandbytes


# What bitsandbytes keeps of a parameter. Its two maps from codes to numbers are the same for all and not saved.
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
        self._stepped = {name: local_part(master) for name, master in self.masters.items()}  # what Adam is given
        # Decay pulls matrices towards zero; norms and biases have no business there.
        decayed = [t for t in self._stepped.values() if t.ndim >= 2]
        plain = [t for t in self._stepped.values() if t.ndim < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        common = {"lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon}
        self._stay = False  # gradients stay where they lie, for a graph adds to them
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
        """Scale the gradient to at most `max_norm`; returns its norm before. Non-finite gradients stay as they are."""
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
        """One of the sharded parameters; they are all sharded over the same ranks."""
        return next((m for m in self.masters.values() if isinstance(m, DTensor)), None)

    @torch.no_grad()
    def step(self, rate: float, settings: AdamSettings | None = None, norm: Tensor | None = None) -> None:
        """`settings` replace those of the start, from this step on. Where the gradient's `norm` is not finite nothing
        moves and no step is counted, which the device finds out for itself."""
        for group in self._adam.param_groups:
            group["lr"] = rate
            if settings is not None:
                group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.epsilon
                group["weight_decay"] = settings.weight_decay if group["params"][0].ndim >= 2 else 0.0
        for name, master in self.masters.items():
            if isinstance(master, DTensor) and master.grad is not None:
                self._stepped[name].grad = local_part(master.grad)
        if self._eight_bit:
            if norm is not None and not norm.isfinite():  # bitsandbytes has no other way than to wait for it
                return
            self._step_eight_bit()
        else:
            self._adam.found_inf = None if norm is None else (~norm.isfinite()).float()
            self._adam.step()
        shared = [(self.parameters[n], m) for n, m in self.masters.items() if m is not self.parameters[n]]
        if shared:
            torch._foreach_copy_([p for p, _ in shared], [m for _, m in shared])

    def _step_eight_bit(self) -> None:
        """What bitsandbytes' own step does, but without waiting for the device after every parameter."""
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
        """Memory that masters and moments take; a parameter that is its own master counts as the model's."""
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
        """The gradient added where it lies from now on, as a graph needs it; otherwise it comes with the backward."""
        found = torch.autograd.grad(loss, list(self.parameters.values()), allow_unused=True)
        used = [(master, grad) for master, grad in zip(self.masters.values(), found, strict=True) if grad is not None]
        sums = []
        for master, _ in used:  # one that takes no part has no gradient, and is not decayed either
            if master.grad is None:
                master.grad = torch.zeros_like(master)
            sums.append(master.grad)
        self._stay = True
        torch._foreach_add_(sums, [grad for _, grad in used])

    @property
    def moment_bytes(self) -> int:
        """What the first step allocates and keeps."""
        each = 1 if self._eight_bit else 4  # small tensors stay in 32 bits even so; they are small
        return sum(2 * each * tensor.numel() for tensor in self._stepped.values())

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue exactly, as flat named tensors; what is sharded says which shard it is."""
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
            raise ValueError("the optimizer state is of another model")
        if any(name.startswith("state1/") for name in tensors) != self._eight_bit and len(tensors) > len(expected):
            raise ValueError("the optimizer state is of another train.optimizer")
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
    """What this rank holds of a tensor: its shard, in the same memory, or all of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as_shard_like(part: Tensor, master: Tensor) -> Tensor:
    if not isinstance(master, DTensor):
        return part
    shape = {"shape": master.shape, "stride": master.stride()}
    return DTensor.from_local(part, master.device_mesh, master.placements, run_check=False, **shape)


def _part_for(value: Tensor, master: Tensor) -> Tensor:
    """This rank's part of a state that was saved whole or in shards. A step count is a number and belongs to all."""
    if value.ndim == 0 or isinstance(value, DTensor) or not isinstance(master, DTensor):
        return local_part(value)
    # Every rank has read the whole, so nothing is sent.
    on_device = value.to(master.device)
    return local_part(distribute_tensor(on_device, master.device_mesh, master.placements, src_data_rank=None))


def _make_adam(groups: list[dict[str, Any]], common: dict[str, Any], eight_bit: bool) -> Any:
    if not eight_bit:
        return torch.optim.AdamW(groups, fused=True, **common)
    from bitsandbytes.optim import AdamW8bit

    return AdamW8bit(groups, **common)
