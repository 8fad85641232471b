"""Stateful environments in their processes: tools change the state, the reward sees it, and everything is closed."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, DataError, EpisodeError
from shoal.core.runner import GroupRunner, RunnerSettings
from shoal.core.types import Prompt, Request, RolloutGroup, SamplingParams
from shoal.envs.registry import as_environment, load_environment
from shoal.envs.stateful import BrokenEnvironment, StatefulEnvironment
from shoal.models.chat import Chat
from shoal.models.random_models import character_tokenizer
from shoal.rewards.functions import RewardFunctions
from shoal.rewards.http_judge import HttpJudge
from shoal.rewards.pool import RewardPool
from support.models import TOKENIZER
from support.scripted import ScriptedEngine

from . import stateful_examples
from .stateful_examples import KINDS, Counter

CHAT = Chat(TOKENIZER)
TIMEOUT_S = 1.0


def lengths(completions: Any, environments: Any, **columns: Any) -> list[float]:
    return [10.0 * environments[0].count]


def wrong_length(completions: Any, **columns: Any) -> list[float]:
    return [1.0, 2.0]


class Other:
    """Selected by the column `environment`."""

    def reset(self, **columns: Any) -> str:
        return f"other {sorted(columns)}"

    def wave(self) -> str:
        """Wave."""
        return "hello"


class Slow:
    """Closes slowly."""

    def reset(self) -> str:
        return "go"

    def wait(self) -> str:
        """Wait."""
        time.sleep(0.1)
        return "done"

    def get_reward(self) -> float:
        return 1.0

    def give_up(self) -> None:
        """Give up."""
        raise BrokenEnvironment("no more")

    def close(self) -> None:
        time.sleep(0.5)


ROWS: dict[str, Any] = {"train": [{"prompt": "Go: ", "environment": name, "kind": "plain"} for name in ("a", "b", "c")]}


def make_environments() -> dict[str, StatefulEnvironment]:
    functions = RewardFunctions([lengths], [2.0])
    return {
        "counter": StatefulEnvironment(Counter, name="counter"),
        "wrong": StatefulEnvironment(Counter, name="wrong", functions=RewardFunctions([wrong_length])),
        "mixed": StatefulEnvironment({"a": Counter, "b": Other}, name="mixed", rows=ROWS, functions=functions),
    }


@contextmanager
def started(processes: int = 16) -> Iterator[tuple[RewardPool, dict[str, StatefulEnvironment]]]:
    environments = make_environments()
    pool = RewardPool(environments, timeout_s=5, call_timeout_s=TIMEOUT_S, processes=processes)
    for environment in environments.values():
        environment.pool = pool
    pool.start()
    try:
        yield pool, environments
    finally:
        asyncio.run(pool.close())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    stateful_examples.LOG = tmp_path_factory.mktemp("stateful") / "log"
    stateful_examples.LOG.touch()
    with started() as found:
        yield found


def tool(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(
    world: Any, said: Sequence[str], env: str = "counter", kind: str | int = "plain", size: int = 1
) -> RolloutGroup:
    """Rollouts in which the policy gives these answers, one per turn."""
    runner, prompt = runner_of(world, said, env, kind)
    return asyncio.run(runner.run(prompt, size, SamplingParams(max_tokens=200)))


def runner_of(world: Any, said: Sequence[str], env: str, kind: str | int) -> tuple[GroupRunner, Prompt]:
    pool, environments = world
    index = kind if isinstance(kind, int) else KINDS.index(kind)

    def script(request: Request) -> tuple[str, Any]:
        return said[int(request.request_id.rpartition("/")[2])], "stop"

    runner = GroupRunner(ScriptedEngine(script), environments, pool, CHAT, RunnerSettings(context_tokens=4000))
    return runner, Prompt(env, index, environments[env].tasks("train")[index].messages)


def events() -> list[list[str]]:
    return [line.rsplit(" ", 2) for line in stateful_examples.LOG.read_text().splitlines()]


def count(event: str, limit_s: float = 5.0, expected: int | None = None) -> int:
    """The number of times that it happened. Environments close after their rollouts have ended."""
    deadline = time.monotonic() + limit_s
    while True:
        found = sum(name == event for name, *_ in events())
        if expected is None or found == expected or time.monotonic() > deadline:
            return found
        time.sleep(0.01)


def test_tools_change_the_state_that_the_reward_sees(world: Any) -> None:
    before = count("closed plain")
    said = [tool("add", amount=1) + tool("add_later", amount=2), tool("nothing"), "I am done."]
    group = play(world, said, size=2)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward) == ("ok", 1.0), rollout.error
        assert [m["content"] for m in rollout.messages if m["role"] == "tool"] == [
            "1", '{"count": 3}', "error: there is no tool 'nothing'",
        ]  # fmt: skip
        assert rollout.prompt.messages == [{"role": "user", "content": "Count to 3."}]
        assert len(rollout.turns) == 3
    assert group.max_reward == 1.0
    assert count("closed plain", expected=before + 2) == before + 2


def test_schemas_come_from_type_hints_and_docstrings(world: Any) -> None:
    async def schemas() -> list[dict[str, Any]]:
        environment = world[1]["counter"]
        episode = environment.start(environment.tasks("train")[0])
        async with episode.running(nullcontext):
            return episode.tools

    found = {schema["function"]["name"]: schema["function"] for schema in asyncio.run(schemas())}
    assert set(found) == {"add", "add_later", "finish", "hang", "die", "give_up"}
    assert found["add"]["parameters"] == {
        "type": "object",
        "properties": {"amount": {"type": "integer", "description": "How much to add."}},
        "required": ["amount"],
    }


class Static:
    """A tool may be a static method."""

    keep_env = ("POND_KEY",)

    def reset(self) -> str:
        return "go"

    @staticmethod
    def power(base: int, exponent: int = 2) -> int:
        """Raise a number to a power.

        Args:
            base: The number.
            exponent: The power.
        """
        return int(base**exponent)

    def get_reward(self) -> float:
        return 1.0


def test_static_method_is_a_tool_with_all_its_arguments() -> None:
    environment = StatefulEnvironment(Static)
    opened = environment.live(environment.tasks("train")[0]).open()
    (schema,) = opened["tools"]
    assert schema["function"]["parameters"]["required"] == ["base"]
    assert list(schema["function"]["parameters"]["properties"]) == ["base", "exponent"]


def test_rewards_of_an_environment_keep_the_secrets_that_they_name() -> None:
    """Of each class, and of the functions that score beside it, such as a judge."""
    judge = HttpJudge("http://localhost/score", api_key_var="JUDGE_KEY")
    environment = StatefulEnvironment({"a": Other, "b": Static}, rows=ROWS, functions=RewardFunctions([judge]))
    assert set(environment.keep_env) == {"JUDGE_KEY", "POND_KEY"}


def with_attributes(**attributes: Any) -> type:
    return type("Changed", (Counter,), attributes)


@pytest.mark.parametrize(("first", "second", "found"), [(1.0, 1.0, 1.0), (1.0, 2.0, None), (1.0, None, None)])
def test_highest_reward_of_several_classes(first: float, second: float | None, found: float | None) -> None:
    factories = {"a": with_attributes(max_reward=first), "b": with_attributes(max_reward=second)}
    assert StatefulEnvironment(factories, rows=ROWS).max_reward == found


def test_weights_of_several_classes_are_united() -> None:
    factories = {"a": with_attributes(weights={"x": 2.0, "y": 1.0}), "b": with_attributes(weights={"z": 3.0, "y": 1.0})}
    assert StatefulEnvironment(factories, rows=ROWS).weights == {"x": 2.0, "y": 1.0, "z": 3.0}
    factories["b"] = with_attributes(weights={"x": 3.0})
    with pytest.raises(ConfigError, match="'x'"):
        StatefulEnvironment(factories, rows=ROWS)


def test_each_class_has_its_own_limit_of_turns() -> None:
    made = StatefulEnvironment(
        {"a": with_attributes(max_turns=2), "b": Other, "c": with_attributes(max_turns=5)}, rows=ROWS
    )
    assert [made.max_turns_of(task) for task in made.tasks("train")] == [2, None, 5]
    limited = StatefulEnvironment({"a": with_attributes(max_turns=2), "b": Other, "c": Other}, rows=ROWS, max_turns=3)
    assert [limited.max_turns_of(task) for task in limited.tasks("train")] == [3, 3, 3]


def applies_not(completions: Any, **columns: Any) -> list[None]:
    return [None]


def excludes(completion: str) -> None:
    return None


@pytest.mark.parametrize(
    ("own", "functions", "reward"),
    [
        (0.5, [lengths], {"lengths": 20.0, "Rated": 0.5}),
        ({"speed": 1.0, "style": 2.0}, [lengths], {"lengths": 20.0, "speed": 1.0, "style": 2.0}),
        (None, [lengths], None),
        (0.5, [applies_not], {"Rated": 0.5}),
        (0.5, [excludes], None),
    ],
)
def test_reward_of_an_environment_beside_functions(own: Any, functions: list[Any], reward: Any) -> None:
    class Rated(Static):
        count = 2

        def get_reward(self) -> Any:  # type: ignore[override]
            return own

    scored = RewardFunctions(functions, [1.0])
    environment = StatefulEnvironment(Rated, functions=scored)
    episode = environment.live(environment.tasks("train")[0])
    episode.open()
    assert episode.reward([{"role": "assistant", "content": "ok"}]) == reward


@pytest.mark.parametrize(
    "said, messages, reward",
    [
        ([tool("add", amount="3"), "ok"], ["error: TypeError"], 0.0),  # the error is a message for the model
        ([tool("add", wrong=3), "ok"], ["error: TypeError"], 0.0),
        (
            [tool("add", amount=3), tool("finish") + tool("add", amount=1)],
            ["3", "you reached 3", "the episode is over"],
            1.0,
        ),
        ([tool("add", amount=1)] * 4, ["1", "2", "3"], 1.0),  # max_turns: nothing answers the last turn
    ],
)  # fmt: skip
def test_conversation_continues_and_ends(world: Any, said: list[str], messages: list[str], reward: float) -> None:
    (rollout,) = play(world, said).rollouts
    assert (rollout.status, rollout.reward, len(rollout.turns)) == ("ok", reward, len(said)), rollout.error
    results = [m["content"] for m in rollout.messages if m["role"] == "tool"]
    assert len(results) == len(messages)
    assert all(result.startswith(start) for result, start in zip(results, messages, strict=True))


@pytest.mark.parametrize(
    "kind, said, status, word, closes",
    [
        ("reset raises", "ok", "error", "ValueError: no reset (stateful_examples.py:", True),
        ("reset hangs", "ok", "timeout", "longer than 1 s", True),
        ("reset ends", "ok", "error", "exit code 3", False),
        ("reset returns a number", "ok", "error", "return text or None", True),
        ("reset returns much", "ok", "error", "larger than", False),
        ("plain", tool("hang"), "timeout", "longer than 1 s", True),
        ("plain", tool("die"), "error", "SIGKILL", False),
        ("plain", tool("give_up"), "error", "the board is gone", True),
        ("reward raises", "ok", "error", "no reward", True),
        ("reward hangs", "ok", "timeout", "longer than 1 s", True),
        ("reward is a list", "ok", "error", "of type list, not a number", True),
    ],
)
def test_failure_excludes_only_its_rollout(
    world: Any, kind: str, said: str, status: str, word: str, closes: bool
) -> None:
    """Counted by its status, never scored 0, and closed if its process still can."""
    closed = count(f"closed {kind}")
    (rollout,) = play(world, [said, "ok"], kind=kind).rollouts
    assert (rollout.status, rollout.reward) == (status, None) and word in (rollout.error or "")
    assert count(f"closed {kind}", expected=closed + closes) == closed + closes
    (good,) = play(world, [tool("add", amount=3), "ok"], kind="random").rollouts
    assert (good.status, good.reward) == ("ok", 1.0)


def test_failing_close_loses_no_rollout(caplog: pytest.LogCaptureFixture) -> None:
    with started() as world:
        runner, prompt = runner_of(world, [tool("add", amount=3), "ok"], "counter", "close raises")

        async def main() -> RolloutGroup:
            group = await runner.run(prompt, 3, SamplingParams(max_tokens=200))
            while not caplog.messages:
                await asyncio.sleep(0.01)
            return group

        assert asyncio.run(asyncio.wait_for(main(), 10)).rewards == [1.0] * 3
    (warning,) = caplog.messages
    assert "counter: an environment was not closed properly: ValueError: no close" in warning


def test_hanging_close_ends_with_the_run() -> None:
    began = time.monotonic()
    with started() as world:
        (rollout,) = play(world, [tool("add", amount=3), "ok"], kind="close hangs").rollouts
        assert (rollout.status, rollout.reward) == ("ok", 1.0)
    assert time.monotonic() - began < 6


def test_cancelled_rollout_is_closed(world: Any) -> None:
    """Also while a tool runs, which is interrupted."""
    made, closed = count("made plain"), count("closed plain")

    async def main() -> None:
        runner, prompt = runner_of(world, [tool("hang")], "counter", "plain")
        running = asyncio.create_task(runner.run(prompt, 2, SamplingParams(max_tokens=200)))
        while count("made plain") < made + 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        began = time.monotonic()
        while count("closed plain") < closed + 2:
            assert time.monotonic() - began < 0.8, "the call was not interrupted"
            await asyncio.sleep(0.01)

    asyncio.run(main())


def test_rollout_that_is_cancelled_at_once_gives_no_warning(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The process may not have created its object yet, so there is nothing to close."""

    async def main() -> None:
        runner, prompt = runner_of(world, ["ok"], "counter", "plain")
        for _ in range(3):
            running = asyncio.create_task(runner.run(prompt, 2, SamplingParams(max_tokens=200)))
            for _ in range(4):
                await asyncio.sleep(0)
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        while world[0]._waiting:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 10))
    assert not [record.message for record in caplog.records]


def test_pool_slot_is_held_until_the_environment_is_closed() -> None:
    """Also if the result of the last call arrives after the rollout was cancelled."""

    async def main(pool: RewardPool) -> None:
        opened = asyncio.Event()

        async def rollout() -> None:
            async with pool.environment("slow", "train", 0) as process:
                opened.set()
                await process.call_tools([{"name": "wait", "arguments": {}}])

        running = asyncio.create_task(rollout())
        await opened.wait()
        await asyncio.sleep(0.01)
        time.sleep(0.3)  # the result arrives, but this process does not read it yet
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        began = time.monotonic()
        async with pool.environment("slow", "train", 0):
            assert time.monotonic() - began > 0.4

    pool = RewardPool({"slow": StatefulEnvironment(Slow, name="slow")}, processes=1, call_timeout_s=5)
    pool.start()
    try:
        asyncio.run(main(pool))
    finally:
        asyncio.run(pool.close())


def test_slow_close_does_not_hide_an_error() -> None:
    """The failed call is answered before the environment is closed, so close is no part of its time limit."""

    async def main(pool: RewardPool) -> None:
        async with pool.environment("slow", "train", 0) as process:
            await process.call_tools([{"name": "give_up", "arguments": {}}])

    pool = RewardPool({"slow": StatefulEnvironment(Slow, name="slow")}, processes=1, call_timeout_s=0.4)
    pool.start()
    try:
        with pytest.raises(EpisodeError, match="BrokenEnvironment: no more") as caught:
            asyncio.run(main(pool))
        assert caught.value.score.status == "error"
    finally:
        asyncio.run(pool.close())


def test_all_rollouts_of_a_task_have_the_same_random_numbers(world: Any) -> None:
    first = play(world, ["ok"], kind="random", size=2).rollouts
    again = play(world, ["ok"], kind="random").rollouts
    assert len({rollout.prompt.messages[0]["content"] for rollout in [*first, *again]}) == 1
    assert first[0].turns[0].prompt_ids == again[0].turns[0].prompt_ids
    assert "0." in CHAT.full_text(first[0].turns[0].prompt_ids)


def test_trl_reward_functions_see_the_object(world: Any) -> None:
    """The reward of the environment has the weight 1 beside those of the functions."""
    (rollout,) = play(world, [tool("add", amount=3), "ok"], env="mixed", kind=0).rollouts
    assert rollout.status == "ok" and rollout.parts == {"lengths": 30.0, "Counter": 1.0} and rollout.reward == 61.0
    (other,) = play(world, [tool("wave"), "ok"], env="mixed", kind=1).rollouts
    assert other.prompt.messages[0]["content"] == "Go: other ['kind', 'prompt']"
    assert [m["content"] for m in other.messages if m["role"] == "tool"] == ["hello"]
    (unknown,) = play(world, ["ok"], env="mixed", kind=2).rollouts
    assert unknown.status == "error" and "'c'; there are a, b" in (unknown.error or "")
    (wrong,) = play(world, ["ok"], env="wrong").rollouts
    assert wrong.status == "error" and "wrong_length returned 2 rewards for 1 completions" in (wrong.error or "")


def test_rollouts_wait_for_a_free_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stateful_examples, "LOG", tmp_path / "log")
    phases: list[str] = []

    def phase(name: str) -> Any:
        phases.append(name)
        return nullcontext()

    with started(processes=2) as world:
        runner, prompt = runner_of(world, [tool("add", amount=3), "ok"], "counter", "plain")
        group = asyncio.run(runner.run(prompt, 6, SamplingParams(max_tokens=200), phase))
    assert group.rewards == [1.0] * 6 and phases.count("environment_wait") == 4
    lives = {pid: [float(at) for name, other, at in events() if other == pid] for _, pid, _ in events()}
    assert len(lives) == 6
    for start, _ in lives.values():
        assert sum(first <= start <= last for first, last in lives.values()) <= 2


ENDING = """
import asyncio, os, signal, sys
from contextlib import nullcontext
from pathlib import Path
from shoal.envs import ask
from shoal.envs.registry import as_environment
from shoal.rewards.pool import RewardPool

class Open:
    @staticmethod
    def tasks(split):
        return [ask("go")]
    def reset(self):
        return None
    def list_tools(self):
        return []
    def call_tool(self, name, arguments):
        raise AssertionError
    def get_reward(self):
        return 1.0
    def close(self):
        Path(sys.argv[1]).write_text("closed")

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background commands ignore it
environment = as_environment(Open, "open")
pool = environment.pool = RewardPool({"Open": environment})
pool.start()

async def main():
    async with environment.start(environment.tasks("train")[0]).running(nullcontext):
        os.kill(os.getpid(), int(sys.argv[2]))
        await asyncio.sleep(60)

try:
    asyncio.run(main())
finally:
    asyncio.run(pool.close())
"""


@pytest.mark.parametrize("signal", [2, 9])
def test_environments_close_however_the_run_ends(tmp_path: Path, signal: int) -> None:
    file = tmp_path / "closed"
    ended = subprocess.run([sys.executable, "-c", ENDING, str(file), str(signal)], capture_output=True, timeout=60)
    assert ended.returncode != 0
    deadline = time.monotonic() + 5
    while not file.exists():
        assert time.monotonic() < deadline, ended.stderr.decode()
        time.sleep(0.01)


class NoHints:
    def reset(self) -> None: ...

    def move(self, where):  # type: ignore[no-untyped-def]
        """Move."""


class NoTools:
    def reset(self) -> None: ...


class NoReset:
    def move(self) -> None:
        """Move."""


@pytest.mark.parametrize(
    "kind, words", [(NoHints, "NoHints.move cannot be a tool"), (NoTools, "has no tools"), (NoReset, "no method reset")]
)
def test_unusable_class_gives_one_clear_error(kind: type, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StatefulEnvironment(kind)


def test_schemas_are_made_without_torch(tmp_path: Path) -> None:
    """Reward workers are forked after this, and before torch is imported. The orchestrator never imports torch."""
    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "mover.py").write_text(
        'class Mover:\n    def reset(self): ...\n    def move(self) -> None:\n        "Move."\n'
    )
    script = """
import sys
from shoal.envs.registry import load_environment
load_environment("mover.py:Mover")
from shoal.models.tokenizer import load_tokenizer, torch_left_out
with torch_left_out():
    load_tokenizer(".")
assert "transformers" in sys.modules and "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)


def test_rows_that_cannot_be_used_are_named() -> None:
    with pytest.raises(DataError, match="train item 1: Object of type object"):
        StatefulEnvironment(Other, rows={"train": [{"prompt": "x"}, {"prompt": "x", "image": object()}]})


def test_class_reference_selects_an_environment(tmp_path: Path) -> None:
    environment = load_environment("shoal.envs.openenv:OpenEnv", {"url": "http://127.0.0.1:1"}, "web")
    assert isinstance(environment, StatefulEnvironment) and environment.name == "web"
    assert len(environment.tasks("train")) > len(environment.tasks("eval")) > 0  # `reset` makes them
    with pytest.raises(ConfigError, match="its signature is"):
        load_environment("shoal.envs.openenv:OpenEnv", {"adress": "x"})
    assert not as_environment(Counter, "x").needs_isolation  # type: ignore[attr-defined]
