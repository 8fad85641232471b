"""The lock file has every dependency with a hash and no address. The scan finds planted secrets, and none in this
repository.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
SPEC = importlib.util.spec_from_file_location("supply_chain", ROOT / "tools" / "supply_chain.py")
assert SPEC is not None and SPEC.loader is not None
tool = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tool)

# Assembled here, so that the scan of this repository does not find them.
PLANTED = {
    "private key": "-----BEGIN RSA " + "PRIVATE KEY-----",
    "AWS key": "AKIA" + "IOSFODNN7EXAMPLE",
    "GitHub token": "ghp_" + "a1B2" * 9,
    "Hugging Face token": "hf_" + "aB3d" * 9,
    "OpenAI or Anthropic key": "sk-" + "aB3d" * 12,
    "Slack token": "xoxb-" + "1234567890-" * 3,
    "Google key": "AIza" + "aB3d_" * 7,
    "wandb key": "WANDB_API_KEY=" + "0a1b" * 10,
    "address with a password": "https://me:" + "hunter22@example.org/simple",
}


def test_every_entry_of_the_lock_has_a_version_and_a_hash():
    entries = re.findall(r"^([a-z0-9-]+)==\S+ \\\n    --hash=sha256:[0-9a-f]{64}$", LOCK, re.M)
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    assert len(entries) > 100 and len(lines) == 2 * len(entries) and len(set(entries)) == len(entries)
    assert "://" not in LOCK and "torch" not in entries


def test_lock_has_all_direct_dependencies_and_the_tested_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [Requirement(text).name for text in [*project["dependencies"], *extras["dev"], *extras["audit"]]]
    locked = tool.locked()
    assert {canonicalize_name(name) for name in names} - {"torch"} <= locked.keys(), "run `make lock`"
    pins = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    tested = {canonicalize_name(name): version for name, version in pins if name != "torch"}
    assert {name: locked[name] for name in tested} == tested, "run `make lock`"


def test_page_of_licences_lists_what_is_locked():
    rows = re.findall(r"^\| ([a-z0-9-]+) \| (\S+) \| (.+) \|$", (ROOT / "docs" / "licences.md").read_text(), re.M)
    assert {name: version for name, version, _ in rows} == tool.locked(), "run `make lock`"
    assert sum(licence != "see its repository" for _, _, licence in rows) > 0.9 * len(rows)


@pytest.mark.parametrize("kind", tool.SECRETS)
def test_planted_secret_is_found_and_not_printed(kind: str, tmp_path: Path):
    file = tmp_path / "notes.md"
    file.write_text(f"first line\nkey: {PLANTED[kind]}\n")
    assert tool.find_secrets([file]) == [f"{file}:2: {kind}"]


def test_there_are_no_secrets_in_tracked_files():
    done = subprocess.run(
        [sys.executable, "tools/supply_chain.py", "secrets"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
