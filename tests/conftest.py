"""For every test: nothing is fetched, and tests marked `gpu` are left out where there is no CUDA device."""

from __future__ import annotations

import os
import signal

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the first import of a library that reads it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup leaves it ignored, and what tests start would inherit that


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch  # not at the top: most tests need none of it

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
