"""What `shoal doctor` says about a machine: devices, versions, memory, disk, ports. Reads, tries, changes nothing.

Torch is asked in a process of its own with a deadline: a broken driver hangs or crashes that one, not the doctor.
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

from shoal.observability.text import size

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
_ASK_TORCH = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    p = torch.cuda.get_device_properties(i)
    found.append({"name": p.name, "free": free, "total": total, "capability": f"{p.major}.{p.minor}"})
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "devices": found}))
"""


@dataclass(frozen=True, slots=True)
class Fact:
    name: str
    value: str
    fine: bool = True
    remedy: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def has_gpu() -> bool:
    """Whether a driver is here, without torch: NVIDIA's own, the one of WSL2, or AMD's."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd"))


def check_machine(folder: Path | None = None) -> list[Fact]:
    return [_python(), *_versions(), *_devices(), _processors(), _memory(), _disk(folder or Path.cwd()), *_ports()]


def _python() -> Fact:
    fine = sys.version_info >= (3, 11)
    return Fact("python", f"{platform.python_version()} on {platform.platform()}", fine, "use Python 3.11 or newer")


def _versions() -> list[Fact]:
    facts = []
    for name in NEEDED:
        version = _version(name)
        facts.append(
            Fact(name, version or "missing", version is not None, "make venv, or pip install -c constraints.txt -e .")
        )
    extras = [f"{name} {version}" for name in OPTIONAL if (version := _version(name)) is not None]
    return [*facts, Fact("extras", ", ".join(extras) or "none installed")]


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[Fact]:
    """GPUs as torch sees them, and whether torch sees the ones the driver knows."""
    told, problem = _ask_torch()
    if told is None:
        return [Fact("GPU", f"torch could not be asked: {problem}", False, "reinstall torch, or look at the driver")]
    if told["devices"]:
        return [
            Fact(f"GPU {i}", f"{d['name']}, {size(d['free'])} of {size(d['total'])} free, compute {d['capability']}")
            for i, d in enumerate(told["devices"])
        ]
    if shutil.which("nvidia-smi"):
        remedy = "install a CUDA build of torch, or look at CUDA_VISIBLE_DEVICES and the driver"
        return [Fact("GPU", f"a driver is here, but torch {told['version']} sees no device", False, remedy)]
    return [Fact("GPU", "none; runs use the CPU in fp32")]


def _ask_torch() -> tuple[dict[str, Any] | None, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _ASK_TORCH], capture_output=True, text=True, timeout=TORCH_LIMIT_S, check=False
        )
        return json.loads(done.stdout), ""
    except subprocess.TimeoutExpired:
        return None, f"no answer within {TORCH_LIMIT_S:.0f} s"
    except (OSError, ValueError):
        lines = done.stderr.strip().splitlines()
        return None, lines[-1] if lines else f"it ended with exit code {done.returncode}"


def _processors() -> Fact:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Fact("processors", f"{usable} usable")


def _memory() -> Fact:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        total, free = os.sysconf("SC_PHYS_PAGES") * page, _available_bytes()
    except (ValueError, OSError):
        return Fact("memory", "unknown")
    fine = free >= LEAST_MEMORY_BYTES
    return Fact("memory", f"{size(free)} of {size(total)} free", fine, "end other processes, or train a smaller model")


def _available_bytes() -> int:
    """What can be had without swapping: the kernel's own estimate where it gives one."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _disk(folder: Path) -> Fact:
    usage = shutil.disk_usage(folder)
    writable = os.access(folder, os.W_OK)
    told = f"{size(usage.free)} free under {folder}" + ("" if writable else ", which cannot be written to")
    remedy = "make room, lower train.save_total_limit, or put train.output_dir elsewhere"
    return Fact("disk", told, usage.free >= LEAST_DISK_BYTES and writable, remedy)


def _ports() -> list[Fact]:
    facts = []
    for port, user in PORTS.items():
        with socket.socket() as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(("127.0.0.1", port))
                facts.append(Fact(f"port {port}", f"free for {user}"))
            except OSError as error:
                facts.append(Fact(f"port {port}", f"taken ({error.strerror}); {user} needs another", True))
    return facts
