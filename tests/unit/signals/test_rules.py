"""Keys of learning signals that contradict each other or have no effect are errors, and name the key."""

from __future__ import annotations

import pytest

from shoal.config.load import load_run
from shoal.config.resolve import resolve_run
from shoal.config.rules import check_run


def run(*overrides: str):
    return load_run(overrides=["train.model=m", "train.max_steps=8", "orch.env=arithmetic", *overrides]).config


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["orch.advantage={std: mean, mean: batch}"], "orch.advantage.std"),
        (["orch.advantage={std: mean, eps: 0.1}"], "orch.advantage.eps"),
        (["orch.advantage={rescale: true}"], "orch.advantage.rescale"),
        (["orch.advantage={per_part: true, credit: turn}"], "orch.advantage.per_part"),
        (["orch.advantage={per_part: true}", "orch.reward={scale: 2.0}"], "orch.advantage.per_part"),
        (["orch.advantage={per_part: true}", "orch.truncated=zero"], "orch.advantage.per_part"),
        (["orch.advantage={credit: turn, discount: 0.5}"], "orch.advantage.discount"),
        (["orch.advantage={function: 'a:b', per_part: true}"], "orch.advantage.function"),
        (["train.loss={entropy: {delta: 0.1}}"], "train.loss.entropy.delta"),
        (["train.loss={entropy: {gain: 1.0}}"], "train.loss.entropy.gain"),
        (["train.loss={entropy: {target: 1.0, coef_min: 2.0}}"], "train.loss.entropy.coef_min"),
        (["train.teacher={tau: 1.0}"], "train.teacher"),
        (["train.teacher={model: a, url: 'http://b/v1'}"], "train.teacher"),
        (["train.teacher={self: true, tau: 0.0}"], "train.teacher.tau"),
        (["train.teacher={self: true, served_model: a}"], "train.teacher.served_model"),
        (["train.teacher={model: a}", "train.sharding=fsdp"], "train.sharding"),
        (["train.teacher={url: 'http://b/v1'}", "orch.sampling.temperature=0.7"], "train.teacher.url"),
    ],
)
def test_key_without_effect_is_an_error(overrides: list[str], key: str) -> None:
    assert key in [".".join(map(str, problem.path)) for problem in check_run(run(*overrides)).errors]


def test_teacher_keeps_zero_variance_groups() -> None:
    assert resolve_run(run("train.teacher={self: true}")).orch.groups.uniform == "keep"
    assert resolve_run(run("train.teacher={self: true}", "orch.groups.uniform=skip")).orch.groups.uniform == "skip"
    assert resolve_run(run("orch.advantage.std=mean")).orch.groups.uniform == "refill"
