"""A loss is one declaration: validation, documentation and the recipe's config objects are derived from its class."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from pydantic import TypeAdapter, ValidationError

from shoal.core.batching import AGGREGATIONS
from shoal.core.losses import BUILT_IN, GRPO, LOSSES, Aggregation, CustomLoss, Loss, LossConfig, Masked

LOSS = TypeAdapter(LossConfig)
EVERY_PARAMETER = {name: info for loss in BUILT_IN for name, info in loss.parameters().items()}


def refused(given: dict) -> list[str]:
    """The keys that are refused for this content of `train.loss`."""
    try:
        LOSS.validate_python(given)
    except ValidationError as error:
        return [str(item["loc"][-1]) for item in error.errors()]
    return []


@pytest.mark.parametrize("name", LOSSES)
def test_parameter_of_another_loss_is_refused(name: str) -> None:
    for parameter, info in EVERY_PARAMETER.items():
        value = info.default if info.default is not None else 1.5
        known = parameter in LOSSES[name].parameters()
        assert known or refused({"type": name, parameter: value}) == [parameter]


def test_without_a_type_the_loss_is_masked_and_nulls_are_dropped() -> None:
    assert LOSS.validate_python({}) == Masked()
    older = {"type": "grpo", "clip_low": 0.1, "clip_high": None, "tau_pos": None, "args": None}
    assert LOSS.validate_python(older) == GRPO(clip_low=0.1)
    correction = {"type": "none", "cap": None, "floor": None, "level": None}
    assert LOSS.validate_python({"correction": correction}) == Masked()


def test_ppo_is_grpo() -> None:
    assert LOSSES["ppo"] is GRPO and LOSS.validate_python({"type": "ppo"}).type == "grpo"


def test_user_function_takes_arguments() -> None:
    loss = LOSS.validate_python({"type": "my.code:f", "args": {"a": 1}})
    assert isinstance(loss, CustomLoss) and loss.args == {"a": 1}
    assert refused({"type": "my.code:f", "clip_low": 0.2}) == ["clip_low"]
    assert refused({"type": "grpo", "args": {"a": 1}}) == ["args"]


def test_flags() -> None:
    def those(holds) -> set[str]:
        return {loss.choice() for loss in BUILT_IN if holds(loss)}

    assert len(BUILT_IN) == 12
    assert those(lambda loss: loss.takes_kl) == {
        "grpo", "reinforce", "importance_sampling", "gspo", "cispo", "sapo", "vespo",
    }  # fmt: skip
    assert those(lambda loss: not loss.takes_correction) == {"reinforce", "decoupled", "masked", "dppo"}
    assert those(lambda loss: loss.needs_old) == {"gspo", "decoupled", "vespo"}
    assert those(lambda loss: not loss.uses_ratio) == {"dro", "masked"}
    assert those(lambda loss: loss.default_advantage_std == "none") == {"masked"}
    assert those(lambda loss: loss().default_aggregation != "token-mean") == {"gspo"}
    assert Masked(ratio_type="sequence").default_aggregation == "seq-mean-token-mean"
    assert Aggregation.__args__ == AGGREGATIONS


@pytest.mark.parametrize(
    ("name", "given", "parameter"),
    [
        ("grpo", {"clip_low": 1.5}, "clip_low"),
        ("grpo", {"clip_low": 0.0}, "clip_low"),
        ("grpo", {"clip_high": 0.0}, "clip_high"),
        ("grpo", {"clip_low": math.nan}, "clip_low"),
        ("grpo", {"clip_low": True}, "clip_low"),
        ("grpo", {"clip_low": "a lot"}, "clip_low"),
        ("dapo", {"dual_clip": 1.0}, "dual_clip"),
        ("reinforce", {"ratio": "off"}, "ratio"),
        ("importance_sampling", {"ratio_high": 0.5}, "ratio_high"),
        ("importance_sampling", {"ratio_low": 1.0, "ratio_high": 1.0}, "ratio_high"),
        ("masked", {"token_mask_low": 9.0}, "token_mask_low"),
        ("masked", {"geo_mask_low": 1.0, "geo_mask_high": 1.0}, "geo_mask_high"),
        ("masked", {"sequence_clip_high": 5.0}, "sequence_clip_high"),
        ("decoupled", {"cap": 0.5}, "cap"),
        ("grpo", {"correction": {"type": "icepop", "level": "token"}}, "level"),
        ("grpo", {"correction": {"type": "icepop", "cap": 0.5}}, "cap"),
        ("grpo", {"correction": {"cap": 3.0}}, "cap"),
    ],
)
def test_values_that_cannot_work_are_refused(name: str, given: dict, parameter: str) -> None:
    assert refused({"type": name, **given}) == [parameter]
    with pytest.raises(ValueError, match=parameter):
        LOSSES[name](**given)


def test_valid_parameters_are_accepted() -> None:
    assert refused({"ratio_type": "sequence", "sequence_clip_high": 5.0}) == []
    assert refused({"ratio_type": "token", "sequence_clip_high": 10.0}) == []  # the default, as in config.yaml
    assert refused({"type": "cispo", "ratio_low": 1.0}) == []


@pytest.mark.parametrize("loss", BUILT_IN)
def test_declaration_is_complete(loss: type[Loss]) -> None:
    assert loss.choice() == loss().type and loss.summary()
    assert all(info.description for info in loss().parameters().values())


ONE_MORE = '''
class Halved(Loss):
    """half of REINFORCE"""

    takes_kl = True
    type: Literal["halved"] = "halved"
    share: float = Field(default=0.5, gt=0, le=1, description="What is left of the loss.")

    def __call__(self, inputs, w=None):
        return TokenLoss(inputs.masked(weigh(-self.share * inputs.advantages * inputs.policy_logprobs, w)))


'''
WITH_ONE_MORE = f"""
import importlib.util, sys
spec = importlib.util.find_spec("shoal.core.losses")
source = open(spec.origin, encoding="utf-8").read()
assert source.count("\\nBUILT_IN: ") == 1 and source.count(" SAPO,\\n)") == 1
source = source.replace("\\nBUILT_IN: ", {ONE_MORE!r} + "\\nBUILT_IN: ").replace(" SAPO,\\n)", " SAPO, Halved,\\n)")
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
exec(compile(source, spec.origin, "exec"), module.__dict__)

from shoal.config.rules import check_run
from shoal.config.load import load_run
from shoal.config.reference import reference_page
from shoal.config.resolve import as_data, resolve_run
from shoal.core.errors import ConfigError

def run(*overrides):
    return load_run(overrides=["train.model=m", "train.max_steps=8", "orch.env=arithmetic", *overrides]).config

# configuration: defaults, bounds, the parameter of no other loss, what may be combined with it
config = run("train.loss={{type: halved, kl: {{beta: 0.1}}, correction: {{type: tis}}}}")
assert check_run(config).errors == []
assert as_data(resolve_run(config))["train"]["loss"]["share"] == 0.5
refused = {{"{{type: halved, share: 2}}": "share", "{{type: grpo, share: 1}}": "halved"}}
refused["{{type: havled}}"] = "`halved`"
for wrong, says in refused.items():
    try:
        run(f"train.loss={{wrong}}")
    except ConfigError as error:
        assert says in str(error), error
    else:
        raise AssertionError(wrong)
# documentation
page = reference_page()
assert "| `halved` | `share` | number > 0, <= 1 | `0.5` | What is left of the loss. |" in page
assert "| `halved` | half of REINFORCE | yes | yes | `token-mean` |" in page
assert "torch" not in sys.modules
# recipe
from shoal.recipes.rl_loop import Config, DeployConfig, HalvedConfig
from shoal.recipes.config import KEYS, translate
rest = dict(log_path="out", base_model="m", dataset="org/rows", deployment=DeployConfig("m"))
translated, _ = translate(Config(policy_loss="halved", halved=HalvedConfig(share=0.25), **rest))
assert translated.train.loss.share == 0.25 and translated.train.loss.correction.type == "tis"
assert KEYS["halved.share"].to == "train.loss.share"
# training
import torch
from shoal.core.loss_inputs import LossInputs
from shoal.build.model import make_objective
row = torch.tensor([-1.0, -2.0])
inputs = LossInputs(row, row, row, torch.tensor([True, True]), torch.ones(2), torch.zeros(2, dtype=torch.long), 1)
assert make_objective(translated.train)(inputs, torch.ones(2))[0].item() == 0.75
print("one file")
"""


def test_new_loss_touches_one_file() -> None:
    """A class in losses.py alone can be configured, documented, checked and trained."""
    result = subprocess.run([sys.executable, "-c", WITH_ONE_MORE], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.strip() == "one file"
