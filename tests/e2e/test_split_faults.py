"""Disks, clocks and pauses in the split layout, with real processes; asserted from the files of the run."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

from .helpers.processes import Fault, WarmPython
from .helpers.runs import assert_trained_once, each
from .helpers.split import COMPONENTS, InOne, SplitRun, compared, split_config, split_run
from .helpers.storage import small_disk

STEPS = 4
DAY_S = 86_400


def finish(run: SplitRun, wanted: dict[str, Any]) -> None:
    assert run.end() == dict.fromkeys(COMPONENTS, 0)
    assert_trained_once(run, STEPS)
    found = compared(run)
    for name, value in wanted.items():
        assert found[name] == value, f"{name} differs"


def ends_with_storage(run: SplitRun, words: str) -> None:
    """All three, within seconds, each with one line; the status says how to go on."""
    assert run.end(20) == dict.fromkeys(COMPONENTS, 4)
    status = run.status()
    assert (status["state"], status["resumable"]) == ("failed", True) and words in status["reason"]
    for command in run.processes.values():
        told = [line for line in command.text().splitlines() if line.startswith("shoal: error: ")]
        assert len(told) == 1 and words in told[0] and "Traceback" not in command.text()


DISKS: list[tuple[str, Fault]] = [
    ("train", ("publish:exported", 3, "fail", errno.EIO)),  # a version of the weights
    ("orch", ("written:learn_000002.msgpack", 1, "fail", errno.EIO)),  # a batch
    ("train", ("service:learned", 2, "fill", "out/filler")),  # then an answer and a version
    ("orch", ("appended:journal.jsonl", 2, "fill", "out/filler")),  # then a batch
]


def test_a_shared_folder_that_fails_or_is_full(tmp_path: Path, warm: WarmPython, model: Path, in_one: InOne):
    wanted = in_one()

    def check(case: tuple[str, Fault]) -> None:
        victim, fault = case
        with split_run(tmp_path / f"{victim}-{fault[2]}", warm, split_config(model)) as run, small_disk(run.path):
            run.start_all(faults={victim: [fault]})
            ends_with_storage(run, "I/O error" if fault[2] == "fail" else "the disk is full")
            (run.path / "filler").unlink(missing_ok=True)
            run.start_all("infer", "train")
            run.start_one("orch", "--resume")
            finish(run, wanted)

    each(DISKS, check)
