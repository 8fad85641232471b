"""The catalogue of shapes: named layouts of devices, parallelism and precision, for whoever asks by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """`settings` are keys of the train section."""

    name: str
    summary: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def device(self) -> str:
        return str(dict(self.settings)["device"])


def _layout(name: str, summary: str, **settings: Any) -> Layout:
    return Layout(name, summary, tuple(settings.items()))


LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        _layout("cpu-fp32", "one process on the CPU, fp32", device="cpu", recipe="fp32"),
        _layout("cpu-bf16", "one process on the CPU, bf16: half the memory, slower", device="cpu", recipe="bf16"),
        _layout("1xgpu-bf16", "one GPU, bf16 weights with fp32 masters", device="cuda", gpus=1, recipe="bf16"),
        _layout("1xgpu-fp32", "one GPU, fp32 throughout", device="cuda", gpus=1, recipe="fp32"),
    )
}
