"""Settings that `shoal eval` derives: the chat template of an adapter, and whether rewards must be isolated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shoal.build.evaluate import EvalTask, evaluation_config, score
from shoal.config.orch import EvalConfig, EvalSamplingConfig
from shoal.envs.code_tools import CodeTools
from shoal.rewards.isolation import why_not
from shoal.runs.weight_files import Weights
from support.folders import write_model

SETTINGS = EvalConfig(num_examples=2, sampling=EvalSamplingConfig(max_tokens=4))


class Programs(CodeTools):
    """Runs code written by the model."""

    def reset(self, **columns: Any) -> str:
        return "go"

    def get_reward(self) -> float:
        return 0.5


def test_adapter_is_evaluated_with_its_chat_template(tmp_path: Path):
    def template(adapter: Path | None) -> str | None:
        folder = None if adapter is None else str(adapter)
        return evaluation_config("base", "arithmetic", {}, folder, SETTINGS, "cpu").orch.chat_template

    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    assert template(tmp_path) is None and template(None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert template(tmp_path) == str(tmp_path / "chat_template.jinja")


@pytest.mark.skipif(why_not() is not None, reason="this machine cannot isolate rewards")
def test_code_tools_are_isolated(tmp_path: Path):
    model = str(write_model(tmp_path / "model"))
    (scores,) = score([Weights(model)], EvalTask(f"{__name__}:Programs", SETTINGS, device="cpu"))
    assert scores.by_prompt == {0: [0.5], 1: [0.5]}
