"""Free ports for tests. Each pytest-xdist worker uses a separate range, so two workers never choose the same port."""

from __future__ import annotations

import os

from shoal.split import supervisor as ports

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def free_port() -> int:
    while (port := ports.free_port()) % WORKERS != WORKER % WORKERS:
        pass
    return port
