"""`shoal make-model`: the tiny demo model, or a random model of a known shape, built on the spot."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.output import say
from shoal.config.fields import nearest
from shoal.errors import ConfigError
from shoal.observability.console import told_on_stderr

SHAPES = ("qwen3-0.6b", "qwen2.5-0.5b", "qwen2.5-7b")


def make_model(*where: str, shape: str | None = None, seed: int = 0) -> None:
    """Build a model: shoal make-model tiny DIR, or shoal make-model DIR --shape qwen3-0.6b.

    Parameters
    ----------
    where
        The word tiny and a folder, or a folder alone together with --shape.
    shape
        qwen3-0.6b, qwen2.5-0.5b or qwen2.5-7b: a random model of that shape.
    seed
        Seed of the weights.
    """
    kind, folder = _kind_and_folder(where, shape)
    if seed < 0:
        raise ConfigError(f"command line: --seed: must be at least 0, not {seed}; leave it out for 0")
    from shoal import api

    with told_on_stderr() as console, console.progress(f"writing {folder}", quiet=True):
        api.make_model(kind, folder, seed)
    say(f"{kind} model written to {folder}")


def _kind_and_folder(where: tuple[str, ...], shape: str | None) -> tuple[str, Path]:
    usage = "write shoal make-model tiny DIR, or shoal make-model DIR --shape qwen3-0.6b"
    if shape is not None and shape not in SHAPES:
        near = nearest(shape, list(SHAPES))
        hint = f"did you mean {near}?" if near else f"known: {', '.join(SHAPES)}"
        raise ConfigError(f"command line: --shape: there is no shape {shape!r}; {hint}")
    if len(where) == 2 and where[0] == "tiny" and shape is None:
        return "tiny", Path(where[1])
    if len(where) == 1 and shape is not None:
        return shape, Path(where[0])
    raise ConfigError(
        f"command line: {' '.join(['make-model', *where])}: a folder and one kind of model are needed; {usage}"
    )
