"""`shoal eval`: the mean reward of a model on the held-out prompts of an environment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from pydantic import ValidationError

from shoal.cli.environments import environment_problem
from shoal.cli.output import say
from shoal.config.check_train import model_problem
from shoal.config.problems import Findings, Origins, show
from shoal.config.yaml_text import Source, parse_yaml
from shoal.errors import ConfigError


def evaluate(
    model: str,
    *,
    env: Annotated[str, Parameter(name="--env")],
    args: Annotated[tuple[str, ...], Parameter(name="--arg", negative=())] = (),
    adapter: str | None = None,
    num_examples: int = 64,
    rollouts_per_example: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 128,
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Score a model on an environment's held-out prompts.

    Parameters
    ----------
    model
        Folder, hub id or GGUF file.
    env
        Id of the environment; `shoal envs` lists them.
    args
        An argument of the environment, key=value; may be repeated.
    adapter
        Folder of a LoRA adapter to put on the model.
    num_examples
        Prompts.
    rollouts_per_example
        Rollouts a prompt.
    temperature
        0 is greedy.
    max_tokens
        Longest completion.
    seed
        Seed of sampling.
    device
        auto, cpu or cuda.
    """
    settings = _checked(env=env, temperature=temperature, max_tokens=max_tokens, seed=seed, device=device,
                        num_examples=num_examples, rollouts_per_example=rollouts_per_example)  # fmt: skip
    findings = Findings()
    for key, problem in (("model", model_problem(model)), ("--env", environment_problem(env))):
        if problem is not None:
            findings.error(key, *problem)
    if adapter is not None and not (Path(adapter).expanduser() / "adapter_config.json").is_file():
        findings.error("--adapter", f"{show(adapter)} holds no adapter_config.json", "name a folder that PEFT wrote")
    findings.raise_errors(Origins(default="command line"))
    env_args = dict(_argument(text) for text in args)
    from shoal import api

    metrics = api.evaluate(model=model, env_args=env_args, adapter=adapter, **settings)
    for name, value in metrics.items():
        say(f"{name}: {value:.4g}")


def _checked(**settings: Any) -> dict[str, Any]:
    """The same ranges as in a configuration file."""
    from shoal.config.orch import EvalConfig, EvalSamplingConfig
    from shoal.config.problems import render
    from shoal.config.schema_errors import problems_from
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
