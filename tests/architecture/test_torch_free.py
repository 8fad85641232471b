"""Packages that must start fast can be imported in a process without torch."""

import json
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
PACKAGES = [
    "errors", "core.errors", "core.types", "core.protocols", "core.section", "core.metrics", "core.deadlines",
    "core.prompts", "core.admission", "core.runner", "core.advantages", "core.batching", "core.layout", "core.losses",
    "core.terms", "core.collect", "core.learn", "core.ranks", "core.evaluate", "core.state",
    "core.stop_rules", "core.loop", "config", "runs", "rewards", "envs", "watch", "server", "rollout.remote",
    "rollout.weight_channels", "split.commands", "split.rendezvous", "split.calls",
    "split.orchestrator", "split.inference_process", "split.supervisor",
    "models.chat", "models.tokenizer", "signals", "cli", "surfaces", "grpo_trainer", "launcher",
    "planning",
]  # fmt: skip
HEAVY = ("torch", "transformers", "peft", "accelerate", "safetensors.torch")

# The modules of a package are removed from sys.modules afterwards, so each package imports its own dependencies.
SCRIPT = """
import importlib, json, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if any(name == heavy or name.startswith(heavy + ".") for heavy in {heavy!r}):
            raise ImportError(f"{{name}} is not allowed here")

sys.meta_path.insert(0, Block())
problems = {{}}
for package, modules in {packages!r}.items():
    for name in [name for name in sys.modules if name.partition(".")[0] == "shoal"]:
        del sys.modules[name]
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError as error:
            problems.setdefault(package, []).append(f"{{name}}: {{error}}")
print(json.dumps(problems))
"""


def modules_of(package: str) -> list[str]:
    path = SOURCE.joinpath(*package.split("."))
    if path.with_suffix(".py").is_file():
        return [f"shoal.{package}"]
    files = sorted(path.rglob("*.py"))
    names = [".".join(("shoal", *file.relative_to(SOURCE).with_suffix("").parts)) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def import_without_torch(packages: dict[str, list[str]]) -> dict[str, list[str]]:
    """Problems of each package."""
    script = SCRIPT.format(heavy=HEAVY, packages=packages)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_packages_import_without_torch():
    modules = {package: modules_of(package) for package in PACKAGES}
    assert [package for package, names in modules.items() if not names] == [], (
        "these modules no longer exist; remove them from the list"
    )
    assert import_without_torch(modules) == {}


def test_block_works():
    """The block also works if another package imported the same module before."""
    found = import_without_torch({"fine": ["shoal.core.types"], "torch": ["torch"], "engine": ["shoal.engine.engine"]})
    assert found.keys() == {"torch", "engine"} and "not allowed here" in found["torch"][0]


def test_tokenizer_loads_without_torch(tmp_path: Path):
    """grpo-orch needs these parts of transformers, which imports torch if it is installed."""
    from shoal.models.random_models import character_tokenizer

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
