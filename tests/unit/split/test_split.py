"""What the orchestrator reports about a grpo-infer that does not answer, from the files in the shared folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from shoal.config.infer import InferConfig
from shoal.config.orch import OrchConfig
from shoal.config.schema import RunConfig
from shoal.core.errors import StoppedByPolicy
from shoal.split import rendezvous as presence
from shoal.split.orchestrator import describe_server_state, server_trouble, silent_s
from shoal.split.rendezvous import Rendezvous

PORT = 8123


def run_asking(port: int, folder: Path) -> RunConfig:
    orch = {"env": "reverse-text", "client": {"base_url": f"http://127.0.0.1:{port}/v1"}, "output_dir": str(folder)}
    return RunConfig.model_validate({"train": {"model": "m"}, "infer": {"port": PORT}, "orch": orch})


def test_server_state_descriptions(tmp_path: Path) -> None:
    orch: Any = OrchConfig.model_validate({"env": "reverse-text", "output_dir": str(tmp_path)})
    ours = Rendezvous("orch", orch, lambda _: None)
    right, wrong = run_asking(PORT, tmp_path), run_asking(PORT + 1, tmp_path)
    assert describe_server_state(ours, right) == ("grpo-infer is not running", "start it with shoal grpo-infer")
    theirs = Rendezvous("infer", InferConfig.model_validate({"output_dir": str(tmp_path)}), lambda _: None)
    end = time.monotonic() + 10
    while describe_server_state(ours, right)[0] == "grpo-infer is not running" and time.monotonic() < end:
        time.sleep(0.05)
    assert describe_server_state(ours, right)[0] == "grpo-infer is still loading"
    why, remedy = describe_server_state(ours, wrong)
    wrote = f"its recorded address is http://127.0.0.1:{PORT}/v1"
    assert why == f"grpo-infer is running, but does not answer at this address: {wrote}"
    assert remedy == "check orch.client.base_url"
    assert server_trouble(ours) is None
    theirs.presence.tell(server="its process 5 is stopped")
    end = time.monotonic() + 10
    while server_trouble(ours) is None and time.monotonic() < end:
        time.sleep(0.05)
    assert server_trouble(ours) == describe_server_state(ours, right)[0] == "its process 5 is stopped"
    theirs.close()
    ours.close()


def test_ended_run_is_not_awaited(tmp_path: Path) -> None:
    """Its vLLM is gone: processes that wait for an answer get the reason."""
    orch: Any = OrchConfig.model_validate({"env": "reverse-text", "output_dir": str(tmp_path)})
    ours = Rendezvous("orch", orch, lambda _: None)
    theirs = Rendezvous("infer", InferConfig.model_validate({"output_dir": str(tmp_path)}), lambda _: None)
    theirs.end_all("vLLM was ended by SIGKILL", 3)
    theirs.close()
    time.sleep(0.2)
    with pytest.raises(StoppedByPolicy, match=r"^grpo-infer ended the run: vLLM was ended by SIGKILL$") as caught:
        describe_server_state(ours, run_asking(PORT, tmp_path))
    assert caught.value.exit_code == 3
    ours.close()


def test_silence_requires_an_earlier_heartbeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not joined yet has another message, and one with a heartbeat is not silent."""
    monkeypatch.setattr(presence, "PATIENCE_S", 0.6)
    monkeypatch.setattr(presence, "BEAT_S", 0.05)
    orch: Any = OrchConfig.model_validate({"env": "reverse-text", "output_dir": str(tmp_path)})
    ours = Rendezvous("orch", orch, lambda _: None)
    time.sleep(0.7)
    assert silent_s(ours) == 0
    theirs = Rendezvous("infer", InferConfig.model_validate({"output_dir": str(tmp_path)}), lambda _: None)
    assert silent_s(ours) == 0
    theirs.close()
    time.sleep(0.7)
    assert 0.6 <= silent_s(ours) < 10
    ours.close()
