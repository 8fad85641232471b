"""Rewards that run code of a model: real processes in namespaces, with actions that must fail."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.core.types import Score
from shoal.envs import SingleTurn, answer_of, ask
from shoal.rewards import isolation as isolate
from shoal.rewards.isolation import MAX_FILES, MAX_PROCESSES, why_not
from shoal.rewards.pool import RewardPool

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no namespaces here: {why_not()}")
left_behind: list[int] = []


class Untrusted(SingleTurn):
    """Does what the answer says. `port` is an open port on this machine, `file` a private file."""

    def __init__(self, port: int, file: Path) -> None:
        self.port, self.file, self.run = port, file, os.getpid()

    def tasks(self, split: str) -> Any:
        return [ask("what?", answer=1)]

    def reward(self, task: Any, messages: Any) -> Any:
        return getattr(self, answer_of(messages))()

    def harmless(self) -> float:
        return 0.5

    def remember(self) -> int:
        left_behind.append(1)
        return len(left_behind)

    def connect(self) -> float:
        with socket.socket() as trying:
            trying.connect(("127.0.0.1", self.port))
        return 1.0

    def fork_bomb(self) -> int:
        started = 0
        try:
            while started < 500:
                if os.fork() == 0:
                    time.sleep(60)
                started += 1
        except BlockingIOError:
            return started
        return started

    def kill_the_run(self) -> float:
        os.kill(self.run, signal.SIGKILL)
        return 1.0

    def read_private(self) -> float:
        return float(len(self.file.read_text()))

    def read_environment(self) -> float:
        return float(len(Path(f"/proc/{self.run}/environ").read_bytes()))

    def read_here(self) -> float:
        """Opens 200 files at once."""
        with contextlib.ExitStack() as stack:
            for _ in range(200):
                stack.enter_context(Path("/dev/null").open())
        return 1.0

    def become_root(self) -> float:
        os.setuid(0)
        return 1.0


def outcomes(tmp_path: Path, *answers: str) -> list[Score]:
    private = tmp_path / "private"
    private.write_text("secret")
    private.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        environment = Untrusted(somebody.getsockname()[1], private)
        pool = RewardPool({"it": environment}, workers=1, timeout_s=5, isolated=True)
        pool.start()

        async def work() -> list[Score]:
            said = [[{"role": "assistant", "content": answer}] for answer in answers]
            scores = [await pool.score("it", "train", 0, messages) for messages in said]
            await pool.close()
            return scores

        return asyncio.run(work())


def test_isolated_jobs_share_no_state(tmp_path: Path) -> None:
    """Every job has a new process, so changes by one job do not affect the next."""
    assert [score.reward for score in outcomes(tmp_path, "harmless", "remember", "remember")] == [0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("connect", "Network is unreachable"),
        ("read_environment", "PermissionError"),
        ("become_root", "OSError: [Errno 22]"),  # there is no root account
        ("read_private", "FileNotFoundError"),
        ("kill_the_run", "ProcessLookupError"),
    ],
)
def test_attack_is_blocked(answer: str, says: str, tmp_path: Path) -> None:
    failed, then = outcomes(tmp_path, answer, "harmless")
    assert failed.status == "error" and failed.error is not None and says in failed.error, failed
    assert then.reward == 0.5


def test_processes_are_counted(tmp_path: Path) -> None:
    """A fork bomb ends at the limit, and all its processes end with the job."""
    bomb, then = outcomes(tmp_path, "fork_bomb", "harmless")
    assert bomb.reward is not None and 10 < bomb.reward < MAX_PROCESSES and then.reward == 0.5


def test_many_open_files_do_not_affect_rewards(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_FILES + 50):
            stack.enter_context(Path(os.devnull).open())
        (score,) = outcomes(tmp_path, "read_here")
    assert score.reward == 1.0


def test_unreadable_python_is_reported_beforehand(tmp_path: Path) -> None:
    hidden = tmp_path / "python"
    hidden.touch(mode=0o600)
    reason = why_not([str(hidden)])
    assert reason is not None and f"cannot read {hidden}" in reason


def test_interrupted_attempt_grants_no_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_short(needed: object) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""

    monkeypatch.setattr(isolate, "_tried", cut_short)
    assert why_not() == "the test process was killed or timed out"
