"""Messages of the three processes about each other: waits, the process that ended the run, wrong keys."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from shoal import __version__
from shoal.config.infer import InferConfig
from shoal.config.orch import OrchConfig
from shoal.config.problems import Origins
from shoal.config.train import TrainConfig
from shoal.core.errors import ConfigError, DeadlineError
from shoal.rollout.remote.client import WaitReporter
from shoal.split import rendezvous as presences
from shoal.split.rendezvous import COMPONENTS, Rendezvous, RunEnd, ending_of, raise_end

SECTIONS = {
    "infer": (InferConfig, {"model": "m"}),
    "orch": (OrchConfig, {"env": "reverse-text", "model": {"name": "m"}}),
    "train": (TrainConfig, {"model": "m", "max_steps": 4}),
}


def come(folder: Path, component: str, told: list[str] | None = None, **more: object) -> Rendezvous:
    kind, given = SECTIONS[component]
    section = kind.model_validate({**given, "output_dir": str(folder), **more})
    return Rendezvous(component, section, (told if told is not None else []).append)


async def accompany(server: Rendezvous, seconds: float) -> None:
    """Like grpo-infer beside its server."""
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await server.meet(patient=True)
        server.watch("orch", "come back", 0.0)
        await asyncio.sleep(0.01)


def test_departed_process_is_not_reported_as_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It was reported as present ten times a second while it was away."""
    monkeypatch.setattr(presences, "PATIENCE_S", 0.2)
    monkeypatch.setattr("shoal.rollout.remote.client.FIRST_REPORT_S", 0.2)
    monkeypatch.setattr("shoal.split.rendezvous.LOOK_S", 0.01)
    monkeypatch.setattr(presences, "BEAT_S", 0.02)
    told: list[str] = []
    server = come(tmp_path, "infer", told, deadline_s=1e9)
    server.look()
    orchestrator, trainer = come(tmp_path, "orch"), come(tmp_path, "train")
    asyncio.run(accompany(server, 0.3))
    assert told == []
    orchestrator.close()
    asyncio.run(accompany(server, 1.0))
    assert told and all(line.startswith("waiting for grpo-orch") for line in told), told
    assert len(told) <= 3, "with growing intervals"
    back = come(tmp_path, "orch")
    asyncio.run(accompany(server, 0.3))
    assert told[-1] == "grpo-orch responds"
    for meeting in (server, back, trainer):
        meeting.close()


def test_missing_components_are_named_with_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Usually it uses another folder."""
    monkeypatch.setattr("shoal.rollout.remote.client.FIRST_REPORT_S", 0.0)
    told: list[str] = []
    trainer = come(tmp_path, "train", told, deadline_s=0.3)
    with pytest.raises(DeadlineError, match="grpo-infer and grpo-orch, which did not join"):
        asyncio.run(trainer.meet())
    assert {f"waiting for grpo-{name} to join in {tmp_path} (0 s so far)" for name in ("infer", "orch")} <= set(told)
    trainer.close()


def test_forwarded_end_names_its_origin():
    first = RunEnd("train.lora_rank: is 32", 2, "grpo-train")
    with pytest.raises(ConfigError) as first_error:
        raise_end(first)
    with pytest.raises(ConfigError) as passed_on:
        raise_end(RunEnd(*ending_of(first_error.value), "grpo-orch"))
    assert str(passed_on.value) == str(first_error.value) == "grpo-train ended the run: train.lora_rank: is 32"


def test_late_wait_is_reported_at_once():
    told: list[str] = []
    WaitReporter(told.append, lambda: 3.5).report("waiting for grpo-infer")
    WaitReporter(told.append, lambda: 0.5).report("it may pass")
    assert told == ["waiting for grpo-infer"]


def test_mixed_releases_are_refused(tmp_path: Path):
    trainer = come(tmp_path, "train")
    trainer.look()
    for name in ("infer", "orch"):
        section = {**SECTIONS[name][1], "output_dir": str(tmp_path)}
        release = "0.0.9" if name == "orch" else __version__
        about = {"incarnation": name, "beat": 1, "shoal": release, "section": section}
        (trainer.presence.folder / f"{name}.json").write_text(json.dumps(about))
    trainer.peers.look()
    with pytest.raises(ConfigError) as refused:
        trainer.agree()
    assert str(refused.value).startswith(f"grpo-train is Shoal {__version__}, grpo-orch is Shoal 0.0.9; install one")
    assert json.loads((trainer.presence.folder / "train.json").read_text())["shoal"] == __version__
    trainer.close()


@pytest.mark.parametrize("who", COMPONENTS)
def test_key_error_names_the_process(tmp_path: Path, who: str):
    sections = {name: dict(given) for name, (_, given) in SECTIONS.items()}
    sections["orch"]["max_steps"] = 7
    meeting = come(tmp_path, who, **sections[who])
    meeting.look()
    for name in set(COMPONENTS) - {who}:
        about = {"incarnation": name, "beat": 1, "section": {**sections[name], "output_dir": str(tmp_path)}}
        (meeting.presence.folder / f"{name}.json").write_text(json.dumps(about))
    meeting.peers.look()
    origins = Origins({(): f"{who}.yaml:1", (who,): f"{who}.yaml:1"}, default="command line")
    with pytest.raises(ConfigError) as refused:
        meeting.agree(origins)
    place = "orch.yaml:1" if who == "orch" else "grpo-orch"
    assert str(refused.value).startswith(f"{place}: orch.max_steps: is 7 but train.max_steps is 4")
    meeting.close()
