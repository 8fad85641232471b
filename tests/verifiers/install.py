"""Creates the Pythons for the verifiers tests in a folder outside the clone, one per line of releases.

`python install.py FOLDER` creates the virtual environments FOLDER/v0 and FOLDER/v1, and FOLDER/fixtures/v0 and v1 with
the example environments of the releases' tests, from their source archives. This happens once, in about two minutes.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

RELEASES = {"v0": "0.3.1", "v1": "0.4.0"}
# The first reads its examples from a conftest.py. The second starts programs through uv.
BESIDE = {"v0": ["pytest"], "v1": ["uv"]}
FIXTURES = {"v0": "tests", "v1": "tests/v1/fixtures"}


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for line, release in RELEASES.items():
        stamp = folder / f"{line}-{release}.done"
        if not stamp.exists():
            python = folder / line / "bin" / "python"
            if not python.exists():
                subprocess.run([sys.executable, "-m", "venv", str(folder / line)], check=True)
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", f"verifiers=={release}", *BESIDE[line]], check=True)
            unpack(pip, line, release, folder / "fixtures" / line)
            stamp.touch()


def unpack(pip: list[str], line: str, release: str, target: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        source = ["download", "--no-deps", "--no-binary", "verifiers", f"verifiers=={release}", "-d", temporary]
        subprocess.run([*pip, *source], check=True)
        (archive,) = Path(temporary).glob("verifiers-*.tar.gz")
        with tarfile.open(archive) as content:
            content.extractall(temporary, filter="data")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(Path(temporary) / f"verifiers-{release}" / FIXTURES[line], target)


if __name__ == "__main__":
    install(Path(sys.argv[1]).expanduser())
