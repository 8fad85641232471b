"""What Shoal is installed from: the lock file with hashes, the licences, and a scan for secrets.

    python tools/supply_chain.py lock       writes requirements.lock from the installed versions
    python tools/supply_chain.py licences   writes docs/licences.md
    python tools/supply_chain.py secrets    fails if a tracked file holds something that looks like a secret

`make lock` calls the first two, `make check` the last.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
EXTRAS = ("dev", "audit", "fuzz")
# Installed from elsewhere: torch comes as a CPU or CUDA build, and its build decides about Triton and CUDA libraries.
NOT_LOCKED = re.compile(r"shoal|pip|torch|triton|nvidia-.*|cuda-.*")
HEADER = f"""\
# Everything from PyPI for Python {sys.version_info[0]}.{sys.version_info[1]} on {sys.platform} x86-64, except torch,
# Triton and CUDA libraries. Written by `make lock`; install with
#   pip install --require-hashes --no-deps -r requirements.lock
"""


def closure(extras: Iterable[str] = EXTRAS) -> dict[str, str]:
    """Name → version of everything that Shoal and its extras need, as installed here."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [("shoal", extra) for extra in ("", *extras)]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            about = distribution(name)
        except PackageNotFoundError:
            continue  # a requirement of another platform or Python
        if not NOT_LOCKED.fullmatch(name):
            found[name] = about.version
        for text in _own_requirements(extra) if name == "shoal" else about.requires or []:
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), inner) for inner in ("", *needed.extras)]
    return dict(sorted(found.items()))


def _own_requirements(extra: str) -> list[str]:
    """Read from pyproject.toml: the installed metadata may be older."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(project["optional-dependencies"][extra] if extra else project["dependencies"])


def hashes(versions: dict[str, str]) -> dict[str, str]:
    """Name → sha256 of the file that pip would install."""
    pins = [f"{name}=={version}" for name, version in versions.items()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        subprocess.run([*command, "--prefer-binary", "--report", str(report), *pins], check=True)
        items = json.loads(report.read_text())["install"]
    return {
        canonicalize_name(item["metadata"]["name"]): item["download_info"]["archive_info"]["hashes"]["sha256"]
        for item in items
    }


def lock() -> str:
    versions = closure()
    found = hashes(versions)
    return HEADER + "".join(
        f"{name}=={version} \\\n    --hash=sha256:{found[name]}\n" for name, version in versions.items()
    )


def locked() -> dict[str, str]:
    """Name → version in requirements.lock."""
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+) \\$", (ROOT / "requirements.lock").read_text(), re.M))


def licences() -> str:
    lines = [
        "<!-- Written by tools/supply_chain.py. Do not edit. -->",
        "# Licences",
        "",
        "Shoal is under the Apache License 2.0. It is installed from these packages, which keep their own licences.",
        "`make lock` writes this page again.",
        "",
        "| Package | Version | Licence |",
        "|---|---|---|",
    ]
    return "\n".join([*lines, *(f"| {name} | {version} | {licence(name)} |" for name, version in locked().items()), ""])


def licence(name: str) -> str:
    about = distribution(name).metadata
    if about.get("License-Expression"):
        return str(about["License-Expression"])
    classes = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or [] if text.startswith("License")]
    text = ", ".join(sorted({text for text in classes if text != "OSI Approved"})) or str(about.get("License") or "")
    first = (text.strip().splitlines() or [""])[0][:80]
    return first.replace("|", "/") or "see its repository"


SECRETS = {
    "private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    "AWS key": r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "GitHub token": r"\b(?:gh[pousr]_[A-Za-z0-9]{36,}|github_pat_[A-Za-z0-9_]{60,})\b",
    "Hugging Face token": r"\bhf_[A-Za-z0-9]{30,}\b",
    "OpenAI or Anthropic key": r"\bsk-(?:ant-|proj-)?[A-Za-z0-9_-]{32,}\b",
    "Slack token": r"\bxox[abprs]-[A-Za-z0-9-]{20,}\b",
    "Google key": r"\bAIza[0-9A-Za-z_-]{35}\b",
    "wandb key": r"(?i)wandb_api_key\W{1,4}[0-9a-f]{40}\b",
    "address with a password": r"\b[a-z][a-z0-9+]*://[^\s/:@{}$<>\"']+:[^\s/@{}$<>\"']{6,}@[A-Za-z0-9.-]+\.[a-z]{2,}",
}


def find_secrets(files: Iterable[Path]) -> list[str]:
    """`file:line: kind` of everything that looks like a secret; the text itself is not shown."""
    found = []
    for file in files:
        text = file.read_text("utf-8", "replace") if file.is_file() else ""
        for kind, pattern in SECRETS.items():
            found += [f"{file}:{text.count(chr(10), 0, m.start()) + 1}: {kind}" for m in re.finditer(pattern, text)]
    return found


def tracked() -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name]


def main() -> int:
    task = sys.argv[1] if len(sys.argv) == 2 else ""
    if task == "lock":
        (ROOT / "requirements.lock").write_text(lock())
    elif task == "licences":
        (ROOT / "docs" / "licences.md").write_text(licences())
    elif task == "secrets":
        found = find_secrets(tracked())
        print("\n".join(found) or "no secrets in tracked files")
        return bool(found)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
