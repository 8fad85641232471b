"""AdamW with fp32 masters. The model's own parameters are written in place, so whoever shares them sees the step.

A bf16 parameter loses most small updates to rounding; its master and its gradient sum live here in fp32. An fp32
parameter is its own master.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class AdamSettings:
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.01


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
        # Decay pulls matrices towards zero; norms and biases have no business there.
        decayed = [m for m in self.masters.values() if m.ndim >= 2]
        plain = [m for m in self.masters.values() if m.ndim < 2]
        groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=0.0,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            fused=True,
        )

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
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        if not grads:
            return torch.zeros(())
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale)
        return norm

    @torch.no_grad()
    def step(self, rate: float, settings: AdamSettings | None = None) -> None:
        """`settings` replace those of the start, from this step on."""
        for group in self._adam.param_groups:
            group["lr"] = rate
            if settings is not None:
                group["betas"], group["eps"] = (settings.beta1, settings.beta2), settings.epsilon
                group["weight_decay"] = settings.weight_decay if group["params"][0].ndim >= 2 else 0.0
        self._adam.step()
        shared = [(self.parameters[n], m) for n, m in self.masters.items() if m is not self.parameters[n]]
        if shared:
            torch._foreach_copy_([p for p, _ in shared], [m for _, m in shared])

    def zero_grad(self) -> None:
        for master in self.masters.values():
            master.grad = None

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue exactly, as flat named tensors."""
        tensors = {f"master/{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self._adam.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value.detach()
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: dict[str, Tensor]) -> None:
        expected = {name for name in tensors if name.startswith("master/")}
        if expected != {f"master/{name}" for name in self.masters}:
            raise ValueError("the optimizer state is of another model")
        for name, master in self.masters.items():
            master.copy_(tensors[f"master/{name}"])
            if master is not self.parameters[name]:
                self.parameters[name].copy_(master)
            state = {
                key: tensors[f"{key}/{name}"].to(master.device).clone()
                for key in ("step", "exp_avg", "exp_avg_sq")
                if f"{key}/{name}" in tensors
            }
            if state:
                self._adam.state[master] = state
