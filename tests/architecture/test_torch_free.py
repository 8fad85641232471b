"""The rooms that must start fast import without torch: proved in a process where torch cannot be imported."""

import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
ROOMS = [
    "types", "protocols", "errors", "config", "batching", "envs", "rewards", "orchestrator", "observability", "report",
    "surfaces", "grpo_trainer", "cli", "launcher", "server", "algorithms.advantages", "rollout.vllm", "rollout.sglang",
    "split", "transport.calls", "transport.folder_calls", "transport.folder_weights", "transport.presence",
    "transport.tcp_calls", "rollout.runner", "rollout.link", "rollout.http", "models.chat",
    "models.tokenizer", "build.split",
]  # fmt: skip
HEAVY = ("torch", "transformers", "peft", "accelerate", "safetensors.torch")

SCRIPT = """
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in {heavy!r}):
            raise ImportError(f"{{name}} is not allowed here")

sys.meta_path.insert(0, Block())
for name in {modules!r}:
    importlib.import_module(name)
print("imported", len({modules!r}))
"""


def modules_of(room: str) -> list[str]:
    path = SOURCE.joinpath(*room.split("."))
    if path.with_suffix(".py").is_file():
        return [f"shoal.{room}"]
    files = sorted(path.rglob("*.py"))
    names = [".".join(("shoal", *file.relative_to(SOURCE).with_suffix("").parts)) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def import_without_torch(modules: list[str]) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(heavy=HEAVY, modules=modules)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("room", ROOMS)
def test_room_imports_without_torch(room: str):
    modules = modules_of(room)
    assert modules, f"the room {room} is gone; remove it from the list"
    result = import_without_torch(modules)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.strip() == f"imported {len(modules)}"


def test_the_block_works():
    assert "not allowed here" in import_without_torch(["torch"]).stderr


def test_a_tokenizer_loads_without_torch(tmp_path: Path):
    """What grpo-orch needs of transformers, which imports torch wherever it finds it."""
    from shoal.models.shapes import character_tokenizer

    character_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    script = f"""
import sys
from shoal.models.chat import Chat
from shoal.models.tokenizer import load_tokenizer, torch_left_out
with torch_left_out():
    chat = Chat(load_tokenizer({str(tmp_path)!r}))
ids = chat.prompt_ids([{{"role": "user", "content": "abc"}}])
assert "abc" in chat.full_text(ids)
print("torch" in sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == "False", result.stderr[-2000:]
