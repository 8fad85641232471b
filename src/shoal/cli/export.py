"""`shoal export`: a trained model as a folder to publish."""

from __future__ import annotations

from pathlib import Path

from shoal.cli.output import say
from shoal.config.check_train import model_problem
from shoal.errors import ConfigError
from shoal.observability.console import told_on_stderr
from shoal.observability.weights import find_weights


def export(source: str, folder: str, *, adapter: str | None = None, checkpoint: str | None = None) -> None:
    """Write a folder that transformers load: an adapter merged into its base, the tokenizer, a model card.

    Parameters
    ----------
    source
        Run directory, checkpoint, adapter or model.
    folder
        Where to write; made if it does not exist.
    adapter
        Adapter to merge into a model.
    checkpoint
        Which one of a run directory: a step, best, newest or final.
    """
    weights = find_weights(source, adapter=adapter, checkpoint=checkpoint)
    problem = model_problem(weights.model) or _missing(weights.model)
    if problem is not None:
        raise ConfigError(f"command line: source: {problem[0]}; {problem[1]}")
    from shoal import api

    with told_on_stderr() as console, console.progress(f"writing {folder}", quiet=True):
        api.export(source, Path(folder), adapter=adapter, checkpoint=checkpoint)
    merged = " with its adapter merged" if weights.adapter else ""
    say(f"{folder}: {weights.model}{merged}, ready to load and to publish")


def _missing(model: str) -> tuple[str, str] | None:
    """An export is of what is here: a name that is no path is looked up among the models that were loaded before."""
    if Path(model).expanduser().exists():
        return None
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return None
    return f"{model!r} is neither a folder nor a model that was loaded here before", "check the path"
