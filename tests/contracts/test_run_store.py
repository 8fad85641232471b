"""Every implementation of `protocols.RunStore` satisfies its contract. Only the main process writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal.core.protocols import RunStore
from shoal.core.types import Completion, Prompt, Rollout, RolloutGroup, Span, Turn
from shoal.runs.checkpoints import LOOP_FILE
from shoal.runs.journal import read_lines
from shoal.runs.run_dir import FollowerRunDir, RunDir

STATE = {"progress": {"step": 1}, "cursor": {"positions": {"env": 4}}, "collector": {"ready": []}}


@pytest.fixture
def main(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(tmp_path / "run", "train: {}\n", {}) as run_dir:
        yield run_dir


@pytest.fixture(params=["main", "follower"])
def store(request: pytest.FixtureRequest, main: RunDir) -> RunStore:
    return main if request.param == "main" else FollowerRunDir(main.path)


def files_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def make_group() -> RolloutGroup:
    prompt = Prompt("env", 0, [{"role": "user", "content": "a"}])
    completion = Completion("r", [7, 2], [-0.1, -0.3], [Span(0, 2, 0)], "stop", "b")
    return RolloutGroup(prompt, [Rollout(prompt, 0, [Turn([5, 6], completion)], reward=1.0, raw_reward=1.0)])


def save(main: RunDir, step: int) -> Path:
    with main.checkpoint(step, STATE) as folder:
        (folder / "weights").write_bytes(b"w")
    return main.path / "checkpoints" / f"step_{step:06d}"


def test_only_the_main_process_writes(store: RunStore, main: RunDir):
    save(main, 1)
    before = files_of(main.path)
    group = make_group()
    store.record_rollouts(1, [group], {group.rollouts[0].rollout_id: np.array([-0.1, -0.2])}, str)
    store.append_journal(1, {"version": 1})
    store.write_status("running", step=1, reason="checkpoint", resumable=True)
    store.mark_best(1, 0.5)
    changed = {name for name, content in files_of(main.path).items() if before.get(name) != content}
    written = {"rollouts/step_000001.jsonl", "journal.jsonl", "status.json", "checkpoints/best.json"}
    assert changed == (written if store is main else set())


def test_state_of_a_checkpoint_is_read_by_all(store: RunStore, main: RunDir):
    assert store.read_state(save(main, 1)) == STATE


def test_rollouts_are_written_with_the_log_probs_of_the_policy(main: RunDir):
    group = make_group()
    main.record_rollouts(3, [group], {group.rollouts[0].rollout_id: np.array([-0.1, -0.2])}, str)
    (line,) = read_lines(main.path / "rollouts" / "step_000003.jsonl")
    assert line["rollout_id"] == "env/0/0/0/0" and line["token_ids"] == [7, 2]
    assert line["policy_logprobs"] == [-0.1, -0.2] and line["token_texts"] == ["7", "2"]


def test_checkpoint_is_complete_or_absent(main: RunDir):
    folder = save(main, 2)
    assert json.loads((folder / LOOP_FILE).read_text()) == STATE and (folder / "weights").exists()
    with pytest.raises(ValueError, match="cut"), main.checkpoint(3, STATE):
        raise ValueError("cut")
    assert main.checkpoints.steps() == [2]


def test_shards_become_part_of_the_checkpoint(main: RunDir):
    (main.make_shards_folder() / "rank0").write_bytes(b"shard")
    with main.checkpoint(1, STATE) as folder:
        main.take_shards(folder)
    assert (main.path / "checkpoints/step_000001/shards/rank0").read_bytes() == b"shard"


def test_follower_rank_creates_no_folders(tmp_path: Path):
    store: RunStore = FollowerRunDir(tmp_path)
    for make in (
        lambda: store.checkpoint(1, STATE),
        store.make_shards_folder,
        lambda: store.take_shards(tmp_path),
        store.export,
        lambda: store.prune_checkpoints(2),
    ):
        with pytest.raises(RuntimeError, match="main process"):
            make()
