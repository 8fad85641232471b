"""Learning signals: a killed run and the split layout equal the run in one process."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from support.ports import free_port
from support.teacher_server import teacher_server

from .helpers.processes import WarmPython, wait_until
from .helpers.runs import Run, assert_same_run, assert_trained_once, base_config, fingerprint
from .helpers.split import InOne, compared, split_config, split_run

BONUS = {
    "coef": 0.01,
    "target": 9.0,
    "delta": 0.01,
    "top_fraction": 0.5,
}  # the target is above the maximum entropy, so the coefficient rises
TWO_TURNS = """
from shoal.core.types import Reward
from shoal.envs.base import MultiTurn, ask

class TwoTurns(MultiTurn):
    max_turns = 3
    sees_tokens = True

    def __init__(self, wrong: bool = False):
        self.wrong = wrong

    def tasks(self, split):
        return [ask(f"count from {i}") for i in range(50)]

    async def reply(self, task, messages):
        return "go on" if len(messages) < 4 else None

    def reward(self, task, messages):
        answers = [m for m in messages if m["role"] == "assistant"]
        turns = [float(len(m["content"]) % 3) for m in answers]
        tokens = [[0.0] * (len(m["token_ids"]) - 1) + [r] for m, r in zip(answers, turns)]
        kinds = ["policy", "cross_entropy", "ignore"][: len(turns)]
        hint = f"The sum is {sum(turns)}." if turns[0] else None
        turns *= 1 + self.wrong
        return Reward(parts={"total": sum(turns)}, turns=turns, tokens=tokens, kinds=kinds, hint=hint)

class NoReward(TwoTurns):
    reward = MultiTurn.reward
"""
TURNS = {"env": [{"id": "two_turns.py:TwoTurns"}], "sampling": {"max_tokens": 6}}
SIGNALS: dict[str, dict[str, Any]] = {
    "entropy": {"train": {"loss": {"type": "vespo", "entropy": BONUS}}, "orch": {"advantage": {"std": "mean"}}},
    "turns": {
        "train": {"loss": {"type": "grpo", "context_cross_entropy": 0.1}},
        "orch": {**TURNS, "advantage": {"credit": "return", "discount": 0.9}},
    },
    "tokens": {"orch": {**TURNS, "advantage": {"credit": "token"}}},
    "self": {"train": {"teacher": {"self": True, "tau": 0.1}}, "orch": TURNS},
    "teacher": {"train": {"loss": {"type": "masked"}, "teacher": {"tau": 0.5}}},
    "parts": {"orch": {**TURNS, "advantage": {"per_part": True, "rescale": True}}},
}


def some(*kept: str) -> list[Any]:
    """All kinds of signals. Most of them run only in `make faults`."""
    return [kind if kind in kept else pytest.param(kind, marks=pytest.mark.faults) for kind in SIGNALS]


@pytest.fixture(autouse=True)
def files(tmp_path: Path, raw_model: Path) -> None:
    SIGNALS["teacher"]["train"]["teacher"]["model"] = str(raw_model)
    file = tmp_path / "two_turns.py"
    file.write_text(TWO_TURNS)
    for config in SIGNALS.values():
        if "env" in config.get("orch", {}):
            config["orch"]["env"] = [{"id": f"{file}:TwoTurns"}]


@pytest.mark.parametrize("kind", some("entropy", "self"))
def test_killed_run_continues_with_its_signals(tmp_path: Path, warm: WarmPython, model: Path, kind: str) -> None:
    def run_of(name: str) -> Run:
        config = base_config(model)
        for section, values in SIGNALS[kind].items():
            config[section] |= values
        return Run(tmp_path / name, warm).write(config)

    undisturbed, killed = run_of("undisturbed"), run_of("killed")
    command = undisturbed.grpo()
    assert command.wait() == 0, command.text()
    assert killed.start(kill_at=("written:step_000003.jsonl", 1)).wait() == -9
    command = killed.grpo("--resume")
    assert command.wait() == 0, command.text()
    assert_trained_once(killed, 4)
    assert_same_run(killed, fingerprint(undisturbed))
    if kind == "entropy":
        coefs = [step["policy/entropy_coef"] for step in killed.steps()]
        assert coefs == pytest.approx([0.0, 0.02, 0.03, 0.04])


@pytest.mark.parametrize("kind", some())
def test_two_processes_train_as_one(tmp_path: Path, warm: WarmPython, model: Path, kind: str) -> None:
    """All ranks share the mask, the coefficient and the teacher's log-probs."""
    runs = []
    for count in (1, 2):
        config = base_config(model)
        for section, values in SIGNALS[kind].items():
            config[section] |= values
        config["train"] |= {"gpus": count, "device": "cpu", "max_steps": 2}
        runs.append(Run(tmp_path / str(count), warm).write(config))
        command = runs[-1].grpo()
        assert command.wait() == 0, command.text()
    for one, two in zip(runs[0].steps(), runs[1].steps(), strict=True):
        names = {"policy/loss", "optim/grad_norm", "policy/entropy_coef", "teacher/kl", "teacher/missing_frac"}
        for name in names & one.keys():
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-7), name


def test_rollout_files_contain_turn_fields(tmp_path: Path, warm: WarmPython, model: Path) -> None:
    config = base_config(model)
    config["orch"] |= SIGNALS["turns"]["orch"] | {"max_async_level": 1}
    config["train"] |= SIGNALS["turns"]["train"]
    run = Run(tmp_path / "run", warm).write(config)
    command = run.grpo()
    assert command.wait() == 0, command.text()
    assert_trained_once(run, 4)
    several = [r for r in run.rollouts() if len(r["turn_tokens"]) == 2 and r["advantage"] is not None]
    assert several
    for rollout in several:
        first, second = rollout["turn_tokens"]
        assert len(rollout["turn_rewards"]) == 2 and rollout["kinds"] == ["policy", "cross_entropy"]
        assert [len(turn) for turn in rollout["token_rewards"]] == [first, second]
        assert rollout["reward"] == pytest.approx(sum(rollout["turn_rewards"]))
        assert [len(turn) for turn in rollout["token_advantages"]] == [1, 1]
        if rollout["policy_logprobs"] is not None:  # trained: the reply of the environment has a cross-entropy loss
            assert sum(rollout["loss_mask"]) == len(rollout["token_ids"])
            assert all(value < 0 for value in rollout["policy_logprobs"])


def test_list_of_wrong_length_excludes_its_rollout(tmp_path: Path, warm: WarmPython, model: Path) -> None:
    config = base_config(model)
    config["orch"] |= SIGNALS["turns"]["orch"]
    config["orch"]["env"] = [{**config["orch"]["env"][0], "args": {"wrong": True}}]
    run = Run(tmp_path / "run", warm).write(config)
    command = run.grpo("train.max_steps=1")
    assert command.wait() != 0
    errors = {rollout["error"] for rollout in run.rollouts()}
    assert len(errors) <= 3 and all("turns of the policy" in error for error in errors), errors


@pytest.mark.parametrize("kind", some("turns", "teacher"))
def test_split_equals_one_process(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne, kind: str) -> None:
    with split_run(tmp_path, warm, split_config(model, **SIGNALS[kind])) as run:
        run.start_all()
        assert run.end() == dict.fromkeys(run.processes, 0)
        wanted, found = in_one(**SIGNALS[kind]), compared(run)
        for name, value in wanted.items():
            assert found[name] == value, f"{name} differs"


def distil(raw_model: Path, folder: Path, warm: WarmPython, teacher: dict[str, Any], **orch: Any) -> Run:
    """Distillation from random weights without a reward."""
    config = base_config(raw_model)
    config["train"] |= {"learning_rate": 3e-3, "teacher": {"reward_weight": 0, **teacher}}
    config["orch"] |= {"env": [{"id": f"{folder / 'two_turns.py'}:NoReward", "name": "count"}], **orch}
    return Run(folder / "run", warm).write(config)


def test_distillation_without_rewards(tmp_path: Path, warm: WarmPython, model: Path, raw_model: Path) -> None:
    run = distil(raw_model, tmp_path, warm, {"model": str(model)})
    command = run.grpo("train.max_steps=16")
    assert command.wait() == 0, command.text()
    gaps = [step["teacher/kl"] for step in run.steps()]
    assert sum(gaps[-4:]) < 0.9 * sum(gaps[:4]) and min(gaps) > 0, gaps
    assert all(step["batch/used"] == 16 and step["group/flat"] == 0 for step in run.steps()), "all groups are trained"
    assert all(line["time/teacher"] > 0 for line in run.lines("metrics.jsonl") if line["step"] > 0)
    assert {rollout["raw_reward"] for rollout in run.rollouts()} == {None}


def test_server_scores_equal_local_scores(tmp_path: Path, warm: WarmPython, model: Path, raw_model: Path) -> None:
    runs = []
    with teacher_server(model) as url:
        for name, teacher in (("model", {"model": str(model)}), ("url", {"url": url})):
            (tmp_path / name).mkdir()
            (tmp_path / name / "two_turns.py").write_text(TWO_TURNS)
            runs.append(distil(raw_model, tmp_path / name, warm, teacher))
            command = runs[-1].grpo("train.max_steps=2")
            assert command.wait() == 0, command.text()
    for here, there in zip(runs[0].steps(), runs[1].steps(), strict=True):
        assert here["teacher/kl"] == pytest.approx(there["teacher/kl"], abs=1e-4)
        assert here["optim/grad_norm"] == pytest.approx(there["optim/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_wait_for_a_lost_teacher_is_reported_and_ends_with_a_signal(
    tmp_path: Path, warm: WarmPython, model: Path, raw_model: Path, number: int, code: int
) -> None:
    (tmp_path / "two_turns.py").write_text(TWO_TURNS)
    with teacher_server(model, requests=20) as url:  # a step needs 16
        run = distil(raw_model, tmp_path, warm, {"url": url})
        command = run.start("train.max_steps=3")
        what = f"waiting for the teacher at {url.removesuffix('/v1')}"
        wait_until(lambda: not command.running() or bool(run.events("waiting")), 60, "the report", 0.05)
        wait_until(lambda: not command.running() or what in run.status()["reason"], 10, "the status", 0.05)
        assert command.running(), command.text()
        command.send(number)
        assert command.wait(20) == code, command.text()
    assert "waiting for the teacher" in command.text() and "Traceback" not in command.text()
    status = run.status()
    assert status["state"] == "interrupted" and status["resumable"] and status["step"] == 1
    assert run.checkpoints() == [1]
    with teacher_server(model) as url:
        command = run.grpo("--resume", "train.max_steps=3", f"train.teacher.url={url}")
    assert_trained_once(run, 3)


@pytest.mark.parametrize("wrong", ["tokenizer", "temperature", "two sources", "no prompt_logprobs", "nobody there"])
def test_teacher_that_cannot_work_gives_one_error(
    tmp_path: Path, warm: WarmPython, raw_model: Path, wrong: str
) -> None:
    other = shutil.copytree(raw_model, tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with teacher_server(raw_model, scores=False) as url:
        teacher, orch, key = {
            "tokenizer": ({"model": str(other)}, {}, "train.teacher.model"),
            "temperature": ({"url": url}, {"sampling": {"temperature": 0.5}}, "train.teacher.url"),
            "two sources": ({"url": url, "self": True}, {}, "train.teacher"),
            "no prompt_logprobs": ({"url": url}, {}, "train.teacher.url"),
            "nobody there": ({"url": f"http://127.0.0.1:{free_port()}/v1"}, {"deadline_s": 1}, "train.teacher.url"),
        }[wrong]
        run = distil(raw_model, tmp_path, warm, teacher, **orch)
        command = run.grpo()
        code = command.wait()
    assert code == (3 if wrong == "nobody there" else 2), command.text()
    assert key in command.text() and "Traceback" not in command.text()
