"""`shoal demo`: what `make demo` runs, a tiny model trained end to end on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.errors import ConfigError


def demo(folder: Annotated[str, Parameter(name="--dir")] = "outputs/demo", seed: int = 1) -> None:
    """Build a tiny model, warm it up, and improve it with GRPO on reverse-text.

    Parameters
    ----------
    folder
        Where everything is written.
    seed
        Seed of the model, the data and the run.
    """
    if seed < 0:
        raise ConfigError(f"command line: --seed: must be at least 0, not {seed}; leave it out for 1")
    from shoal import api

    api.demo(Path(folder), seed)
