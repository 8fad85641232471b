"""The split layout with real processes equals the run in one process, for any start order and any killed process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port

from .helpers.processes import WarmPython
from .helpers.runs import Run, assert_trained_once, each
from .helpers.split import COMPONENTS, InOne, SplitRun, compared, split_config, split_run, with_changes

EXAMPLES = Path(__file__).parents[2] / "examples" / "grpo"
STEPS = 4
KILLED = -9
LORA = {"lora": True, "lora_rank": 4, "learning_rate": 2e-3, "lora_dropout": 0.1}
NOISE = {"noise_scheduler": {"enabled": True, "num_stages": 2, "sigma_start": 0.02, "sigma_end": 0.01}}
Place = tuple[str, int]


def finish(run: SplitRun, wanted: dict[str, Any]) -> None:
    assert run.end() == dict.fromkeys(run.processes, 0)
    assert run.status()["state"] == "finished"
    assert_trained_once(run, STEPS)
    found = compared(run)
    for name, value in wanted.items():
        assert found[name] == value, f"{name} differs"


@pytest.mark.parametrize("kind", ["full", "lora", "noise", "evaluated"])
def test_split_equals_one_process(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kind: str):
    changes: dict[str, Any] = {
        "full": {},
        "lora": {"train": LORA},
        "noise": {"train": NOISE, "orch": {"eval": {"interval": 2, "num_examples": 2}}},
        "evaluated": {"orch": {"eval": {"interval": 2, "num_examples": 2}}},
    }[kind]
    served = {"infer": {"enable_lora": True, "max_lora_rank": 4}} if kind == "lora" else {}
    with split_run(tmp_path, warm, with_changes(split_config(model, **changes), served)) as run:
        run.start_all()
        finish(run, in_one(**changes))
        weights = sorted(path.name for path in (run.path / "weights").iterdir())
        assert weights == ["v000003", "v000004"], "the newest two are kept"
        files = {path.name for path in (run.path / "weights" / "v000004").iterdir()}
        assert ("adapter_model.safetensors" in files) == (kind == "lora")
        assert ("model.safetensors" in files) == (kind != "lora"), "only adapters are transferred"


def test_weights_over_connections(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """Calls over TCP and weights over gloo, as NCCL does between GPUs."""
    ways = {"rollout_transport": {"type": "tcp"}, "weight_broadcast": {"type": "nccl"}}
    with split_run(tmp_path, warm, split_config(model, train=ways)) as run:
        run.start_all()
        finish(run, in_one())
        assert not (run.path / "weights").exists()


def test_adapters_over_connections(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    config = split_config(model, train=LORA | {"weight_broadcast": {"type": "nccl"}})
    with split_run(tmp_path, warm, with_changes(config, {"infer": {"enable_lora": True, "max_lora_rank": 4}})) as run:
        run.start_all()
        finish(run, in_one(train=LORA))


def test_components_start_in_any_order(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """Each component starts when the previous one reports that it waits."""

    def check(order: tuple[str, ...]) -> None:
        with split_run(tmp_path / "-".join(order), warm, split_config(model)) as run:
            for component in order:
                command = run.start_one(component)
                file = run.path / "handshake" / f"{component}.json"
                _until(lambda: file.exists() or not command.running())  # noqa: B023
            finish(run, in_one())

    in_one()
    each([("orch", "train", "infer"), ("train", "infer", "orch"), ("infer", "orch", "train")], check)


def _until(done: Callable[[], bool]) -> None:
    from .helpers.processes import wait_until

    wait_until(done, 30, "a process to show itself", 0.01)


KILLS: list[tuple[str, Place]] = [
    ("train", ("service:save", 1)),
    ("infer", ("weights:arrived", 3)),
    ("orch", ("checkpoint:files", 1)),
]
MORE_KILLS: list[tuple[str, Place]] = [
    ("train", ("service:learned", 1)),
    ("train", ("service:answered:learn", 3)),
    ("train", ("publish:exported", 4)),
    ("infer", ("engine:turn", 6)),
    ("orch", ("appended:journal.jsonl", 3)),
    ("train", ("service:answered:load", 1)),
    ("train", ("service:learn", 1)),
    ("train", ("service:learned", 3)),
    ("train", ("publish:exported", 1)),
    ("train", ("service:answered:save", 1)),
    ("infer", ("engine:turn", 1)),
    ("infer", ("weights:arrived", 1)),
    ("orch", ("appended:journal.jsonl", 1)),
    ("orch", ("folder:synced", 1)),
]


@pytest.mark.parametrize("kills", [KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.faults)], ids=["some", "more"])
def test_killed_component_returns(
    tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kills: list[tuple[str, Place]]
):
    """Killed at a named place and restarted: every step once, and the weights of an undisturbed run."""
    wanted = in_one()

    def check(case: tuple[str, Place]) -> None:
        victim, place = case
        name = f"{victim}-{place[0].replace(':', '-')}-{place[1]}"
        with split_run(tmp_path / name, warm, split_config(model)) as run:
            run.start_all(kill_at={victim: place})
            assert run.processes[victim].wait() == KILLED, "the place was reached"
            run.start_one(victim, *(["--resume"] if victim == "orch" else []))
            finish(run, wanted)

    each(kills, check)


def test_trainer_restarts_on_the_same_port(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """The orchestrator is killed before the first checkpoint, so the next one makes the trainer start over."""
    ways = {"weight_broadcast": {"type": "nccl", "port": free_port()}}
    with split_run(tmp_path, warm, split_config(model, train=ways)) as run:
        run.start_all(kill_at={"orch": ("appended:journal.jsonl", 1)})
        assert run.processes["orch"].wait() == KILLED
        run.start_one("orch", "--resume")
        finish(run, in_one())


def test_killed_one_after_the_other(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    places: dict[str, Place] = {
        "train": ("service:learned", 1), "infer": ("engine:turn", 6), "orch": ("appended:journal.jsonl", 3)
    }  # fmt: skip
    with split_run(tmp_path, warm, split_config(model)) as run:
        run.start_all(kill_at=places)
        for victim in ("train", "infer", "orch"):
            assert run.processes[victim].wait() == KILLED
            if victim == "orch":  # started with the first command: the folder is used, and the other processes continue
                forgetful = run.start_one(victim)
                assert forgetful.wait() == 2 and "already holds a run; continue it with --resume" in forgetful.text()
            run.start_one(victim, *(["--resume"] if victim == "orch" else []))
        finish(run, in_one())


@pytest.mark.parametrize("absent", COMPONENTS)
def test_component_that_never_joins_ends_the_run(tmp_path: Path, warm: WarmPython, model: Path, absent: str):
    config = split_config(model)
    config["train"]["deadline_s"] = config["orch"]["deadline_s"] = 2.0
    with split_run(tmp_path, warm, config) as run:
        run.start_all(*(name for name in COMPONENTS if name != absent))
        codes = run.end(30)
        assert codes == dict.fromkeys(codes, 3)
        for command in run.processes.values():
            assert f"for grpo-{absent}" in command.text(), "each names the process that it waited for"


def test_remote_server_is_named_by_its_written_address(tmp_path: Path, warm: WarmPython, model: Path):
    """orch.client.base_url has a wrong port: grpo-infer runs, but nothing answers at this address."""
    config = split_config(model)
    port, wrong = config["infer"]["port"], free_port()
    config["train"]["deadline_s"] = config["orch"]["deadline_s"] = 12.0
    config["orch"]["client"] = {"base_url": f"http://127.0.0.1:{wrong}/v1"}
    with split_run(tmp_path, warm, config) as run:
        run.start_all()
        assert run.end(40) == dict.fromkeys(COMPONENTS, 3)
        said = run.processes["orch"].text()
        assert f"its recorded address is http://127.0.0.1:{port}/v1; check orch.client.base_url" in said
        assert f"waiting for the inference server at http://127.0.0.1:{wrong} since" in said
        assert "Error:" not in said and "Connect call" not in said
        assert "grpo-infer responds\n" not in said


@pytest.mark.parametrize(("victim", "place"), [("train", ("service:learn", 2)), ("infer", ("engine:turn", 4))])
def test_component_that_does_not_return_ends_the_run(
    tmp_path: Path, warm: WarmPython, model: Path, victim: str, place: Place
):
    config = split_config(model)
    config["train"]["deadline_s"] = config["orch"]["deadline_s"] = 8.0
    with split_run(tmp_path, warm, config) as run:
        run.start_all(kill_at={victim: place})
        codes = run.end(40)
        assert codes == {**dict.fromkeys(COMPONENTS, 3), victim: KILLED}
        status = run.status()
        assert status["state"] == "stopped" and status["resumable"]
        asked = {"train": "grpo-train", "infer": "the inference server"}[victim]
        assert asked in status["reason"]
        assert any(asked in event["message"] for event in run.events("waiting")), "it reported the wait"


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("infer", {"model": "another"}, "infer.model"),
        ("orch", {"max_steps": 9}, "max_steps"),
        ("orch", {"seq_len": 64}, "seq_len"),
        ("train", {"lora": True, "lora_rank": 32}, "max_lora_rank"),
    ],
)
def test_contradictions_end_all_components(
    tmp_path: Path, warm: WarmPython, model: Path, raw_model: Path, section: str, changes: dict[str, Any], words: str
):
    if "model" in changes:
        changes = {"model": str(raw_model)}
    config = split_config(model, **{section: changes})
    if "lora" in changes:
        config["infer"] |= {"enable_lora": True, "max_lora_rank": 8}
    with split_run(tmp_path, warm, config) as run:
        run.start_all()
        codes = run.end(40)
        assert codes == dict.fromkeys(COMPONENTS, 2)
        for command in run.processes.values():
            last = command.text().strip().splitlines()[-1]
            assert last.startswith("shoal: error:") and words in last
        assert not (run.path / "status.json").exists(), "there was no run"


def test_quickstart_files_run_as_three_commands(tmp_path: Path, warm: WarmPython, model: Path):
    """Unchanged except for the model, the recipe, sizes and a free port. All three use ./outputs."""
    for file in EXAMPLES.glob("*.yaml"):
        shutil.copy(file, tmp_path / file.name)
    port = free_port()
    own = {
        "infer": [f"infer.model={model}", f"infer.port={port}"],
        "orch": [f"orch.model.name={model}", f"orch.client.base_url=http://127.0.0.1:{port}/v1"],
        "train": [f"train.model={model}", "train.recipe=fp32", "train.max_steps=4"],
    }
    own["orch"] += ["orch.batch_size=8", "orch.rollouts_per_example=4", "orch.max_steps=4"]
    commands = {
        name: warm.start([f"grpo-{name}", f"{name}.yaml", *own[name]], tmp_path, output=tmp_path / f"{name}.txt")
        for name in COMPONENTS
    }
    try:
        codes = {name: command.wait() for name, command in commands.items()}
    finally:
        for command in commands.values():
            command.kill()
    assert codes == dict.fromkeys(COMPONENTS, 0), {name: command.text()[-2000:] for name, command in commands.items()}
    run = Run(tmp_path, warm, "outputs")
    assert_trained_once(run, 4)
    assert [step["noise/sigma"] > 0 for step in run.steps()] == [False, True, True, True]
    assert (run.path / "final" / "adapter_config.json").exists()
