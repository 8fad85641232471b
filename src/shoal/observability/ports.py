"""A port for a process that is yet to start: free now, and not one that the system hands out meanwhile."""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST, HIGHEST = 10_000, 65_535
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
USUALLY_HANDED_OUT = range(32_768, 65_536)
TRIES = 200


def free_port() -> int:
    """Every connection that any process opens takes a port of the system's choice, so a port out of that range may be
    gone by the time a server that was still loading comes to listen on it. The others stay free unless they are asked
    for."""
    spared = _handed_out()
    others = [port for port in range(LOWEST, HIGHEST + 1) if port not in spared]
    for port in random.SystemRandom().sample(others, min(TRIES, len(others))):
        if _is_free(port):
            return port
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _handed_out() -> range:
    try:
        low, high = HANDED_OUT.read_text(encoding="ascii").split()
        return range(int(low), int(high) + 1)
    except (OSError, ValueError):
        return USUALLY_HANDED_OUT


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
