"""Reading rollouts: the index of a step, searches with a time limit, the steps of one prompt."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.runs.run_dir import RunDir, rollouts_path
from shoal.watch.report import rollouts as rollouts_module
from shoal.watch.report.page import choose_groups
from shoal.watch.report.rollouts import (
    PromptSteps,
    Query,
    collect_rollouts,
    find,
    follow,
    index_step,
    read_group,
    rollout_steps,
)

from .synthetic_run import make_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "demo", steps=12)


def test_index_agrees_with_the_whole_file(run: Path) -> None:
    heads, groups = index_step(run, 7), collect_rollouts(run, 7)
    assert [read_group(run, head) for head in heads] == groups
    assert [head.rewards for head in heads] == [[r["reward"] for r in g["rollouts"]] for g in groups]
    assert heads[0].preview and heads[0].preview in groups[0]["prompt"]
    assert index_step(run, 99) == []


def test_held_out_rollouts_follow_those_of_the_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, groups=2, size=2)
    with RunDir.resume(run) as writer:
        for step in (0, 2, 9):
            line = {"group": "eval:sums/0/0/0", "prompt_id": "eval:sums/0", "env": "eval:sums", "reward": step}
            writer.write_rollouts(step, [line], "eval")
        assert rollout_steps(run) == [0, 1, 2, 9] and index_step(run, 0)[0].rewards == [0]
        heads = index_step(run, 2)
        assert [head.env for head in heads] == ["reverse-text", "reverse-text", "eval:sums"]
        assert [read_group(run, head) for head in heads] == collect_rollouts(run, 2)
        assert [head.step for head in find(run, Query(env="eval:sums")).heads] == [9, 2, 0]
        assert PromptSteps(run).of("eval:sums/0") == [0, 2, 9]
        groups = choose_groups(run, 10**6)
        assert [len(groups.heads[step]) for step in (0, 1, 2, 9)] == [1, 2, 3, 1]
        writer.cut_to(2)
        assert rollout_steps(run) == [0, 1, 2]


def test_partial_damaged_and_unusual_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=1, size=2)
    path = rollouts_path(run, 1)
    with path.open("ab") as file:
        file.write(b"not json\n[1]\n")
        file.write(json.dumps({"group": "odd", "reward": "high", "status": 7, "prompt": "a \ud800 b"}).encode() + b"\n")
        file.write(b'{"group": "torn", "rew')
    heads = index_step(run, 1)
    assert [(head.group, len(head.places)) for head in heads] == [("reverse-text/0/0/0", 2), ("odd", 1)]
    assert heads[1].rewards == [None] and heads[1].statuses == ["7"]
    assert read_group(run, heads[1])["prompt"] == "a \ud800 b"


def test_changed_file_is_read_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=1, groups=2, size=2)
    assert len(index_step(run, 1)) == 2
    lines = rollouts_path(run, 1).read_bytes().splitlines(keepends=True)
    rollouts_path(run, 1).write_bytes(b"".join(lines[:2]))
    os.utime(rollouts_path(run, 1), ns=(1, 1))
    assert len(index_step(run, 1)) == 1


def test_filters(run: Path) -> None:
    whole = find(run, Query())
    assert len(whole.heads) == 48 and whole.next_before is None
    assert [head.step for head in whole.heads][:5] == [12, 12, 12, 12, 11], "newest first"
    dropped = find(run, Query(status="dropped")).heads
    assert {head.step for head in dropped} == {3, 6, 9, 12} and all(head.drop_reason for head in dropped)
    assert all("timeout" in head.statuses for head in find(run, Query(status="timeout")).heads)
    assert find(run, Query(env="elsewhere")).heads == []
    high = find(run, Query(least=0.99)).heads
    assert high and all(max(r for r in head.rewards if r is not None) >= 0.99 for head in high)
    assert find(run, Query(least=2.0)).heads == []
    mixed = find(run, Query(status="mixed")).heads
    assert len(mixed) == 44


def test_text_is_found_in_prompts_and_completions(run: Path) -> None:
    wanted = "HERON"
    found = {(head.step, head.group) for head in find(run, Query(text=wanted)).heads}
    expected = {
        (step, group["group"])
        for step in range(1, 13)
        for group in collect_rollouts(run, step)
        if any(wanted.lower() in f"{group['prompt']} {r['completion']}".lower() for r in group["rollouts"])
    }
    assert found == expected and 0 < len(found) < 48


def test_search_stops_at_its_limit_and_continues(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts_module, "BUDGET_S", 0.0)
    seen, before = [], None
    for _ in range(50):
        found = find(run, Query(), before)
        seen += [(head.step, head.group) for head in found.heads]
        before = found.next_before
        if before is None:
            break
    assert before is None and len(seen) == len(set(seen)) == 48


def test_one_prompt_over_the_steps(run: Path) -> None:
    steps = PromptSteps(run)
    assert steps.of("reverse-text/20") == [3, 7, 11]
    heads = follow(run, "reverse-text/20", steps.of("reverse-text/20")).heads
    assert [(head.step, head.prompt_id) for head in heads] == [(step, "reverse-text/20") for step in (11, 7, 3)]
    assert steps.of("reverse-text/999") == []


def test_journal_is_read_incrementally_and_again_after_a_cut(tmp_path: Path) -> None:
    with RunDir.create(tmp_path / "run", "", {}) as run_dir:
        steps = PromptSteps(run_dir.path)
        run_dir.append_journal(1, {"rollout_ids": ["team/env/5/0/0/1"], "dropped": {"team/env/6/0/0": "uniform-bad"}})
        assert steps.of("team/env/5") == [1] and steps.of("team/env/6") == [1]
        run_dir.append_journal(2, {"rollout_ids": ["team/env/5/1/0/0"]})
        assert steps.of("team/env/5") == [1, 2]
        run_dir.cut_to(1)
        assert steps.of("team/env/5") == [1]
