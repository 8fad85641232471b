"""The source contains no pickle, marshal, eval, exec, shell=True, yaml.load or torch.load. The test reads the AST."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"
MODULES = sorted(SOURCE.rglob("*.py"))
# multiprocessing pickles arguments and results
FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_ATTRIBUTES = {
    ("yaml", "load"), ("yaml", "load_all"), ("yaml", "unsafe_load"), ("yaml", "full_load"),
    ("torch", "load"), ("torch", "save"), ("os", "system"), ("os", "popen"), ("numpy", "load"), ("np", "load"),
}  # fmt: skip
# These functions of torch.distributed pickle, and unpickle data that any other rank sends.
FORBIDDEN_METHODS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list",
    "recv_object_list",
}  # fmt: skip
FORBIDDEN_KEYWORDS = {("shell", True), ("allow_pickle", True), ("trust_remote_code", True)}


def violations(text: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [f"line {node.lineno}: imports {n}" for n in names if n.split(".")[0] in FORBIDDEN_MODULES]
        if isinstance(node, ast.ImportFrom):
            taken = [(node.module or "", alias.name) for alias in node.names]
            found += [f"line {node.lineno}: imports {'.'.join(pair)}" for pair in taken if pair in FORBIDDEN_ATTRIBUTES]
        if isinstance(node, ast.Call):
            found += [f"line {node.lineno}: {what}" for what in _call_problems(node)]
    return found


def _call_problems(node: ast.Call) -> list[str]:
    problems = []
    function = node.func
    if isinstance(function, ast.Name) and function.id in FORBIDDEN_BUILTINS:
        problems.append(f"calls {function.id}")
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        pair = (function.value.id, function.attr)
        if pair in FORBIDDEN_ATTRIBUTES:
            problems.append("calls " + ".".join(pair))
    if isinstance(function, ast.Attribute) and function.attr in FORBIDDEN_METHODS:
        problems.append(f"calls {function.attr}")
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
        if (keyword.arg, value) in FORBIDDEN_KEYWORDS:
            problems.append(f"passes {keyword.arg}={value}")
    return problems


def test_no_forbidden_call():
    found = {str(path.relative_to(SOURCE)): violations(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: problems for path, problems in found.items() if problems} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval('1')",
        "exec('1')",
        "import yaml; yaml.load('a')",
        "import torch; torch.load('a')",
        "from yaml import load",
        "from multiprocessing import Queue",
        "import torch.distributed as dist; dist.all_gather_object([], 1)",
        "import subprocess; subprocess.run('ls', shell=True)",
        "from transformers import AutoModel; AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_check_detects_violations(text: str):
    assert violations(text)


def test_check_ignores_methods():
    assert violations("model.eval(); re.compile('a')") == []


# Clocks can be set, and clocks of two machines differ. Waits, order and decisions use time.monotonic or a counter.
# Allowed: timestamps for people and clients, file names with a time, and one comparison with another machine's files.
STAMPS = {
    "runs/events.py": {"time.time"},
    "runs/files.py": {"time.time", "datetime.now", "st_mtime"},
    "runs/run_dir.py": {"datetime.now"},
    "watch/report/data.py": {"st_mtime_ns"},
    "watch/report/rollouts.py": {"st_mtime_ns"},
    "rollout/remote/client.py": {"time.time"},
    "server/completions.py": {"time.time"},
}


def clocks(text: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and re.fullmatch("st_[amc]time(_ns)?", node.attr):
            found.add(node.attr)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            found |= {name} & {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {f"time.{alias.name}" for alias in node.names}
    return found


def test_wall_clock_decides_nothing():
    found = {str(path.relative_to(SOURCE)): clocks(path.read_text(encoding="utf-8")) for path in MODULES}
    assert {path: names for path, names in found.items() if names} == STAMPS
    assert clocks("import time; time.time(); p.stat().st_mtime") == {"time.time", "st_mtime"}
    assert clocks("from time import time") == {"time.time"} and clocks("time.monotonic()") == set()
