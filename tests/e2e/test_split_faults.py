"""Disks, clocks and suspensions in the split layout, with real processes. The checks read the files of the run."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

from .helpers.processes import Fault, WarmPython, wait_until
from .helpers.runs import assert_trained_once, each
from .helpers.split import COMPONENTS, LIMIT_S, InOne, SplitRun, compared, split_config, split_run
from .helpers.storage import small_disk

STEPS = 4
DAY_S = 86_400
SILENT_S = 3.6  # longer than a component may be silent (split/rendezvous.py)
NCCL = {"weight_broadcast": {"type": "nccl"}}


def finish(run: SplitRun, wanted: dict[str, Any]) -> None:
    assert run.end() == dict.fromkeys(COMPONENTS, 0)
    assert_trained_once(run, STEPS)
    found = compared(run)
    for name, value in wanted.items():
        assert found[name] == value, f"{name} differs"


def ends_with_storage(run: SplitRun, words: str) -> None:
    """All three processes end within seconds of each other, each with one line. The status names the next command."""
    wait_until(lambda: not all(command.running() for command in run.processes.values()), LIMIT_S, "the first end")
    assert run.end(20) == dict.fromkeys(COMPONENTS, 4)
    status = run.status()
    assert (status["state"], status["resumable"]) == ("failed", True) and words in status["reason"]
    for command in run.processes.values():
        told = [line for line in command.text().splitlines() if line.startswith("shoal: error: ")]
        assert len(told) == 1 and words in told[0] and "Traceback" not in command.text()


IO_ERROR, FULL = "I/O error; check the disk", "the disk is full; free some space"
READ = "model.safetensors: cannot be read: Input/output error"
DISKS: list[tuple[str, str, list[Fault]]] = [
    ("train", IO_ERROR, [("publish:exported", 3, "fail", errno.EIO)]),  # a version is written
    ("infer", READ, [("read:model.safetensors", times, "fail", errno.EIO) for times in (3, 4)]),  # or read, twice
    ("train", FULL, [("service:learned", 2, "fill", "out/filler")]),  # an answer and a version come next
    ("orch", FULL, [("appended:journal.jsonl", 2, "fill", "out/filler")]),  # a checkpoint and a batch
]


def test_shared_folder_that_fails_or_is_full(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """Any process may detect the failure. All three end with the same reason. After the repair, the run resumes
    exactly.
    """
    wanted = in_one()

    def small(run: SplitRun) -> contextlib.AbstractContextManager[Any]:
        return small_disk(run.path)

    def check(case: tuple[str, str, list[Fault]]) -> None:
        victim, words, faults = case
        folder = tmp_path / f"{victim}-{faults[0][2]}"
        disk_of = small if faults[0][2] == "fill" else contextlib.nullcontext
        with split_run(folder, warm, split_config(model)) as run, disk_of(run):
            run.start_all(faults={victim: faults})
            ends_with_storage(run, words)
            (run.path / "filler").unlink(missing_ok=True)
            run.start_all("infer", "train")
            run.start_one("orch", "--resume")
            finish(run, wanted)

    each(DISKS, check)


WEIGHTS: list[tuple[str, dict[str, Any], Fault]] = [
    # The server cannot read the file of a version the first time.
    ("infer", {}, ("read:model.safetensors", 3, "fail", errno.EIO)),
    # The trainer's connections break after a few tensors of the second version.
    ("train", NCCL, ("broadcast:sent", 30, "fail", errno.ECONNRESET)),
    # It is killed there and restarted.
    ("train", NCCL, ("broadcast:sent", 30, "kill", signal.SIGKILL)),
]


def test_undelivered_version_is_published_again(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """Incomplete weights are not used for sampling, and the run equals the undisturbed one."""
    wanted = in_one()

    def check(case: tuple[str, dict[str, Any], Fault]) -> None:
        victim, train, fault = case
        with split_run(tmp_path / f"{victim}-{fault[2]}", warm, split_config(model, train=train)) as run:
            run.start_all(faults={victim: [fault]})
            if fault[2] == "kill":
                assert run.processes[victim].wait() == -signal.SIGKILL
                run.start_one(victim)
            finish(run, wanted)
            (event,) = run.events("sync")
            assert "published again" in event["message"]

    each(WEIGHTS, check)


def test_clock_changes_have_no_effect(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """By a day, forward and back, during the run and in each process separately."""
    day: dict[str, list[Fault]] = {
        "infer": [("engine:turn", 1, "clock", DAY_S), ("engine:turn", 6, "clock", -3 * DAY_S)],
        "train": [("service:learn", 2, "clock", -DAY_S), ("publish:exported", 4, "clock", 2 * DAY_S)],
        "orch": [("appended:journal.jsonl", 1, "clock", DAY_S), ("appended:journal.jsonl", 3, "clock", -2 * DAY_S)],
    }
    config = split_config(model)
    config["train"]["deadline_s"] = config["orch"]["deadline_s"] = 30.0
    with split_run(tmp_path, warm, config) as run:
        run.start_all(faults=day)
        finish(run, in_one())
        waits = " ".join(event["message"] for event in run.events("waiting"))
        assert not run.events("stall") and all(int(s) < 60 for s in re.findall(r"(\d+) s\b", waits)), waits
        assert all(0 <= line["time/step"] < 60 for line in run.lines("metrics.jsonl") if line["step"] > 0)
        for name in ("infer", "train"):
            days = {line[:10] for line in (run.path / "logs" / f"{name}.log").read_text().splitlines()}
            assert len(days) > 1, "its clock was changed"


STOPS = {"infer": ("engine:turn", 4), "train": ("service:learn", 2), "orch": ("appended:journal.jsonl", 1)}


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")


def test_suspended_component_is_awaited(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    """Suspended for longer than the silence limit: the others wait, and continue with the same process."""
    wanted = in_one()

    def check(victim: str) -> None:
        with split_run(tmp_path / victim, warm, split_config(model)) as run:
            run.start_all(faults={victim: [(*STOPS[victim], "kill", signal.SIGSTOP)]})
            wait_until(lambda: is_stopped(run.processes[victim].pid), LIMIT_S, f"the stop of {victim}")
            time.sleep(SILENT_S)
            assert len(run.journal()) < STEPS, "nothing continues without it"
            os.kill(run.processes[victim].pid, signal.SIGCONT)
            finish(run, wanted)
            assert not run.events("restart"), "it is not mistaken for a new process"

    each(COMPONENTS, check, at_once=3)
