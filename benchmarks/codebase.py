"""Measures the size and the shape of the source, and how far a reader follows `shoal grpo` to its first optimizer step.

`python benchmarks/codebase.py [--out FILE]` prints a table next to the targets. The walk trains a tiny model on the CPU
under a profiler and counts each function of Shoal once; `--walk` prints them in the order of their first call.
`--sentences N [--seed S]` prints random sentences that users see, from the documentation and from messages.
"""

from __future__ import annotations

import ast
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "shoal"
SMALL_LINES, LARGE_LINES = 80, 500
KERNELS = "kernels"  # folders whose files may be long

TARGETS = {
    "modules": 190,
    "lines": 34_000,
    "files_under_80_lines": 30,
    "files_over_500_lines": 0,
    "core_files": 25,
    "core_lines": 4_000,
    "walk_files": 70,
    "walk_functions": 450,
    "shared_file_names": 12,
}

ENVIRONMENT = """
from shoal.envs import SingleTurn, answer_of, ask

class Letters(SingleTurn):
    def tasks(self, split):
        return [ask(f"Write a letter: {number}") for number in range(16)]

    def reward(self, task, messages):
        return len(set(answer_of(messages)))
"""

WALK = """
import sys, threading
sys.path.insert(0, {source!r})
entered = {{}}
done = False

def record(frame, event, argument):
    global done
    code = frame.f_code
    if event != "call" or done or not code.co_filename.startswith({shoal!r}):
        return
    if code.co_name.startswith("<") or not code.co_flags & 0x2:  # module and class bodies, comprehensions, lambdas
        return
    entered.setdefault((code.co_filename, code.co_qualname), None)
    if code.co_name == "optim_step":
        done = True

from shoal.cli import main
threading.setprofile(record)
sys.setprofile(record)
try:
    main({arguments!r})
except SystemExit:
    pass
sys.setprofile(None)
assert done, "no optimizer step"
import json
print("WALK " + json.dumps(list(entered)))
"""


def measure() -> dict[str, object]:
    files = [path for path in sorted(SOURCE.rglob("*.py")) if "examples_data" not in path.parts]
    modules = [path for path in files if path.name != "__init__.py"]
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    core = [path for path in modules if path.parent == SOURCE / "core"]
    names = Counter(path.name for path in modules)
    functions = [function for path in files for function in functions_of(path)]
    walk = walk_to_first_step()
    return {
        "modules": len(modules),
        "lines": sum(lines.values()),
        "files_under_80_lines": sum(lines[path] < SMALL_LINES for path in modules),
        "files_over_500_lines": sum(lines[path] > LARGE_LINES for path in modules if KERNELS not in path.parts),
        "core_files": len(core),
        "core_lines": sum(lines[path] for path in core),
        "walk_files": len({file for file, _ in walk}),
        "walk_functions": len(walk),
        "shared_file_names": sum(count > 1 for count in names.values()),
        "functions": len(functions),
        "mean_function_lines": round(sum(functions) / len(functions), 1),
        "functions_over_50_lines": sum(length > 50 for length in functions),
        "walk_files_by_package": dict(Counter(package_of(Path(file)) for file in {file for file, _ in walk})),
        "walk_functions_by_package": dict(Counter(package_of(Path(file)) for file, _ in walk)),
    }


def functions_of(path: Path) -> list[int]:
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [(node.end_lineno or node.lineno) - node.lineno + 1 for node in found]


def package_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def walk_to_first_step() -> list[tuple[str, str]]:
    """Functions of Shoal entered between argv and the first optimizer step of a small run, in order."""
    with tempfile.TemporaryDirectory() as folder:
        model = f"{folder}/tiny"
        Path(folder, "letters.py").write_text(ENVIRONMENT, encoding="utf-8")
        shoal = [sys.executable, "-m", "shoal"]
        subprocess.run([*shoal, "make-model", "tiny", model], check=True, capture_output=True, cwd=folder)
        arguments = [
            "grpo", f"train.model={model}", f"train.output_dir={folder}/run", "train.max_steps=1",
            "orch.env=[{id: letters.py:Letters}]",
            "orch.batch_size=8", "orch.rollouts_per_example=4", "orch.sampling.max_tokens=16", "train.device=cpu",
        ]  # fmt: skip
        script = WALK.format(source=str(SOURCE.parent), shoal=str(SOURCE), arguments=arguments)
        result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
        for line in result.stdout.splitlines():
            if line.startswith("WALK "):
                return [tuple(pair) for pair in json.loads(line[5:])]
    raise RuntimeError(f"the walk failed:\n{result.stdout[-2000:]}{result.stderr[-2000:]}")


def user_visible_sentences() -> list[tuple[str, str]]:
    """(place, sentence) of the documentation, and of string literals of the source that read like a message."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
    found = []
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in re.split(r"\n\s*\n|\n(?=[-*|#] ?)", text):
            found += [(page.name, sentence) for sentence in _sentences(" ".join(paragraph.split()))]
    for path in sorted(SOURCE.rglob("*.py")):
        for text in _messages(ast.parse(path.read_text(encoding="utf-8"))):
            found += [(str(path.relative_to(SOURCE)), sentence) for sentence in _sentences(text)]
    return sorted(set(found))


def _sentences(text: str) -> list[str]:
    parts = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text.strip("|#>-* "))
    return [part for part in parts if len(part.split()) >= 5]


def _messages(tree: ast.Module) -> list[str]:
    """Literals with at least five words; without docstrings."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "{…}" for part in node.values]
            texts.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside | docstrings:
            texts.append(node.value)
    return [" ".join(text.split()) for text in texts if not re.search(r"[{<]\w+[}>].*[;{]|\bdef \b", text)]


def main() -> None:
    if "--sentences" in sys.argv:
        seed = int(sys.argv[sys.argv.index("--seed") + 1]) if "--seed" in sys.argv else 0
        count = int(sys.argv[sys.argv.index("--sentences") + 1])
        drawn = random.Random(seed).sample(user_visible_sentences(), count)
        print("\n".join(f"{number}. [{place}] {text}" for number, (place, text) in enumerate(drawn, start=1)))
        return
    if "--walk" in sys.argv:
        print("\n".join(f"{Path(file).relative_to(SOURCE)}: {name}" for file, name in walk_to_first_step()))
        return
    figures = measure()
    width = max(map(len, TARGETS))
    for name, target in TARGETS.items():
        print(f"{name:<{width}}  {figures[name]:>7}  target {target}")
    if "--out" in sys.argv:
        path = Path(sys.argv[sys.argv.index("--out") + 1])
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
