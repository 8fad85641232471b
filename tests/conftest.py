"""For all tests: no downloads, and tests marked `gpu` are skipped without a CUDA device.

Tests that take more than 5 s without the marker `long` are listed at the end.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # must be set before the first import of a library that reads it
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one core per worker
signal.signal(
    signal.SIGHUP, signal.SIG_DFL
)  # nohup leaves SIGHUP ignored, and child processes of tests would inherit this

LONG_S = 5.0
CAMPAIGNS = {"long", "slow", "faults", "gpu", "lm_eval", "models", "vllm", "verifiers", "tool_servers"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # imported here because most tests do not need it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Output of a test may contain lone surrogates, which a worker cannot send."""
    return _sendable((yield))


def _sendable(data: Any) -> Any:
    if isinstance(data, str):
        return data.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(data, dict):
        return {_sendable(key): _sendable(value) for key, value in data.items()}
    return type(data)(_sendable(item) for item in data) if type(data) in (list, tuple) else data


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    calls = [report for report in terminalreporter.getreports("passed") if report.when == "call"]
    slow = [report for report in calls if report.duration > LONG_S and not CAMPAIGNS & report.keywords.keys()]
    if slow:
        terminalreporter.section(f"more than {LONG_S:.0f} s without the marker long", sep="-")
        for report in sorted(slow, key=lambda report: -report.duration):
            terminalreporter.write_line(f"{report.duration:.1f} s  {report.nodeid}")
