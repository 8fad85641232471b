"""Example environments of the verifiers releases, unchanged, in their own Pythons, from the endpoint to a rollout.

An engine with scripted answers replaces the model. Endpoint, template, host and environment are real. `make
test-verifiers` installs the packages and runs these tests.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.core.batching import rollout_samples
from shoal.core.errors import ConfigError
from shoal.core.runner import GroupRunner, RunnerSettings
from shoal.core.types import Prompt, Request, Rollout, SamplingParams, Score
from shoal.envs.registry import load_environment
from shoal.models.chat import Chat
from shoal.rollout.endpoint_episodes import EndpointEpisodes
from shoal.server.app import LocalEndpoint
from shoal.server.completions import ServedModel
from support.models import EOS, TOKENIZER, small_model
from support.scripted import Script, ScriptedEngine

pytestmark = [pytest.mark.verifiers, pytest.mark.timeout(180)]
FOLDER = Path(os.environ.get("SHOAL_VERIFIERS", "/nonexistent"))
HERE = Path(__file__).parent


class NoJudge:
    async def score(self, env: str, split: str, index: int, messages: Any) -> Score:
        raise AssertionError("such an environment scores itself")

    async def score_group(self, env: str, split: str, index: int, conversations: Any) -> list[Score]:
        raise AssertionError("such an environment scores itself")

    async def close(self) -> None: ...


def verifiers(line: str, id: str, **settings: Any) -> Any:
    path = [str(FOLDER / "fixtures" / line), str(HERE / "environments")]
    python = str(FOLDER / line / "bin" / "python")
    return load_environment(f"verifiers:{id}", {"python": python, "path": path, **settings})


@pytest.fixture
def made() -> Iterator[list[Any]]:
    environments: list[Any] = []
    yield environments
    for environment in environments:
        environment.close()


def play(environment: Any, script: Script, index: int = 0, size: int = 1) -> tuple[list[Rollout], ScriptedEngine]:
    engine = ScriptedEngine(script)
    chat = Chat(TOKENIZER)
    endpoint = LocalEndpoint(ServedModel(engine, chat, "scripted", 6000))
    settings = RunnerSettings(context_tokens=6000, seed=5)
    runner = GroupRunner(engine, {"env": environment}, NoJudge(), chat, settings, EndpointEpisodes(endpoint))
    prompt = Prompt("env", index, environment.tasks("train")[index].messages)

    async def run() -> list[Rollout]:
        try:
            return (await runner.run(prompt, size, SamplingParams(max_tokens=200))).rollouts
        finally:
            await endpoint.close()

    return asyncio.run(run()), engine


def said(request: Request) -> str:
    return str(TOKENIZER.decode(request.prompt_ids))


def one_sample(rollout: Rollout) -> None:
    """Every turn extends the previous one in exact ids: one sequence, trained on the answers only."""
    (sample,) = rollout_samples(rollout, advantage=1.0)
    trained = [int(i) for i, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
    assert trained == [i for turn in rollout.turns for i in turn.completion.token_ids] and EOS in trained


def test_v1_single_turn(made: list[Any]):
    environment = verifiers("v1", "echo-v1", args={"phrases": ["hello world", "ping", "shoal"]})
    made.append(environment)
    assert environment.version == "0.4.0"
    assert [len(environment.tasks(split)) for split in ("train", "eval")] == [2, 1]
    script = iter(["it is Hello, World!", "no"])
    rollouts, engine = play(environment, lambda _: (next(script), "stop"), size=2)
    assert [rollout.status for rollout in rollouts] == ["ok", "ok"], [rollout.error for rollout in rollouts]
    assert sorted(rollout.reward or 0 for rollout in rollouts) == [0.0, 1.0]
    right = next(rollout for rollout in rollouts if rollout.reward == 1)
    assert right.parts["echoed"] == 1.0 and right.messages[-1]["content"] == "it is Hello, World!"
    assert "exact phrase: hello world" in said(engine.requests[0])
    assert len({request.sampling.seed for request in engine.requests}) == 2, "each rollout has a separate seed"
    one_sample(right)


def test_v1_multi_turn(made: list[Any]):
    environment = verifiers("v1", "echo-user-sim-v1")
    made.append(environment)
    replies = iter(["hello world", "goodbye"])
    (rollout,), engine = play(environment, lambda _: (next(replies), "stop"))
    assert rollout.status == "ok" and rollout.reward == 0.5, rollout.error
    assert len(rollout.turns) == 2 and "goodbye world" in said(engine.requests[1])
    one_sample(rollout)


def test_v1_tools(made: list[Any]):
    environment = verifiers("v1", "counter-tool-v1")
    made.append(environment)

    def bump(request: Request) -> Any:
        called = said(request).count("count=")
        call = '<tool_call>{"name": "counter_bump", "arguments": {}}</tool_call>'
        return (f"step {called}: {call}" if called < 3 else "<answer>done</answer>"), "stop"

    (rollout,), engine = play(environment, bump)
    assert rollout.status == "ok" and rollout.reward == 1.0, (rollout.error, rollout.messages)
    assert len(rollout.turns) == 4 and "count=3" in said(engine.requests[3])
    one_sample(rollout)


@pytest.mark.parametrize(("kind", "turns"), [("single", 1), ("multi", 3)])
def test_v0_single_and_multi_turn(made: list[Any], kind: str, turns: int):
    settings = {"system_prompt": "Be brief."} if kind == "single" else {"max_turns": 5}
    environment = verifiers("v0", "examples-v0", args={"kind": kind, **settings})
    made.append(environment)
    assert environment.version == "0.3.1"
    replies = iter(["It is 4."] if kind == "single" else ["let me see", "nearly", "4, DONE"])
    (rollout,), engine = play(environment, lambda _: (next(replies), "stop"))
    assert rollout.status == "ok" and rollout.reward == 1.0, rollout.error
    assert rollout.parts["says"] == 1.0 and len(rollout.turns) == turns
    assert ("Be brief." in said(engine.requests[0])) == (kind == "single")
    one_sample(rollout)


def test_v0_tools(made: list[Any]):
    environment = verifiers("v0", "examples-v0", args={"kind": "tools", "max_turns": 4})
    made.append(environment)

    def square(request: Request) -> Any:
        if "square_tool" not in said(request):
            return '<tool_call>{"name": "square_tool", "arguments": {"x": 2}}</tool_call>', "stop"
        return "so it is 4", "stop"

    (rollout,), engine = play(environment, square)
    assert rollout.status == "ok" and rollout.reward == 1.0, rollout.error
    assert len(rollout.turns) == 2 and said(engine.requests[1]).rstrip().splitlines()[-2].startswith("4")
    one_sample(rollout)


@pytest.mark.parametrize("kind", ["single", "multi"])
def test_v0_scores_a_group_together(made: list[Any], kind: str):
    """The reward is the rank of the length within the group, plus 1 for an answer that contains 4."""
    environment = verifiers("v0", "examples-v0", args={"kind": kind, "reward": "rank"})
    made.append(environment)
    answers = ["It is 4. DONE", "4 DONE", "I think that it is five. DONE"]
    texts = iter(answers)

    def answer(request: Request) -> Any:
        return (next(texts) if kind == "single" or "more" in said(request) else "more"), "stop"

    rollouts, engine = play(environment, answer, size=3)
    assert [rollout.status for rollout in rollouts] == ["ok"] * 3, [rollout.error for rollout in rollouts]
    found = {rollout.messages[-1]["content"]: rollout for rollout in rollouts}
    assert [found[text].reward for text in answers] == [2.0, 1.0, 2.0]
    assert [(found[text].parts["rank"], found[text].parts["says"]) for text in answers] == [(1, 1), (0, 1), (2, 0)]
    assert {len(rollout.turns) for rollout in rollouts} == {1 if kind == "single" else 2}
    for rollout in rollouts:
        assert rollout.messages[-1]["content"] == rollout.turns[-1].completion.text, "each has a separate session"
        one_sample(rollout)
    assert len({request.sampling.seed for request in engine.requests}) == len(engine.requests)


def test_v0_an_error_of_the_group_is_that_of_all(made: list[Any]):
    environment = verifiers("v0", "examples-v0", args={"kind": "single", "reward": "rank_fails"})
    made.append(environment)
    rollouts, _ = play(environment, lambda _: ("4", "stop"), size=2)
    assert [(rollout.status, rollout.reward) for rollout in rollouts] == [("error", None)] * 2
    assert all("no ranking" in str(rollout.error) for rollout in rollouts)


def test_v0_a_rollout_that_fails_is_not_compared(made: list[Any]):
    """One of three conversations fails: the other two are ranked among themselves."""
    environment = verifiers("v0", "examples-v0", args={"kind": "multi_fails", "reward": "rank"})
    made.append(environment)
    texts = iter(["a DONE", "break", "longer DONE"])
    rollouts, _ = play(environment, lambda _: (next(texts), "stop"), size=3)
    assert sorted(rollout.status for rollout in rollouts) == ["error", "ok", "ok"]
    assert sorted(rollout.parts["rank"] for rollout in rollouts if rollout.scored) == [0.0, 1.0]
    (failed,) = [rollout for rollout in rollouts if not rollout.scored]
    assert "broken" in str(failed.error), failed.error


def test_run_trains_on_one(tmp_path: Path):
    """`shoal grpo` with random weights. The environment rewards the share of letters."""
    model = tmp_path / "model"
    small_model("qwen3").save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    python, path = FOLDER / "v0" / "bin" / "python", [str(FOLDER / "fixtures" / "v0"), str(HERE / "environments")]
    args = {"python": str(python), "path": path, "args": {"kind": "single", "reward": "letters"}}
    config = {
        "train": {"model": str(model), "max_steps": 2, "learning_rate": 1e-3, "output_dir": str(tmp_path / "out")},
        "orch": {"env": [{"id": "verifiers:examples-v0", "args": args}], "batch_size": 8, "rollouts_per_example": 4,
                 "sampling": {"max_tokens": 8}, "seq_len": 256},
    }  # fmt: skip
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shoal", "grpo", str(tmp_path / "run.yaml")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr[-2000:]
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["optim/grad_norm"] > 0 and line["mismatch/k3"] < 1e-9 for line in lines), lines


def test_environment_that_takes_too_long(made: list[Any]):
    environment = verifiers("v0", "examples-v0", args={"kind": "single"}, timeout_s=0.01)
    made.append(environment)
    (rollout,), _ = play(environment, lambda _: ("4", "stop"))
    assert rollout.status == "timeout" and "longer than 0.01 s" in str(rollout.error)


def test_unloadable_environment_gives_one_line():
    with pytest.raises(ConfigError, match=r"verifiers:no-such-env: .*Could not import"):
        verifiers("v0", "no-such-env")
    with pytest.raises(ConfigError, match="verifiers:no-such-env: "):
        verifiers("v1", "no-such-env")
