"""Commands that write files or print tables: init, export, make-model, demo, shapes, config-reference, schema."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.config.model_names import model_problem, shape_of, shape_problem
from shoal.config.reference import SCHEMA_LINE, reference_page, schema_file
from shoal.config.schema import LAYOUTS, SECTIONS
from shoal.core.errors import ConfigError, StorageError
from shoal.runs.weight_files import find_weights
from shoal.watch.console import stderr_console

EXAMPLES = "examples_data"


def init(folder: str) -> None:
    """Write the example configurations into a folder. Existing files are not overwritten.

    Parameters
    ----------
    folder
        Target folder; created if it does not exist.
    """
    target = Path(folder)
    wanted = {target / name: text for name, text in with_schemas(example_files()).items()}
    existing = [path for path in wanted if path.exists()]
    if target.is_file() or existing:
        raise ConfigError(f"command line: {existing[0] if existing else target}: already exists; use another folder")
    try:
        for path, text in wanted.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{target}: cannot be written: {error.strerror}") from error
    for path in wanted:
        say(str(path))
    grpo = target / "grpo"
    say(f"try: shoal grpo --train {grpo}/train.yaml --infer {grpo}/infer.yaml --orch {grpo}/orch.yaml --dry-run")


def example_files() -> dict[str, str]:
    """Path in the examples folder → text."""
    root = files("shoal") / EXAMPLES
    return {
        path: entry.read_text(encoding="utf-8") for path, entry in _walk(root, "") if path.endswith((".yaml", ".md"))
    }


def with_schemas(examples: dict[str, str]) -> dict[str, str]:
    """The examples with the line that names their schema for editors, and the schema files, which work offline."""
    found: dict[str, str] = {}
    for path, text in examples.items():
        folder, _, file = path.rpartition("/")
        name = file.removesuffix(".yaml")
        if folder == "grpo" and name in SECTIONS:
            schema, schema_text = schema_file(name)
            text = f"{SCHEMA_LINE}{schema}\n{text}"
            found[f"{folder}/{schema}"] = schema_text
        found[path] = text
    return found


def _walk(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        path = f"{prefix}{entry.name}"
        found += _walk(entry, f"{path}/") if entry.is_dir() else [(path, entry)]
    return found


def export(source: str, folder: str, *, adapter: str | None = None, checkpoint: str | None = None) -> None:
    """Write a folder that transformers can load: weights with the adapter merged, tokenizer, model card.

    Parameters
    ----------
    source
        Run directory, checkpoint, adapter or model.
    folder
        Target folder; created if it does not exist.
    adapter
        Adapter to merge into a model.
    checkpoint
        Checkpoint of a run directory: a step, best, newest or final.
    """
    weights = find_weights(source, adapter=adapter, checkpoint=checkpoint)
    problem = model_problem(weights.model) or _missing(weights.model)
    if problem is not None:
        raise ConfigError(f"command line: source: {problem[0]}; {problem[1]}")
    from shoal import api

    with stderr_console() as console, console.progress(f"writing {folder}", quiet=True):
        api.export(source, Path(folder), adapter=adapter, checkpoint=checkpoint)
    merged = " with its adapter merged" if weights.adapter else ""
    say(f"{folder}: {weights.model}{merged}, ready to load and to publish")


def _missing(model: str) -> tuple[str, str] | None:
    """The problem if the model is neither a local folder nor in the hub cache."""
    if Path(model).expanduser().exists():
        return None
    if shape_of(model) is not None:
        return f"{model!r} has no files", "train a folder that `shoal make-model DIR --shape NAME` wrote"
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return None
    return f"{model!r} is neither a folder nor a model in the hub cache", "check the path"


def make_model(*where: str, shape: str | None = None, seed: int = 0) -> None:
    """Build a model: shoal make-model tiny DIR, or shoal make-model DIR --shape qwen3-0.6b.

    Parameters
    ----------
    where
        The word tiny and a folder, or a folder alone together with --shape.
    shape
        A random model of that shape, such as qwen3-0.6b, gemma-3-4b or gpt-oss-20b.
    seed
        Seed of the weights.
    """
    kind, folder = _kind_and_folder(where, shape)
    if seed < 0:
        raise ConfigError(f"command line: --seed: must be at least 0, not {seed}")
    from shoal import api

    with stderr_console() as console, console.progress(f"writing {folder}", quiet=True):
        api.make_model(kind, folder, seed)
    say(f"{kind} model written to {folder}")


def _kind_and_folder(where: tuple[str, ...], shape: str | None) -> tuple[str, Path]:
    usage = "write shoal make-model tiny DIR, or shoal make-model DIR --shape qwen3-0.6b"
    if shape is not None and (problem := shape_problem(shape)):
        raise ConfigError(f"command line: --shape: {problem[0]}; {problem[1]}")
    if len(where) == 2 and where[0] == "tiny" and shape is None:
        return "tiny", Path(where[1])
    if len(where) == 1 and shape is not None:
        return shape, Path(where[0])
    raise ConfigError(
        f"command line: {' '.join(['make-model', *where])}: needs a folder and one kind of model; {usage}"
    )


def demo(folder: Annotated[str, Parameter(name="--dir")] = "outputs/demo", seed: int = 1) -> None:
    """Build a tiny model, train it with SFT, then with GRPO on reverse-text.

    Parameters
    ----------
    folder
        Target folder.
    seed
        Seed of the model, the data and the run.
    """
    if seed < 0:
        raise ConfigError(f"command line: --seed: must be at least 0, not {seed}")
    from shoal.demo import run_demo

    run_demo(Path(folder), seed)


def shapes() -> None:
    """List the shapes: named combinations of device and precision for shoal.recipes."""
    width = max(len(name) for name in LAYOUTS)
    for layout in LAYOUTS.values():
        keys = ", ".join(f"train.{key}={value}" for key, value in layout.settings)
        say(f"{layout.name:<{width}}  {layout.summary} ({keys})")
    say("")
    say("Default: bf16 on a GPU, fp32 on a CPU.")


def config_reference() -> None:
    """Print every configuration key with its default and meaning, as Markdown."""
    print(reference_page(), end="")


def schema(name: Literal["run", "train", "infer", "orch", "sft", "dpo"] = "run") -> None:
    """Print the JSON schema of a configuration file, for editors.

    Parameters
    ----------
    name
        The file: run (all three sections), train, infer, orch, sft or dpo.
    """
    print(schema_file(name)[1], end="")
