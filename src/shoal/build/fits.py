"""Memory that does not suffice is no bug: it is said as what it is, with settings that need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal.errors import HardwareError, MemoryStop

SMALLER = "a smaller model, adapters (train.lora=true) or a quantised base under them (train.qlora_fp8=true)"


@contextmanager
def starting_with(what: str) -> Iterator[None]:
    """Around what a start keeps on the device for good."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise HardwareError(f"the device has not enough memory for {what}; try {SMALLER}") from error


def within_memory(remedies: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """While training: the newest checkpoint stands."""
    import torch

    try:
        return function(*arguments)
    except torch.OutOfMemoryError as error:
        raise MemoryStop(
            f"the device ran out of memory while training; {remedies}, then resume from the last checkpoint"
        ) from error
