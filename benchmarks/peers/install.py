"""Creates the Python of TRL for compare.py in a folder outside the clone.

`python benchmarks/peers/install.py [FOLDER]` creates FOLDER/env, a virtual environment with TRL. It uses torch and
transformers of the Python that runs this file, so all systems compute with the same libraries.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TRL = "1.16.0"
FOLDER = Path("~/.cache/shoal-peers")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def install(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    shared = sysconfig.get_path("purelib")
    stamp = folder / f"trl-{TRL}.done"
    if not stamp.exists() or stamp.read_text() != shared:
        shutil.rmtree(folder / "env", ignore_errors=True)  # a package may be incomplete
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "-c", str(CONSTRAINTS), f"trl=={TRL}"], check=True)
        stamp.write_text(shared)
    return python


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    print(install(made.parse_args().folder.expanduser()))
