"""Secrets are hidden in everything a run writes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from shoal.runs.events import EventLog, setup_logging, stop_logging
from shoal.runs.journal import encode_line
from shoal.runs.run_dir import RunDir
from shoal.runs.secrets import HIDDEN, redact, secret_values

CANARY = "sk-canary-0123456789"


def test_secrets_never_reach_the_run_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", CANARY)
    with RunDir.create(tmp_path / "run", f"wandb_api_key: {CANARY}\n", {}) as run_dir:
        EventLog(run_dir).warn("x", f"failed with {CANARY}", data={"args": [CANARY], CANARY: 1})
        run_dir.write_rollouts(1, [{"completion": f"the key is {CANARY}", "token_texts": [CANARY], "token_ids": [1]}])
        run_dir.write_status("failed", step=0, reason=f"bad key {CANARY}", resumable=False, next_command=CANARY)
        handler = setup_logging(run_dir.logs, "trainer")
        logging.getLogger("shoal").error("key %s", CANARY)
        try:
            raise RuntimeError(CANARY)
        except RuntimeError:
            logging.getLogger("shoal").exception("bad")
        stop_logging(handler)
    written = [path.read_text() for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert not [text for text in written if CANARY in text]
    assert sum(HIDDEN in text for text in written) == 5


def test_secret_variables() -> None:
    environment = {
        "HF_TOKEN": "hf_abcdefgh",
        "DB_PASSWORD": "longpassword",
        "TOKEN": "tokentoken",
        "KEYBOARD": "qwertyuiop",
        "SHORT_KEY": "true",
        "TOKENIZERS_PARALLELISM": "falsefalse",
    }
    assert secret_values(environment) == ["longpassword", "hf_abcdefgh", "tokentoken"]


def test_numbers_are_not_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "12345678")
    assert encode_line({"n": 12345678, "s": "12345678"}) == b'{"n":12345678,"s":"%s"}\n' % HIDDEN.encode()
    assert redact("a 12345678 b") == f"a {HIDDEN} b"
