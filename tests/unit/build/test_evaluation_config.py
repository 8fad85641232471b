"""What `shoal eval` finds out by itself: the chat template of an adapter."""

from __future__ import annotations

from pathlib import Path

from shoal.build.evaluate import evaluation_config
from shoal.config.orch import EvalConfig, EvalSamplingConfig

SETTINGS = EvalConfig(num_examples=2, sampling=EvalSamplingConfig(max_tokens=4))


def test_an_adapter_is_evaluated_with_its_chat_template(tmp_path: Path):
    def template(adapter: Path | None) -> str | None:
        folder = None if adapter is None else str(adapter)
        return evaluation_config("base", "arithmetic", {}, folder, SETTINGS, "cpu").orch.chat_template

    (tmp_path / "adapter_config.json").write_text('{"r": 4}')
    assert template(tmp_path) is None and template(None) is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert template(tmp_path) == str(tmp_path / "chat_template.jinja")
