"""`shoal eval`: score a model, checkpoint, adapter or run on held-out prompts of an environment, or compare two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from pydantic import ValidationError

from shoal.build.load import environment_problem
from shoal.cli.output import notices, say
from shoal.config.model_names import model_problem
from shoal.config.problems import Findings, Origins
from shoal.config.yaml_text import Source, parse_yaml
from shoal.core.errors import ConfigError
from shoal.runs.files import storage
from shoal.runs.weight_files import Weights, find_weights
from shoal.watch.text import count

if TYPE_CHECKING:
    from shoal.build.evaluate import Scores


def evaluate(
    model: str,
    *,
    env: Annotated[str, Parameter(name="--env")],
    args: Annotated[tuple[str, ...], Parameter(name="--arg", negative=())] = (),
    adapter: str | None = None,
    checkpoint: str | None = None,
    against: str | None = None,
    num_examples: int = 64,
    rollouts_per_example: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int = 0,
    device: str = "auto",
    out: str | None = None,
) -> None:
    """Score a model on an environment's held-out prompts.

    Parameters
    ----------
    model
        Folder, hub id, GGUF file, adapter, checkpoint or run directory.
    env
        Id of the environment; `shoal envs` lists them.
    args
        An argument of the environment, key=value; may be repeated.
    adapter
        Folder of a LoRA adapter to apply to the model.
    checkpoint
        Which one of a run directory: a step, best, newest or final.
    against
        A second model, scored on the same prompts; the difference is paired by prompt.
    num_examples
        Number of prompts.
    rollouts_per_example
        Rollouts per prompt.
    temperature
        0 is greedy.
    max_tokens
        Maximum tokens of a completion.
    seed
        Seed of sampling.
    device
        auto, cpu or cuda.
    out
        New folder for the answers and metrics, which `shoal show` and `shoal report` read. With --against: two folders
        in it, `first` and `second`.
    """
    settings = _checked(env=env, temperature=temperature, max_tokens=max_tokens, seed=seed, device=device,
                        num_examples=num_examples, rollouts_per_example=rollouts_per_example)  # fmt: skip
    models = [find_weights(model, adapter=adapter, checkpoint=checkpoint)]
    models += [find_weights(against)] if against is not None else []
    findings = Findings()
    problems = [("model", model_problem(models[0].model)), ("--env", environment_problem(env))]
    problems += [("--against", model_problem(other.model)) for other in models[1:]]
    for key, problem in problems:
        if problem is not None:
            findings.error(key, *problem)
    findings.raise_errors(Origins(default="command line"))
    folders = _new_folders(out, len(models))
    env_args = dict(_argument(text) for text in args)
    _locate(models)
    if temperature == 0 and rollouts_per_example > 1:
        notices(["--temperature: at 0 all rollouts of a prompt are equal; set a value above 0"])
    _score(models, env_args, settings, folders)


def _new_folders(out: str | None, count: int) -> list[Path]:
    if out is None:
        return []
    path = Path(out)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"command line: --out: {out} exists and is not an empty folder; name another one")
    with storage(f"create {path}"):
        path.mkdir(parents=True, exist_ok=True)  # before the answers are sampled, which would be lost
    return [path] if count == 1 else [path / "first", path / "second"]


def _locate(models: list[Weights]) -> None:
    """Look for the files, and name the argument in errors, such as a hub id that is not in the cache."""
    from shoal.models.tokenizer import check_found

    for key, weights in zip(("model", "--against"), models, strict=False):
        check_found(f"command line: {key}", weights.model)


def _score(models: list[Weights], env_args: dict[str, Any], settings: dict[str, Any], folders: list[Path]) -> None:
    from shoal.build.evaluate import EvalTask, score
    from shoal.config.orch import EvalConfig, EvalSamplingConfig

    sampling = EvalSamplingConfig(**{name: settings[name] for name in ("temperature", "max_tokens", "seed")})
    evaluation = EvalConfig(
        num_examples=settings["num_examples"],
        rollouts_per_example=settings["rollouts_per_example"],
        sampling=sampling,
    )
    task = EvalTask(settings["env"], evaluation, env_args, settings["device"])
    scored = score(models, task, folders)
    for line in _table([weights.adapter or weights.model for weights in models], scored):
        say(line)
    if len(scored) == 2:
        gap = scored[0].minus(scored[1])
        say(f"first - second: {gap} over {count(gap.prompts, 'prompt')}, paired; {_verdict(gap.low, gap.high)}")
    for folder in folders:
        say(f"answers: shoal show {folder}, or shoal report {folder}")


def _table(names: list[str], scored: Sequence[Scores]) -> list[str]:
    """A column per model. Intervals are at 95 %, with prompts as the unit."""
    prompts = [str(next(iter(scores.estimates().values())).prompts) for scores in scored]
    rows = {"": names, "prompts": prompts}
    for key in scored[0].estimates():
        rows[key] = [str(scores.estimates()[key]) for scores in scored]
    for key in dict.fromkeys(key for scores in scored for key in scores.metrics):
        rows[key] = [f"{scores.metrics[key]:.4g}" if key in scores.metrics else "–" for scores in scored]
    widths = [max(map(len, column)) for column in (rows, *zip(*rows.values(), strict=True))]
    lines = [[key, *cells] for key, cells in rows.items()]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _verdict(low: float, high: float) -> str:
    if low > 0 or high < 0:
        return f"the {'first' if low > 0 else 'second'} is better"
    return "the difference is not statistically significant"


def _checked(**settings: Any) -> dict[str, Any]:
    """Check the same ranges as in a configuration file."""
    from shoal.config.orch import EvalConfig, EvalSamplingConfig
    from shoal.config.problems import problems_from, render
    from shoal.config.train import TrainConfig

    for section, names in (
        (EvalConfig, ("num_examples", "rollouts_per_example")),
        (EvalSamplingConfig, ("temperature", "max_tokens", "seed")),
        (TrainConfig, ("device",)),
    ):
        data = {name: settings[name] for name in names}
        try:
            section.model_validate(data)
        except ValidationError as error:
            raise ConfigError(render(problems_from(error, section, data), Origins(default="command line"))) from None
    return dict(settings)


def _argument(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"command line: --arg {text}: write key=value")
    return key, parse_yaml(value, Source(f"command line: --arg {key}", has_lines=False), {}).value
