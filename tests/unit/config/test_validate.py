"""Problems of the schema and of the rules are reported together, without problems that only follow from others."""

from pathlib import Path

import pytest

from shoal.build.load import check_launch
from shoal.config.load import load_run, load_section, load_supervised
from shoal.config.rules import check_section, check_supervised
from shoal.config.schema import SftConfig
from shoal.core.errors import ConfigError

GOOD = ("train.model=m", "train.max_steps=8", "orch.env=arithmetic")
UNEVEN = ("orch.batch_size=8", "orch.rollouts_per_example=3")  # refused by a rule


def refused(*overrides: str) -> list[str]:
    """The keys of the messages, in order."""
    with pytest.raises(ConfigError) as caught:
        load_run(overrides=overrides, rules=check_launch)
    return [line.split(": ")[1] for line in str(caught.value).splitlines()]


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (["train.learning_rate=fast", *UNEVEN], ["train.learning_rate", "orch.rollouts_per_example"]),
        (["train.sedd=3", "orch.env=[{id: aritmetic}]"], ["train.sedd", "orch.env.0.id"]),
        (["infer.port=none", "train.model=./modle"], ["infer.port", "train.model"]),
        (["train.loss={type: grpo, clip_lo: 0.1}", "orch.env=[{id: arithmetic, weight: -1}]", *UNEVEN],
         ["train.loss.clip_lo", "orch.env.0.weight", "orch.rollouts_per_example"]),
        (["orch.sampling.temperature={start: 1}", *UNEVEN],
         ["orch.sampling.temperature.end", "orch.rollouts_per_example"]),
    ],
)  # fmt: skip
def test_all_problems_are_reported_together(overrides: list[str], keys: list[str]):
    assert refused(*GOOD, *overrides) == keys


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.maxsteps=8"], "train.maxsteps"),  # not also: train.max_steps is not set
        (["train.max_steps=many"], "train.max_steps"),
        (["train.max_steps=8", "train.lora=yes", "train.qlora_fp8=true"], "train.lora"),
        (["train.max_steps=8", "orch.batchsize=9", "orch.rollouts_per_example=3"], "orch.batchsize"),
        (["train.max_steps=8", "orch.batch_size=x", "orch.rollouts_per_example=7"], "orch.batch_size"),
        (["train.max_steps=8", "orch.env=[{idd: dataset}]", "orch.dataset={name: a/b}"], "orch.env.0.idd"),
        (["train.max_steps=8", "orch.env=[5]", "orch.dataset={name: a/b}"], "orch.env.0"),
    ],
)
def test_consequences_are_not_reported(overrides: list[str], key: str):
    found = refused("train.model=m", "orch.env=arithmetic", *overrides)
    assert [other for other in found if other != "orch.env.0.id"] == [key]  # a required key is misspelt and missing


def test_missing_environment():
    assert refused("train.max_steps=8") == ["orch", "train.model"]


def test_several_overrides_that_cannot_be_applied():
    with pytest.raises(ConfigError) as caught:
        load_run(overrides=["max_steps=3", "trian.seed=1", *GOOD])
    assert [word in str(caught.value) for word in ("train.max_steps=3", "train.seed")] == [True, True]


def test_one_section():
    with pytest.raises(ConfigError) as caught:
        load_section("infer", None, ["infer.model=m", "infer.port=none", "infer.host=0.0.0.0"], check_section)
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["infer.port", "infer.host"]


def test_section_that_is_not_a_mapping(tmp_path: Path):
    (tmp_path / "run.yaml").write_text("infer: 5\norch: {env: arithmetic}\n")
    with pytest.raises(ConfigError, match="infer: must be a mapping"):
        load_section("infer", str(tmp_path / "run.yaml"), (), check_section)


def test_supervised_run():
    with pytest.raises(ConfigError) as caught:
        load_supervised(SftConfig, None, ["train.model=m", "batch_size=x", "train.ppo_epochs=2"], check_supervised)
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == [
        "dataset",
        "batch_size",
        "train.ppo_epochs",
        "train.max_steps",
    ]


def test_values_of_variables_stay_private(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHOAL_TEST_VALUE", "canary")
    with pytest.raises(ConfigError) as caught:
        load_section("infer", None, ["infer.model=m", "infer.port=${SHOAL_TEST_VALUE}"])
    assert "canary" not in str(caught.value) and "SHOAL_TEST_VALUE" in str(caught.value)
