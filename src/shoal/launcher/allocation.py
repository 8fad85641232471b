"""The grammar of `allocation_mode`: `backend[.|:]dims` joined by `+` (separate devices) or `|` (shared ones).

`sglang.d1p1t1+d1p1t1` or `vllm:d2t1|fsdp:d2`. Dims are d (data), p (pipeline), t (tensor), c (context), e (expert) with
their counts. What cannot be done is refused by its letter; what comes out are values for `infer` and `train`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

ENGINES = ("embedded", "vllm", "sglang")
TRAINERS = ("fsdp",)
NAMES = {"d": "data", "p": "pipeline", "t": "tensor", "c": "context", "e": "expert"}
EXAMPLES = "embedded:d1|fsdp:d1 or sglang.d1p1t1+d1p1t1"
_PART = re.compile(r"(?:(?P<backend>[A-Za-z][A-Za-z_-]*)[.:])?(?P<dims>(?:[a-z]\d+)+)\Z")


class AllocationError(ValueError):
    """What is wrong with an allocation, as the rest of a sentence that begins with `allocation_mode:`."""


@dataclass(frozen=True)
class Part:
    backend: str | None
    dims: dict[str, int] = field(default_factory=dict)

    def __getitem__(self, letter: str) -> int:
        return self.dims.get(letter, 1)


@dataclass(frozen=True)
class Allocation:
    engine: str
    replicas: int
    tensor_ranks: int
    gpus: int  # that train

    def schema_values(self, *, starts_server: bool = True) -> dict[str, Any]:
        values: dict[str, Any] = {"infer.engine": self.engine, "train.gpus": self.gpus}
        if self.gpus > 1:  # the trainer's backend is fsdp, named or not; one device has nobody to share with
            values["train.sharding"] = "fsdp"
        if self.engine != "embedded" and starts_server:  # training may share its device
            values |= {"infer.dp": self.replicas, "infer.tp": self.tensor_ranks, "infer.gpu_memory_utilization": 0.5}
        return values

    @property
    def without_server(self) -> str:
        """The allocation that needs no server."""
        return works_everywhere(self.gpus)


def works_everywhere(gpus: int) -> str:
    return f"allocation_mode=embedded:d{gpus}|fsdp:d{gpus}"


def parse_allocation(text: Any) -> Allocation:
    if not isinstance(text, str) or not text.strip():
        raise AllocationError(f"needs backend and dimensions, as {EXAMPLES}")
    separators = re.findall(r"[+|]", text)
    parts = [_part(piece.strip()) for piece in re.split(r"[+|]", text)]
    if len(parts) > 2:
        raise AllocationError(f"{text!r} has {len(parts)} parts; write one for the engine and one for training")
    engine, trainer = _roles(parts, text)
    _check_trainer(trainer)
    return _combine(engine, trainer, shared=separators != ["+"])


def _part(piece: str) -> Part:
    found = _PART.match(piece)
    if found is None:
        raise AllocationError(f"{piece!r} is not backend and dimensions; write it as {EXAMPLES}")
    backend = found["backend"]
    if backend is not None and backend not in (*ENGINES, *TRAINERS):
        raise AllocationError(f"there is no backend {backend!r}; there are {', '.join((*ENGINES, *TRAINERS))}")
    pairs = re.findall(r"([a-z])(\d+)", found["dims"])
    letters = [letter for letter, _ in pairs]
    for letter, count in pairs:
        if letter not in NAMES:
            raise AllocationError(f"{piece!r} has no dimension {letter!r}; there are {', '.join(NAMES)}")
        if letters.count(letter) > 1 or int(count) < 1:
            raise AllocationError(f"{piece!r}: {letter} must stand once, with a count of at least 1")
    return Part(backend, {letter: int(count) for letter, count in pairs})


def _roles(parts: list[Part], text: str) -> tuple[Part, Part]:
    """Which part samples and which trains. One alone does both, with the embedded engine unless it names another."""
    if len(parts) == 1:
        (only,) = parts
        if only.backend in ("vllm", "sglang"):
            raise AllocationError(f"{text!r} does not say where training runs; write {text}+d1")
        return Part("embedded", only.dims), Part("fsdp", only.dims)
    engines = [part for part in parts if part.backend in ENGINES]
    trainers = [part for part in parts if part.backend not in ENGINES]
    if len(engines) != 1:
        raise AllocationError(f"{text!r} needs one part for the engine ({', '.join(ENGINES)}) and one for training")
    return engines[0], trainers[0]


def _check_trainer(part: Part) -> None:
    for letter in "ptce":
        if part[letter] > 1:
            raise AllocationError(
                f"{letter}{part[letter]}: the trainer has no {NAMES[letter]} parallelism; use {letter}1 and more d"
            )


def _combine(engine: Part, trainer: Part, *, shared: bool) -> Allocation:
    gpus, name = trainer["d"], engine.backend or "embedded"
    works = works_everywhere(gpus)
    if name != "embedded":
        return _beside_server(engine, gpus, shared=shared)
    for letter in "ptce":
        if engine[letter] > 1:
            raise AllocationError(f"{letter}{engine[letter]}: the embedded engine does not split a model; use {works}")
    if engine["d"] != gpus:
        raise AllocationError(
            f"the embedded engine samples where training runs, but d is {engine['d']} and {gpus}; use {works}"
        )
    return Allocation(name, engine["d"], engine["t"], gpus)


def _beside_server(engine: Part, gpus: int, *, shared: bool) -> Allocation:
    name = engine.backend or ""
    for letter in "pce":
        if engine[letter] > 1:
            raise AllocationError(f"{letter}{engine[letter]}: {name} has d and t here; use {letter}1 and more t")
    if shared and engine["d"] * engine["t"] != gpus:
        raise AllocationError("parts joined by | share their devices, so both need the same number")
    if gpus > 1:
        raise AllocationError(
            f"d{gpus}: beside {name} the launcher trains in one process; use d1, or `shoal grpo --layout split` for "
            f"more (docs/layouts.md), or {works_everywhere(gpus)}"
        )
    return Allocation(name, engine["d"], engine["t"], gpus)
