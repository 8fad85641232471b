"""Groups of scored rollouts: possible behaviours of environments, rewards and engines, and the resulting rollouts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from shoal.core.advantages import RewardShape
from shoal.core.batching import rollout_samples
from shoal.core.errors import ConfigError, EngineError
from shoal.core.protocols import Environment, RolloutEngine
from shoal.core.runner import GroupRunner, RunnerSettings, rollout_seed
from shoal.core.types import (
    EpisodeResult,
    FinishReason,
    Message,
    Prompt,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
    Task,
)
from shoal.envs import MultiTurn, SingleTurn, answer_of, ask
from shoal.models.chat import Chat
from shoal.rewards.pool import RewardPool
from shoal.rollout.embedded import EmbeddedRolloutEngine
from shoal.rollout.endpoint_episodes import EndpointEpisodes
from shoal.server.app import LocalEndpoint
from shoal.server.completions import ServedModel
from support.engines import make_engine
from support.models import EOS, TOKENIZER, small_decoder
from support.scripted import Script, ScriptedEngine

CHAT = Chat(TOKENIZER)
KINDS = ("plain", "none", "raises", "hangs", "not a number", "start raises", "long")


class Dying(ScriptedEngine):
    """Fails the first request and never answers the others."""

    async def generate(self, request: Request) -> Any:
        self.requests.append(request)
        if len(self.requests) == 1:
            raise EngineError("it died")
        await asyncio.sleep(60)


class Desk(SingleTurn):
    """Scores an answer by its length, unless the task requests a failure."""

    name = "desk"

    def tasks(self, split: str) -> list[Task]:
        return [ask("x" * (300 if kind == "long" else 5), kind=kind, split=split) for kind in KINDS]

    def start(self, task: Task) -> Any:
        if task.data["kind"] == "start raises":
            raise ValueError("no chair")
        return super().start(task)

    def reward(self, task: Task, messages: Sequence[Message]) -> Any:
        kind = task.data["kind"]
        if kind == "raises":
            raise RuntimeError("no pen")
        if kind == "hangs":
            time.sleep(60)
        special = {"none": None, "not a number": float("nan")}
        return special.get(kind, {"length": float(len(answer_of(messages)))})


class Echo(MultiTurn):
    """Repeats the answer twice. A task may make it fail at the second answer."""

    name = "echo"
    max_turns = 3

    def tasks(self, split: str) -> list[Task]:
        return [ask("go", fails=False), ask("go", fails=True)]

    async def reply(self, task: Task, messages: Sequence[Message]) -> str:
        if task.data["fails"] and len(messages) > 3:
            raise KeyError("lost")
        return f"You said {answer_of(messages)}."

    def reward(self, task: Task, messages: Sequence[Message]) -> float:
        return float(len(messages))


class Ranked(SingleTurn):
    """Ranks the answers of a group by their length."""

    name = "ranked"

    def tasks(self, split: str) -> list[Task]:
        return [ask("write"), ask("fail")]

    def reward_group(self, task: Task, group: Sequence[Sequence[Message]]) -> list[float]:  # type: ignore[override]
        if task.messages[0]["content"] == "fail":
            raise RuntimeError("no ranking")
        lengths = sorted(len(answer_of(messages)) for messages in group)
        return [float(lengths.index(len(answer_of(messages)))) for messages in group]


ENVIRONMENTS: dict[str, Environment] = {"desk": Desk(), "echo": Echo(), "ranked": Ranked()}


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    made = RewardPool(ENVIRONMENTS, workers=2, timeout_s=0.5)
    made.start()
    yield made
    asyncio.run(made.close())


def always(text: str, reason: Any = "stop") -> Script:
    return lambda request: (text, reason)


def play(
    engine: RolloutEngine,
    pool: RewardPool,
    prompt: Prompt,
    size: int = 1,
    sampling: SamplingParams | None = None,
    **settings: Any,
) -> RolloutGroup:
    made = RunnerSettings(**{"context_tokens": 256, **settings})
    runner = GroupRunner(engine, ENVIRONMENTS, pool, CHAT, made)
    return asyncio.run(runner.run(prompt, size, sampling or SamplingParams(max_tokens=32)))


def desk(kind: str, **fields: Any) -> Prompt:
    return Prompt("desk", KINDS.index(kind), [], **fields)


def test_rollout_that_ends_the_run_cancels_the_others(pool: RewardPool) -> None:
    """Another rollout would send requests to a closed engine."""

    async def main() -> None:
        runner = GroupRunner(Dying(always("")), ENVIRONMENTS, pool, CHAT, RunnerSettings(context_tokens=256))  # type: ignore[arg-type]
        with pytest.raises(EngineError, match="it died"):
            await runner.run(desk("plain"), 3, SamplingParams(max_tokens=32))
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(main())


def test_group_of_scored_rollouts(pool: RewardPool) -> None:
    engine = ScriptedEngine(lambda request: ("ab" * int(request.request_id.split("/")[-2]), "stop"), version=3)
    group = play(engine, pool, desk("plain", epoch=1, attempt=2), size=3)
    assert group.version == 3 and group.rewards == [0, 2, 4]
    for i, rollout in enumerate(group.rollouts):
        assert (rollout.status, rollout.index, rollout.rollout_id) == ("ok", i, f"desk/0/1/2/{i}")
        assert rollout.raw_reward == rollout.reward == 2 * i and rollout.parts == {"length": 2.0 * i}
        assert rollout.messages[-1] == {"role": "assistant", "content": "ab" * i}
        assert rollout.turns[0].prompt_ids == CHAT.prompt_ids(Desk().tasks("train")[0].messages)
        assert rollout.turns[0].completion.token_ids[-1] == EOS and rollout.reward_s >= 0


@pytest.mark.parametrize(
    ("kind", "status", "error"),
    [
        ("none", "excluded", None),
        ("raises", "error", "no pen"),
        ("hangs", "timeout", ""),
        ("not a number", "error", "nan"),
        ("start raises", "error", "ValueError: no chair"),
        ("long", "error", "of 256 context tokens"),
    ],
)
def test_failures_are_counted_and_never_scored(kind: str, status: str, error: str | None, pool: RewardPool) -> None:
    group = play(ScriptedEngine(always("answer")), pool, desk(kind), size=2)
    for rollout in group.rollouts:
        assert (rollout.status, rollout.reward, rollout.raw_reward) == (status, None, None)
        assert not rollout.scored
        if error:
            assert rollout.error is not None and error in rollout.error
    assert group.rewards == []


def test_group_is_scored_when_complete(pool: RewardPool) -> None:
    """A ranking needs the other answers. A failed rollout is excluded from it."""

    def script(request: Any) -> tuple[str, Any] | Exception:
        index = int(request.request_id.split("/")[-2])
        return RuntimeError("lost") if index == 1 else ("x" * (10 - index), "stop")

    group = play(ScriptedEngine(script), pool, Prompt("ranked", 0, []), 4)
    assert [r.raw_reward for r in group.rollouts] == [2.0, None, 1.0, 0.0]
    assert [r.status for r in group.rollouts] == ["ok", "error", "ok", "ok"]


class Tournament:
    """Plays the rollouts of a group together at the endpoint, each in its own session, and ranks their lengths."""

    name = "tournament"

    def tasks(self, split: str) -> list[Task]:
        return [ask("write"), ask("fail"), ask("hang"), ask("one fails")]

    async def play(self, task: Task, base_url: str, model: str) -> EpisodeResult:
        raise AssertionError("its rollouts are made together")

    async def play_group(self, task: Task, sessions: Sequence[tuple[str, str]]) -> list[EpisodeResult]:
        async with aiohttp.ClientSession() as http:
            lengths = [await self._length(http, task, *session) for session in sessions]
        kind = task.messages[0]["content"]
        if kind != "write" and kind != "one fails":
            raise TimeoutError("too slow") if kind == "hang" else RuntimeError("no ranking")
        results = [EpisodeResult(float(sorted(lengths).index(length)), {"length": length}) for length in lengths]
        return [*results[:-1], EpisodeResult(None, error="lost")] if kind == "one fails" else results

    async def _length(self, http: aiohttp.ClientSession, task: Task, base_url: str, model: str) -> int:
        body = {"model": model, "messages": task.messages}
        async with http.post(f"{base_url}/chat/completions", json=body) as response:
            return len((await response.json())["choices"][0]["message"]["content"])


def compete(index: int) -> list[Rollout]:
    texts = iter(["aa", "a", "aaaa"])
    engine = ScriptedEngine(lambda _: (next(texts), "stop"))
    endpoint = LocalEndpoint(ServedModel(engine, CHAT, "scripted", 256))
    player = EndpointEpisodes(endpoint)
    environments: Any = {"tournament": Tournament()}
    runner = GroupRunner(engine, environments, RewardPool({}), CHAT, RunnerSettings(context_tokens=256), player)

    async def run() -> list[Rollout]:
        try:
            return (await runner.run(Prompt("tournament", index, []), 3, SamplingParams(max_tokens=32))).rollouts
        finally:
            await endpoint.close()

    rollouts = asyncio.run(run())
    assert [len(rollout.turns) for rollout in rollouts] == [1] * 3
    assert len({request.sampling.seed for request in engine.requests}) == 3
    return rollouts


def test_environment_at_the_endpoint_scores_a_group_together() -> None:
    rollouts = compete(0)
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0, 2.0]
    assert [rollout.parts["length"] for rollout in rollouts] == [2, 1, 4]
    assert [rollout.turns[0].completion.text for rollout in rollouts] == ["aa", "a", "aaaa"]


@pytest.mark.parametrize(
    ("index", "statuses", "error"),
    [
        (1, ["error"] * 3, "RuntimeError: no ranking"),
        (2, ["timeout"] * 3, "too slow"),
        (3, ["ok", "ok", "error"], "lost"),
    ],
)
def test_endpoint_failures_are_excluded(index: int, statuses: list[str], error: str) -> None:
    rollouts = compete(index)
    assert [rollout.status for rollout in rollouts] == statuses
    assert {rollout.error for rollout in rollouts if rollout.status != "ok"} == {error}
    assert [rollout.scored for rollout in rollouts] == [status == "ok" for status in statuses]


def test_error_of_the_call_excludes_the_group(pool: RewardPool) -> None:
    group = play(ScriptedEngine(always("x")), pool, Prompt("ranked", 1, []), 3)
    assert [(r.status, r.reward) for r in group.rollouts] == [("error", None)] * 3 and group.rewards == []
    assert all("no ranking" in (r.error or "") for r in group.rollouts)


def test_one_failure_keeps_the_others(pool: RewardPool) -> None:
    def script(request: Any) -> tuple[str, Any] | Exception:
        return ValueError("bad luck") if request.request_id.endswith("/1/0") else ("abc", "stop")

    group = play(ScriptedEngine(script), pool, desk("plain"), size=3)
    assert [rollout.status for rollout in group.rollouts] == ["ok", "error", "ok"] and group.rewards == [3, 3]


@pytest.mark.parametrize(
    "error", (EngineError("gone"), ConfigError("wants a key, or is gone")), ids=("dead", "refused")
)
def test_unusable_engine_ends_the_run(pool: RewardPool, error: Exception) -> None:
    with pytest.raises(EngineError, match="gone"):
        play(ScriptedEngine(lambda _: error), pool, desk("plain"), size=2)


def test_conversation_keeps_the_sampled_tokens(pool: RewardPool) -> None:
    engine = ScriptedEngine(lambda request: (f"word {request.request_id[-1]}", "stop"))
    (rollout,) = play(engine, pool, Prompt("echo", 0, [])).rollouts
    assert [m["role"] for m in rollout.messages] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert rollout.messages[2]["content"] == "You said word 0." and rollout.reward == 6
    assert len(rollout.turns) == 3
    history: list[int] = []
    for turn in rollout.turns:
        assert turn.prompt_ids[: len(history)] == history
        history = turn.prompt_ids + turn.completion.token_ids
    assert CHAT.full_text(history) == str(TOKENIZER.apply_chat_template(rollout.messages, tokenize=False)).rstrip("\n")
    rollout.advantage = 1.0
    assert len(rollout_samples(rollout)) == 1


def test_conversation_ends_at_a_truncated_answer(pool: RewardPool) -> None:
    engine = ScriptedEngine(lambda request: ("word", "length" if request.request_id.endswith("/1") else "stop"))
    (rollout,) = play(engine, pool, Prompt("echo", 0, [])).rollouts
    assert len(rollout.turns) == 2 and rollout.truncated and rollout.status == "ok"


def test_environment_failure_within_a_rollout(pool: RewardPool) -> None:
    (rollout,) = play(ScriptedEngine(always("word")), pool, Prompt("echo", 1, [])).rollouts
    assert rollout.status == "error" and "KeyError" in str(rollout.error) and rollout.reward is None
    assert len(rollout.turns) == 2, "the sampled turns are kept for the record"


def test_conversation_ends_at_the_context_limit(pool: RewardPool) -> None:
    prompt_tokens = len(CHAT.prompt_ids(Echo().tasks("train")[0].messages))
    engine = ScriptedEngine(always("w" * 10))
    (rollout,) = play(engine, pool, Prompt("echo", 0, []), context_tokens=prompt_tokens + 20).rollouts
    assert len(rollout.turns) == 1 and rollout.status == "ok"
    assert engine.requests[0].sampling.max_tokens == 20, "a completion is limited to the remaining context"


def test_seeds_differ_by_rollout_turn_and_run_and_are_stable(pool: RewardPool) -> None:
    def seeds(**settings: Any) -> dict[str, int]:
        engine = ScriptedEngine(always("word"))
        play(engine, pool, Prompt("echo", 0, [], epoch=1), size=4, **settings)
        return {request.request_id: request.sampling.seed for request in engine.requests}

    first = seeds(seed=1)
    assert len(first) == 12 and len(set(first.values())) == 12
    assert seeds(seed=1) == first
    assert not set(seeds(seed=2).values()) & set(first.values())
    assert rollout_seed(1, "echo/0/1/0/2", 1) == first["train:echo/0/1/0/2/1"]
    # Fixed numbers: a run resumed by a later version must sample the same.
    assert rollout_seed(7, "env/3/0/0/1", 0) == 4594870498251128934
    assert all(0 <= seed < 1 << 63 for seed in first.values())


def test_sampling_parameters_are_passed_on(pool: RewardPool) -> None:
    engine = ScriptedEngine(always("word"))
    wanted = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, max_tokens=9, min_tokens=2, stop=("x",))
    (rollout,) = play(engine, pool, desk("plain"), sampling=wanted).rollouts
    sent = engine.requests[0].sampling
    assert {name: getattr(sent, name) for name in wanted.__slots__ if name != "seed"} == {
        name: getattr(wanted, name) for name in wanted.__slots__ if name != "seed"
    }
    assert rollout.turns[0].temperature == 0.7


def test_rewards_are_shaped_and_the_raw_ones_kept(pool: RewardPool) -> None:
    engine = ScriptedEngine(always("abcd", "length"))
    (rollout,) = play(engine, pool, desk("plain"), shape=RewardShape(scale=2, bias=-1)).rollouts
    assert (rollout.raw_reward, rollout.reward) == (4, 7)
    (rollout,) = play(engine, pool, desk("plain"), shape=RewardShape(truncated="zero")).rollouts
    assert (rollout.raw_reward, rollout.reward) == (4, 0)


def test_phases_are_entered_once_a_rollout(pool: RewardPool) -> None:
    entered: list[str] = []

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    runner = GroupRunner(ScriptedEngine(always("word")), ENVIRONMENTS, pool, CHAT, RunnerSettings(256))
    asyncio.run(runner.run(desk("plain"), 2, SamplingParams(), phase))
    assert sorted(entered) == ["reward", "reward", "rollout", "rollout"]


def test_with_the_embedded_engine(pool: RewardPool, device: Any) -> None:
    """The real engine: a group with a shared prefill, different answers, and the same answers when repeated."""

    def sample(seed: int) -> list[list[int]]:
        engine = EmbeddedRolloutEngine(make_engine(small_decoder(), eos_token_ids=(EOS,)), device)
        group = play(engine, pool, desk("plain"), 6, SamplingParams(max_tokens=12), context_tokens=100, seed=seed)
        assert group.rewards == [len(rollout.turns[0].completion.text) for rollout in group.rollouts]
        return [rollout.turns[0].completion.token_ids for rollout in group.rollouts]

    first = sample(1)
    assert len({tuple(ids) for ids in first}) == 6
    assert sample(1) == first and sample(2) != first


@pytest.fixture
def device() -> Iterator[Any]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_another_seed_draws_other_rollouts(pool: RewardPool) -> None:
    seeds: list[int] = []

    def answer(request: Request) -> tuple[str, FinishReason]:
        seeds.append(request.sampling.seed)
        return "word", "stop"

    runner = GroupRunner(ScriptedEngine(answer), ENVIRONMENTS, pool, CHAT, RunnerSettings(256, seed=1))
    for chosen in (runner, runner.with_seed(1), runner.with_seed(2)):
        asyncio.run(chosen.run(desk("plain"), 1, SamplingParams(max_tokens=32)))
    assert seeds[0] == seeds[1] != seeds[2]
