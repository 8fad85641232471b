"""Creates the Pythons with the packages openenv and mcp, for servers, in a folder outside the clone.

`python install.py FOLDER` creates the virtual environments FOLDER/openenv and FOLDER/mcp, once, in about a minute.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RELEASES = {"openenv": "0.10.0", "mcp": "2.3.0"}


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for package, release in RELEASES.items():
        stamp = folder / f"{package}-{release}.done"
        if not stamp.exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder / package)], check=True)
            pip = [str(folder / package / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", f"{package}=={release}"], check=True)
            stamp.touch()


if __name__ == "__main__":
    install(Path(sys.argv[1]).expanduser())
