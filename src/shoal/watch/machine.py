"""Checks of the machine for `shoal doctor`: devices, versions, memory, disk, ports. Changes nothing.

`describe_machine` is the machine as a run records it.

Torch is queried in a separate process with a timeout, because a broken driver may hang or crash it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shoal
from shoal.watch.text import size

LEAST_DISK_BYTES = 10 * 2**30
LEAST_MEMORY_BYTES = 4 * 2**30
TORCH_LIMIT_S = 60.0
NEEDED = (
    "torch",
    "transformers",
    "peft",
    "safetensors",
    "datasets",
    "numpy",
    "pydantic",
    "cyclopts",
    "rich",
    "aiohttp",
)
OPTIONAL = ("triton", "wandb", "tensorboardX", "trackio", "mlflow-skinny", "vllm", "reasoning-gym")
PORTS = {7447: "shoal watch", 8000: "the inference server (infer.port)"}
_QUERY_TORCH = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    p = torch.cuda.get_device_properties(i)
    found.append({"name": p.name, "free": free, "total": total, "capability": f"{p.major}.{p.minor}"})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": found}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the output: a property of the machine and, if there is a problem, what to do."""

    name: str
    value: str
    fine: bool = True
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def has_gpu() -> bool:
    """Whether a GPU driver is installed (NVIDIA, WSL2 or AMD). Does not import torch."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def check_machine(folder: Path | None = None) -> list[Check]:
    return [_python(), *_versions(), *_devices(), _processors(), _memory(), _disk(folder or Path.cwd()), *_ports()]


def describe_machine(device: str) -> dict[str, str]:
    """The device and the versions that a run records; empty in a process without torch, which computes nothing."""
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    on_gpu = device != "cpu" and torch.cuda.is_available()
    name = torch.cuda.get_device_name() if on_gpu else f"CPU, {_usable_processors()} cores"
    versions = {package: found for package in ("transformers", "peft") if (found := _version(package)) is not None}
    return {
        "device": name,
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),  # a subclass of str
        **versions,
    }


def _python() -> Check:
    fine = sys.version_info >= (3, 11)
    return Check("python", f"{platform.python_version()} on {platform.platform()}", fine, "use Python 3.11 or newer")


def _versions() -> list[Check]:
    checks = []
    for name in NEEDED:
        version = _version(name)
        checks.append(
            Check(name, version or "missing", version is not None, "make venv, or pip install -c constraints.txt -e .")
        )
    extras = [f"{name} {version}" for name in OPTIONAL if (version := _version(name)) is not None]
    return [*checks, Check("extras", ", ".join(extras) or "none installed")]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Check]:
    """The GPUs that torch finds, and whether torch misses GPUs of the driver."""
    answer, problem = _query_torch()
    if answer is None:
        return [Check("GPU", f"torch cannot be queried: {problem}", False, "reinstall torch, or check the driver")]
    if answer["devices"]:
        return [
            Check(f"GPU {i}", f"{d['name']}, {size(d['free'])} of {size(d['total'])} free, compute {d['capability']}")
            for i, d in enumerate(answer["devices"])
        ]
    if shutil.which("nvidia-smi"):
        remedy = "install a CUDA build of torch, or check CUDA_VISIBLE_DEVICES and the driver"
        return [Check("GPU", f"a driver is installed, but torch {answer['version']} finds no device", False, remedy)]
    return [Check("GPU", "none; runs use the CPU in fp32")]


def _query_torch() -> tuple[dict[str, Any] | None, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _QUERY_TORCH], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False
        )
        return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return None, f"timeout after {TORCH_LIMIT_S:.0f} s"
    except (OSError, ValueError):
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"the query ended with exit code {done.returncode}"


def _processors() -> Check:
    return Check("processors", f"{_usable_processors()} usable")


def _usable_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _memory() -> Check:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, _available_bytes()
    except (ValueError, OSError):
        return Check("memory", "unknown")
    fine = free >= LEAST_MEMORY_BYTES
    return Check(
        "memory", f"{size(free)} of {size(total)} free", fine, "stop other processes, or train a smaller model"
    )


def _available_bytes() -> int:
    """Memory available without swapping: the estimate of the kernel, if it has one."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(folder: Path) -> Check:
    usage = shutil.disk_usage(folder)
    writable = os.access(folder, os.W_OK)
    text = f"{size(usage.free)} free in {folder}" + ("" if writable else ", which is not writable")
    remedy = "free some space, lower train.save_total_limit, or choose another train.output_dir"
    return Check("disk", text, usage.free >= LEAST_DISK_BYTES and writable, remedy)


def _ports() -> list[Check]:
    checks = []
    for port, user in PORTS.items():
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                checks.append(Check(f"port {port}", f"free for {user}"))
            except OSError as error:
                checks.append(Check(f"port {port}", f"in use ({error.strerror}); choose another port for {user}", True))
    return checks
