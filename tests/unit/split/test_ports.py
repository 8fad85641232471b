"""A port that is free and stays free: no outgoing connection uses it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.split import supervisor as ports
from shoal.split.supervisor import free_port


def handed_out(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_text(text, encoding="ascii")
    monkeypatch.setattr(ports, "EPHEMERAL", path)


def test_system_port_range_is_read() -> None:
    with socket.socket() as given:
        given.bind(("127.0.0.1", 0))
        assert given.getsockname()[1] in ports._ephemeral_ports()


def test_ports_outside_the_ephemeral_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handed_out(tmp_path / "range", "10100\t65535\n", monkeypatch)
    assert all(free_port() in range(ports.LOWEST, 10100) for _ in range(20))


def test_taken_port_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port := free_port()))
        other = free_port()
        monkeypatch.setattr(ports.random.SystemRandom, "sample", lambda *_: [port, other])
        assert free_port() == other


@pytest.mark.parametrize("text", ["", "none", "1 2 3"])
def test_system_without_port_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    handed_out(tmp_path / "range", text, monkeypatch)
    assert ports._ephemeral_ports() == ports.DEFAULT_EPHEMERAL
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "nothing")
    assert free_port() < ports.DEFAULT_EPHEMERAL.start


def test_system_with_all_ports_ephemeral(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a port that the system chooses must do."""
    handed_out(tmp_path / "range", f"1024\t{ports.HIGHEST}\n", monkeypatch)
    monkeypatch.setattr(ports, "_is_free", lambda _: pytest.fail("there is none to try"))
    assert 0 < free_port() <= ports.HIGHEST
