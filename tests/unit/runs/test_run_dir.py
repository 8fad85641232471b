"""The run directory: layout, status, partial lines, cutting back, clear storage errors."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import ConfigError, StorageError
from shoal.runs.files import set_fault_hook
from shoal.runs.journal import LineWriter, encode_line, read_lines
from shoal.runs.run_dir import RunDir, is_used, read_metrics, read_status, write_config

BINDING = {"model": "tiny", "seed": 1, "envs": ["reverse-text"]}


@pytest.fixture
def run_dir(tmp_path: Path):
    with RunDir.create(tmp_path / "run", "train:\n  seed: 1\n", BINDING) as made:
        yield made


def test_create_lays_out_the_folder(run_dir: RunDir) -> None:
    assert (run_dir.path / "config.yaml").read_text() == "train:\n  seed: 1\n"
    status = json.loads((run_dir.path / "status.json").read_text())
    assert (status["state"], status["step"], status["resumable"]) == ("running", 0, False)
    assert status["pid"] == os.getpid()
    assert status["binding"] == BINDING
    for name in ("rollouts", "checkpoints", "logs"):
        assert (run_dir.path / name).is_dir()


def test_status_of_a_new_run_names_the_next_command(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "", BINDING, "shoal grpo x --resume").close()
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["resumable"], status["next_command"]) == (True, "shoal grpo x --resume")


def test_used_folder_is_refused_and_the_message_names_both_options(run_dir: RunDir) -> None:
    run_dir.close()
    with pytest.raises(ConfigError, match=r"--resume.*output_dir"):
        RunDir.create(run_dir.path, "", BINDING)


def test_dry_run_leaves_the_folder_unused(tmp_path: Path) -> None:
    write_config(tmp_path / "run", "a: 1\n")
    assert not is_used(tmp_path / "run")
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["config.yaml"]
    RunDir.create(tmp_path / "run", "a: 1\n", {}).close()
    assert is_used(tmp_path / "run")


def test_resume_of_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        RunDir.resume(tmp_path)


def test_status_is_rewritten_and_identity_survives(run_dir: RunDir) -> None:
    run_id = run_dir.status["run_id"]
    run_dir.write_status("stopped", step=7, reason="three steps in a row not finite", resumable=True, next_command="go")
    status = read_status(run_dir.path)
    assert (status["state"], status["step"], status["next_command"]) == ("stopped", 7, "go")
    assert (status["run_id"], status["binding"]) == (run_id, BINDING)


def test_binding_difference_is_named(run_dir: RunDir) -> None:
    run_dir.check_binding({**BINDING, "envs": ("reverse-text",)})
    with pytest.raises(ConfigError, match="seed was 1, is now 2"):
        run_dir.check_binding({**BINDING, "seed": 2})
    run_dir.check_binding({**BINDING, "model files": "abc"})  # earlier versions did not record it


def test_step_metrics_are_amended_in_place(run_dir: RunDir) -> None:
    for step in (1, 2):
        run_dir.append_metrics(step, {"reward/mean": step / 2, "policy/loss": float("nan")})
    run_dir.amend_metrics(2, {"eval/sums/mean": 0.75, "eval/sums/std": float("inf")})
    run_dir.append_metrics(3, {"reward/mean": 1.5})
    first, second, third = read_metrics(run_dir.path)
    assert first == {"step": 1, "reward/mean": 0.5, "policy/loss": "nan"} and third == {"step": 3, "reward/mean": 1.5}
    assert second == {
        "step": 2, "reward/mean": 1.0, "policy/loss": "nan", "eval/sums/mean": 0.75, "eval/sums/std": "inf",
    }  # fmt: skip


def test_resume_removes_unfinished_files_everywhere(run_dir: RunDir) -> None:
    (run_dir.path / "final").mkdir()
    left = [run_dir.path / folder / ".tmp-x" for folder in (".", "rollouts", "checkpoints", "final")]
    for file in left:
        file.write_text("half")
    run_dir.close()
    with RunDir.resume(run_dir.path):
        assert not [file for file in left if file.exists()]


def test_streams_survive_a_resume_and_partial_lines_are_removed(run_dir: RunDir) -> None:
    for step in (1, 2):
        run_dir.append_metrics(step, {"reward/mean": step / 2})
        run_dir.append_journal(step, {"version": step})
    run_dir.close()
    for name in ("metrics.jsonl", "journal.jsonl"):
        with (run_dir.path / name).open("ab") as file:
            file.write(b'{"step": 3, "rew')
    assert [line["step"] for line in read_metrics(run_dir.path)] == [1, 2]
    with RunDir.resume(run_dir.path) as resumed:
        resumed.append_metrics(3, {"reward/mean": 1.5})
    assert read_metrics(run_dir.path) == [{"step": s, "reward/mean": s / 2} for s in (1, 2, 3)]
    assert [line["step"] for line in read_lines(run_dir.path / "journal.jsonl")] == [1, 2]


def test_cut_to_removes_later_records(run_dir: RunDir) -> None:
    run_dir.append_event({"step": 0, "kind": "start"})
    for step in range(1, 6):
        run_dir.append_metrics(step, {"reward/mean": 0.0})
        run_dir.append_journal(step, {})
        run_dir.append_event({"step": step, "kind": "x"})
        run_dir.write_rollouts(step, [{"rollout_id": f"e/0/0/0/{step}"}])
    assert run_dir.cut_to(3) == {"metrics": 2, "journal": 2, "events": 2, "rollouts": 2}
    assert [line["step"] for line in read_metrics(run_dir.path)] == [1, 2, 3]
    assert [line["step"] for line in read_lines(run_dir.path / "events.jsonl")] == [0, 1, 2, 3]
    assert sorted(p.name for p in (run_dir.path / "rollouts").iterdir()) == [f"step_{s:06d}.jsonl" for s in (1, 2, 3)]
    run_dir.append_metrics(4, {"reward/mean": 1.0})  # the writer continues in the rewritten file
    assert [line["step"] for line in read_metrics(run_dir.path)] == [1, 2, 3, 4]
    assert run_dir.cut_to(4) == {"metrics": 0, "journal": 0, "events": 0, "rollouts": 0}


def test_rollout_log_accepts_arrays_and_any_text(run_dir: RunDir) -> None:
    rows = [
        {
            "token_ids": np.array([1, 2]),
            "sampler_logprobs": np.array([-0.5, float("nan")]),
            "completion": "né </script>",
        },
        {"completion": "lone \ud800 surrogate", "reward": float("inf")},
    ]
    path = run_dir.write_rollouts(1, rows)
    first, second = read_lines(path)
    assert first == {"token_ids": [1, 2], "sampler_logprobs": [-0.5, None], "completion": "né </script>"}
    assert second == {"completion": "lone \ud800 surrogate", "reward": None}
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000001.jsonl"]


def test_failing_rollout_iterable_leaves_nothing(run_dir: RunDir) -> None:
    def rows():
        yield {"a": 1}
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError):
        run_dir.write_rollouts(1, rows())
    assert list((run_dir.path / "rollouts").iterdir()) == []


def test_nonfinite_metrics_are_strings(run_dir: RunDir) -> None:
    run_dir.append_metrics(1, {"optim/grad_norm": float("nan"), "policy/loss": float("-inf")})
    (line,) = read_metrics(run_dir.path)
    assert line == {"step": 1, "optim/grad_norm": "nan", "policy/loss": "-inf"}
    assert float(line["policy/loss"]) == float("-inf")


def test_files_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with RunDir.create(tmp_path / "run", "", {}) as run_dir, run_dir.checkpoint(1) as folder:
            (folder / "a").write_text("x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "run/status.json").stat().st_mode) == 0o600
    with RunDir.resume(tmp_path / "run") as run_dir:
        run_dir.write_status("finished", step=1, reason="", resumable=False)
        checkpoint = run_dir.newest_good_checkpoint()
    assert checkpoint is not None and checkpoint.step == 1
    assert stat.S_IMODE((tmp_path / "run/status.json").stat().st_mode) == 0o666 & ~before


def test_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"could not create .*file/run"):
        RunDir.create(tmp_path / "file" / "run", "", {})


def test_removed_folder_is_detected(run_dir: RunDir) -> None:
    (run_dir.path / "metrics.jsonl").unlink()
    with pytest.raises(StorageError, match="removed during the run"):
        run_dir.append_metrics(1, {"reward/mean": 0.0})
    run_dir.path.rename(run_dir.path.with_name("elsewhere"))
    with pytest.raises(StorageError, match="could not write"):
        run_dir.write_status("running", step=1, reason="", resumable=True)


def test_replaced_stream_is_detected(run_dir: RunDir) -> None:
    (run_dir.path / "journal.jsonl").rename(run_dir.path / "old")
    (run_dir.path / "journal.jsonl").write_text("")
    with pytest.raises(StorageError, match="replaced by another process"):
        run_dir.append_journal(1, {})


def test_full_disk_leaves_no_partial_line(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir.append_metrics(1, {"reward/mean": 0.5})
    real_write, calls = os.write, []

    def half_then_full(descriptor: int, data: bytes) -> int:
        calls.append(data)
        if len(calls) == 1:
            return real_write(descriptor, data[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", half_then_full)
    with pytest.raises(StorageError, match="the disk is full"):
        run_dir.append_metrics(2, {"reward/mean": 0.5})
    monkeypatch.undo()
    run_dir.append_metrics(2, {"reward/mean": 0.25})
    assert (run_dir.path / "metrics.jsonl").read_bytes().count(b"\n") == 2
    assert [line["reward/mean"] for line in read_metrics(run_dir.path)] == [0.5, 0.25]


@pytest.mark.parametrize("name", ["status.json", "config.yaml", "metrics.jsonl", "step_000001.jsonl"])
def test_interrupted_replacement_leaves_the_old_file(run_dir: RunDir, name: str) -> None:
    run_dir.append_metrics(1, {"reward/mean": 0.5})
    path = run_dir.write_rollouts(1, [{"rollout_id": "old"}]) if name.startswith("step") else run_dir.path / name
    before = path.read_bytes()

    def cut(place: str) -> None:
        if place == f"written:{name}":
            assert path.read_bytes() == before
            raise KeyboardInterrupt

    replace = {
        "status.json": lambda: run_dir.write_status("finished", step=9, reason="new", resumable=False),
        "config.yaml": lambda: run_dir.write_config("new: 1\n"),
        "metrics.jsonl": lambda: run_dir.cut_to(0),
        "step_000001.jsonl": lambda: run_dir.write_rollouts(1, [{"rollout_id": "new"}]),
    }[name]
    set_fault_hook(cut)
    try:
        with pytest.raises(KeyboardInterrupt):
            replace()
    finally:
        set_fault_hook(None)
    assert path.read_bytes() == before
    replace()
    assert path.read_bytes() != before


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(records=st.lists(st.dictionaries(st.text(max_size=8), json_values, max_size=4), max_size=5), data=st.data())
def test_truncating_the_file_loses_only_the_truncated_records(tmp_path_factory, records, data) -> None:
    lines = [encode_line(record) for record in records]
    whole = b"".join(lines)
    length = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(whole[:length])
    ends = np.cumsum([len(line) for line in lines]).tolist()
    survivors = records[: sum(end <= length for end in ends)]
    assert list(read_lines(path)) == survivors
    writer = LineWriter(path)
    writer.append({"after": 1})
    writer.close()
    assert list(read_lines(path)) == [*survivors, {"after": 1}]


def test_folder_that_cannot_be_created_is_reported(tmp_path: Path):
    """/proc accepts no folders. The message is about the chosen path, not about a removed folder."""
    with pytest.raises(StorageError, match=r"could not create /proc/foo: no folder can be created there"):
        RunDir.create("/proc/foo", "", {})
    assert StorageError.exit_code == 4
