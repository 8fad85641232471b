"""Bad configurations: exit code 2, under two seconds, no torch, and a message with key, location, value and fix.

All cases run through the real `main` in one child process without torch. Some also run as real commands with a time
limit.
"""

# ruff: noqa: E501 (one case a line reads better than one argument a line)

import json
import resource
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

RUN = """\
train:
  model: ./model
  output_dir: ./out
  max_steps: 4
  learning_rate: 1e-5
  sequence_len: 256
  lora: false
  loss:
    type: grpo
infer:
  engine: embedded
orch:
  env:
    - id: arithmetic
  batch_size: 8
  rollouts_per_example: 4
  sampling:
    max_tokens: 32
"""
MAX_SECONDS = 2.0  # CPU time, because other tests run at the same time
MAX_LINES = 24


@dataclass(frozen=True)
class Bad:
    """One bad configuration: RUN with `old` replaced by `new`, or `text`, and parts of the expected message."""

    name: str
    old: str = ""
    new: str = ""
    says: tuple[str, ...] = ()
    text: str | None = None
    argv: tuple[str, ...] = ()
    files: dict[str, str] = field(default_factory=dict)

    @property
    def run_text(self) -> str:
        if self.text is not None:
            return self.text
        assert self.old in RUN, self.name
        return RUN.replace(self.old, self.new, 1)


def typo(name: str, old: str, new: str, *says: str) -> Bad:
    return Bad(name, old, new, says)


def train(name: str, lines: str, *says: str) -> Bad:
    """Insert `lines` into the train section, from line 7."""
    return Bad(name, "  lora: false", lines, says)


def orch(name: str, lines: str, *says: str) -> Bad:
    """Insert `lines` into the orch section, from line 15."""
    return Bad(name, "  batch_size: 8\n", f"  batch_size: 8\n{lines}\n", says)


CASES = [
    # misspelled keys at every depth
    typo("typo in a section", "infer:", "infre:", "run.yaml:10", "infre", "unknown key", "`infer`"),
    typo("typo in a key", "learning_rate", "lerning_rate", "run.yaml:5", "train.lerning_rate", "1e-05", "`learning_rate`"),
    typo("typo in a nested key", "max_tokens: 32", "max_token: 32", "run.yaml:18", "orch.sampling.max_token", "32", "max_tokens"),
    typo("typo in a list", "- id: arithmetic", "- idd: arithmetic", "run.yaml:14", "orch.env.0.idd", "arithmetic", "`id`"),
    typo("typo two levels down", "    type: grpo", "    type: grpo\n    kl: {bta: 0.1}", "run.yaml:10", "train.loss.kl.bta", "0.1", "`beta`"),
    typo("key in the wrong section", "  engine: embedded", "  batch_size: 8", "run.yaml:11", "infer.batch_size", "orch.batch_size"),
    Bad("section file given as run", text="model: x\nmax_steps: 3\n", says=("run.yaml:1", "model", "train", "--train")),
    # the shape of the file
    typo("duplicate key", "  max_steps: 4", "  max_steps: 4\n  max_steps: 5", "run.yaml:5", "max_steps", "duplicate", "line 4"),
    typo("tab", "  max_steps: 4", "\tmax_steps: 4", "run.yaml:4", "tab", "spaces"),
    typo("unclosed bracket", "    - id: arithmetic", "    - {id: arithmetic", "run.yaml:1", "invalid YAML"),
    Bad("empty file", text="", says=("run.yaml:1", "empty")),
    Bad("a list", text="- train\n", says=("run.yaml:1", '["train"]', "key: value")),
    Bad("two documents", text=RUN + "---\n" + RUN, says=("run.yaml:19", "several documents")),
    Bad("NUL", text=RUN.replace("./out", "./o\0ut"), says=("run.yaml:3", "NUL")),
    Bad("tag", text=RUN.replace("./out", "!!python/object:os.system x"), says=("run.yaml:3", "not allowed")),
    Bad("nested without end", text="a: " + "[" * 5000, says=("run.yaml:1", "nested")),
    Bad(
        "alias bomb",
        text="a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
            f"{b}: &{b} [*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a},*{a}]\n" for a, b in zip("abcdefg", "bcdefgh", strict=True)
        ),
        says=("run.yaml:", "aliases"),
    ),
    Bad("alias in itself", text="train: &a [*a]\n", says=("run.yaml:1", "alias")),
    Bad("directory as config", text=RUN, argv=("grpo", "model"), says=("model", "directory", "file")),
    Bad("missing file", text=RUN, argv=("grpo", "rum.yaml"), says=("rum.yaml", "no such file", "run.yaml")),
    Bad("missing section file", text=RUN, argv=("grpo", "--train", "t.yaml", "--orch", "o.yaml"), says=("t.yaml", "no such file")),
    typo("unset variable", "./model", "${SHOAL_NO_SUCH_VARIABLE}", "run.yaml:2", "SHOAL_NO_SUCH_VARIABLE", "not set", "export"),
    # types and ranges
    typo("word for a number", "1e-5", "fast", "run.yaml:5", "train.learning_rate", "a number", '"fast"'),
    typo("quoted number", "max_steps: 4", 'max_steps: "4"', "run.yaml:4", "train.max_steps", '"4"', "without quotes"),
    typo("yes for true", "lora: false", "lora: yes", "run.yaml:7", "train.lora", "true or false", '"yes"', "write true"),
    typo("fraction of a step", "max_steps: 4", "max_steps: 4.5", "run.yaml:4", "train.max_steps", "4.5", "whole number"),
    typo("value for a section", "  loss:\n    type: grpo", "  loss: grpo", "run.yaml:8", "train.loss", '"grpo"', "type"),
    typo("section for a value", "./out", "{dir: ./out}", "run.yaml:3", "train.output_dir", "text", "./outputs"),
    typo("NaN rate", "1e-5", ".nan", "run.yaml:5", "train.learning_rate", ".nan", "finite"),
    typo("infinite rate", "1e-5", ".inf", "run.yaml:5", "train.learning_rate", ".inf", "finite"),
    typo("negative rate", "1e-5", "-1e-5", "run.yaml:5", "train.learning_rate", "-1e-05", "at least 0"),
    typo("huge rate", "1e-5", "1e30", "run.yaml:5", "train.learning_rate", "1e+30", "at most 1"),
    typo("zero steps", "max_steps: 4", "max_steps: 0", "run.yaml:4", "train.max_steps", "0", "at least 1"),
    typo("empty list of environments", "env:\n    - id: arithmetic", "env: []", "run.yaml:13", "orch.env", "[]", "at least 1"),
    # choices
    typo("unknown loss", "type: grpo", "type: grpoo", "run.yaml:9", "train.loss.type", "grpoo", "`grpo`"),
    typo("unknown environment", "id: arithmetic", "id: aritmetic", "run.yaml:14", "orch.env.0.id", "aritmetic", "arithmetic"),
    typo("environment argument", "- id: arithmetic", "- {id: arithmetic, args: {levle: 2}}", "run.yaml:14", "orch.env.0.args", "levle", "level"),
    typo("missing user module", "id: arithmetic", "id: no_such_module_here:env", "run.yaml:14", "orch.env.0.id", "no_such_module_here"),
    typo("missing loss module", "type: grpo", "type: no_such_module_here:loss", "run.yaml:9", "train.loss.type", "no_such_module_here", "install"),
    train("unknown sink", "  report_to: wandbb", "run.yaml:7", "train.report_to", "wandbb", "`wandb`"),
    typo("unknown model", "./model", "./modle", "run.yaml:2", "train.model", "./modle", "does not exist", 'did you mean "model"'),
    typo("misspelt folder", "./model", "model/tny", "run.yaml:2", "train.model", "model/tny", "does not exist", 'folder is "model"'),
    train("unknown teacher", "  teacher: {model: ./techer}", "run.yaml:7", "train.teacher.model", "./techer", "does not exist"),
    train("no adapter", "  teacher: {adapter: ./model}", "run.yaml:7", "train.teacher.adapter", "./model", "PEFT"),
    train("unknown optimizer", "  optimizer: adam", "run.yaml:7", "train.optimizer", '"adam"', "adamw"),
    train("unknown recipe", "  recipe: fp16", "run.yaml:7", "train.recipe", '"fp16"', "bf16"),
    # exclusive keys
    train("steps and epochs", "  epochs: 2", "run.yaml:7", "train.epochs", "train.max_steps", "keep one"),
    train("two warm-ups", "  warmup_steps: 1\n  warmup_ratio: 0.1", "run.yaml:8", "train.warmup_ratio", "train.warmup_steps"),
    train("two cadences", "  save_steps: 1\n  save_seconds: 5", "run.yaml:8", "train.save_seconds", "train.save_steps"),
    train("two quantisations", "  lora: true\n  qlora_fp8: true\n  qlora_bnb: true", "run.yaml:9", "train.qlora_bnb", "train.qlora_fp8"),
    typo("no length", "  max_steps: 4\n", "", "run.yaml:1", "train.max_steps", "not set", "train.epochs"),
    # contradictory keys
    Bad("models differ", "  engine: embedded", "  model: Qwen/Qwen3-0.6B", ("run.yaml:11", "infer.model", "Qwen/Qwen3-0.6B", "./model", "equal")),
    orch("steps differ", "  max_steps: 5", "run.yaml:16", "orch.max_steps", "5", "train.max_steps is 4", "equal"),
    orch("lengths differ", "  seq_len: 128", "run.yaml:16", "orch.seq_len", "128", "256", "equal"),
    typo("indivisible batch", "rollouts_per_example: 4", "rollouts_per_example: 3", "run.yaml:16", "orch.rollouts_per_example", "8", "6 or 9"),
    typo("group of one", "rollouts_per_example: 4", "rollouts_per_example: 1", "run.yaml:16", "orch.rollouts_per_example", "group of one", "2 or more"),
    typo("no room for a prompt", "max_tokens: 32", "max_tokens: 256", "run.yaml:18", "orch.sampling.max_tokens", "256", "below 256"),
    typo("over the context", "  engine: embedded", "  max_model_len: 128", "run.yaml:6", "train.sequence_len", "256", "128", "infer.max_model_len"),
    typo("temperature 0", "max_tokens: 32", "temperature: 0", "run.yaml:18", "orch.sampling.temperature", "0", "above 0"),
    typo("bounds crossed", "    type: grpo", "    type: cispo\n    ratio_low: 5.0", "run.yaml:10", "train.loss.ratio_low", "5", "at most 1"),
    typo("clip of the reward crossed", "  batch_size: 8", "  batch_size: 8\n  reward: {clip: [1, 0]}", "run.yaml:16", "orch.reward.clip", "[1.0, 0.0]", "low < high"),
    typo("knob of another loss", "    type: grpo", "    type: grpo\n    kl_tau: 0.1", "run.yaml:10", "train.loss.kl_tau", "0.1", "grpo takes clip_low", "masked"),
    typo("correction without a weight", "    type: grpo", "    type: reinforce\n    correction: {type: tis}", "run.yaml:10", "train.loss.correction.type", "reinforce", "tis"),
    typo("KL where there is none", "    type: grpo", "    type: dapo\n    kl: {beta: 0.1}", "run.yaml:10", "train.loss.kl", "dapo", "grpo"),
    typo("k1 as a loss", "    type: grpo", "    type: grpo\n    kl: {beta: 0.1, estimator: k1}", "run.yaml:10", "train.loss.kl.estimator", "k1", "k3"),
    typo("correction without old log-probs", "    type: grpo", "    type: grpo\n    correction: {type: tis}\n  recompute_old: false", "run.yaml:11", "train.recompute_old", "false", "auto"),
    train("LoRA rank 0", "  lora: true\n  lora_rank: 0", "run.yaml:8", "train.lora_rank", "0", "at least 1"),
    Bad("LoRA rank over the engine's", "  lora: false\n", "  lora: true\n  lora_rank: 64\n", argv=("infer.max_lora_rank=32",),
        says=("run.yaml:8", "train.lora_rank", "64", "infer.max_lora_rank=64")),
    Bad("LoRA ranks differ", "  lora: false\n", "  lora: true\n  lora_rank: 8\n", argv=("orch.model.lora_rank=16",),
        says=("command line", "orch.model.lora_rank", "16", "train.lora_rank is 8")),
    train("quantised full fine-tuning", "  qlora_bnb: true", "run.yaml:7", "train.qlora_bnb", "train.lora", "train.lora=true"),
    train("inert schedule knob", "  final_lr_fraction: 0.1", "run.yaml:7", "train.final_lr_fraction", "constant", "cosine"),
    train("split knob in one process", "  weight_broadcast: {type: nccl}", "run.yaml:7", "train.weight_broadcast", "split", "remove"),
    train("reference without LoRA", "  reference: adapter-off", "run.yaml:7", "train.reference", "adapter-off", "frozen"),
    typo("open to the network", "  engine: embedded", "  host: 0.0.0.0", "run.yaml:11", "infer.host", "0.0.0.0", "infer.api_key_var", "127.0.0.1"),
    typo("arguments for no engine", "  engine: embedded", "  engine_args: {foo: 1}", "run.yaml:11", "infer.engine_args", "foo", "vllm"),
    orch("refill with batch statistics", "  advantage: {std: batch}\n  groups: {uniform: refill}", "run.yaml:17", "orch.groups.uniform", "refill", "batch"),
    orch("half a buffer", "  buffer: {easy_threshold: 0.9}", "run.yaml:16", "orch.buffer.easy_threshold", "orch.buffer.easy_fraction"),
    # data
    orch("data nobody reads", "  dataset: {path: data.jsonl}", "run.yaml:16", "orch.dataset", "arithmetic", "gsm8k"),
    Bad("missing data file", "- id: arithmetic", "- id: dataset", argv=("orch.dataset.path=nope.jsonl",),
        says=("command line", "orch.dataset.path", "nope.jsonl", "does not exist")),
    Bad("missing column", "- id: arithmetic", "- id: dataset", argv=("orch.dataset={path: data.jsonl, columns: {prompt: questoin}}",),
        says=("command line", "orch.dataset.columns.prompt", "questoin", "question")),
    Bad("missing split", "- id: arithmetic", "- id: dataset", argv=("orch.dataset={path: folder, split: trian}",),
        says=("command line", "orch.dataset.split", "trian", "train")),
    # command line and run directory
    Bad("override without a value", text=RUN, argv=("train.max_steps",), says=("command line", "train.max_steps", "section.key=value")),
    Bad("override of nothing", text=RUN, argv=("trian.max_steps=3",), says=("command line", "trian.max_steps=3", "train.max_steps")),
    Bad("override without a section", text=RUN, argv=("max_steps=3",), says=("command line", "max_steps=3", "train.max_steps=3")),
    Bad("typo in an override", text=RUN, argv=("train.maxsteps=3",), says=("command line", "train.maxsteps", "3", "`max_steps`")),
    Bad("key of a single value", text=RUN, argv=("orch.env=arithmetic", "orch.env.0.args.level=2"),
        says=("command line: orch.env.0.args.level=2", "'arithmetic' is a single value", "[{id: arithmetic")),
    Bad("unknown flag", text=RUN, argv=("--dryrun",), says=("--dryrun", "--dry-run")),
    Bad("unknown verb", text=RUN, argv=("gpro", "run.yaml"), says=("gpro", "grpo")),
    Bad("used run directory", text=RUN, files={"out/status.json": "{}"}, says=("run.yaml:3", "train.output_dir", "./out", "--resume")),
    Bad("resume with another seed", text=RUN, argv=("--resume", "train.seed=7"),
        files={"out/status.json": "{}", "out/config.yaml": RUN}, says=("out/config.yaml", "train.seed", "0", "7")),
    Bad("control characters", text=RUN, argv=("train.model=\x1b[31mred",), says=("command line: train.model: ", "character", "remove")),
    Bad("escaped control characters", text=RUN, argv=('train.model="\\e[31mred"',), says=("train.model", "u001b[31mred", "does not exist")),
    Bad("control characters in a key", text=RUN, argv=("train.\x1b[31m=3",), says=("command line", "x1b[31m", "unknown key")),
    Bad("split command", text=RUN, argv=("grpo-infer", "infer.yaml"), files={"infer.yaml": "host: 0.0.0.0\nmodel: a\n"},
        says=("infer.yaml:1", "infer.host", "0.0.0.0", "infer.api_key_var")),
    Bad("model of a server", text=RUN, argv=("grpo-infer", "infer.yaml"), files={"infer.yaml": "model: a/b/c\n"},
        says=("infer.yaml:1", "infer.model", "a/b/c", "does not exist")),
    Bad("supervised with a GRPO knob", text=RUN, argv=("sft", "sft.yaml"),
        files={"sft.yaml": "train:\n  model: ./model\n  max_steps: 2\n  ppo_epochs: 2\ndataset:\n  path: data.jsonl\n"},
        says=("sft.yaml:4", "train.ppo_epochs", "remove")),
]  # fmt: skip
VERBS = ("grpo", "gpro", "sft", "grpo-infer")


def write_case(folder: Path, case: Bad) -> list[str]:
    """Write the files of a case and return its command line."""
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    (folder / "data.jsonl").write_text('{"question": "1+1", "answer": "2"}\n')
    (folder / "folder").mkdir()
    (folder / "folder" / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (folder / "run.yaml").write_text(case.run_text)
    for name, text in case.files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return list(case.argv) if case.argv and case.argv[0] in VERBS else ["grpo", "run.yaml", *case.argv]


CHILD = """
import contextlib, io, json, os, sys, time

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(name + " was imported for a bad configuration")

sys.meta_path.insert(0, Block())
from shoal.cli import main

results = []
for folder, argv in json.load(sys.stdin):
    os.chdir(folder)
    out, err = io.StringIO(), io.StringIO()
    start = time.process_time()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    results.append([code, out.getvalue(), err.getvalue(), time.process_time() - start])
json.dump(results, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    root = tmp_path_factory.mktemp("bad")
    commands = [(str(root / str(i)), write_case(root / str(i), case)) for i, case in enumerate(CASES)]
    child = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(commands), capture_output=True, text=True, timeout=240
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return {case.name: result for case, result in zip(CASES, json.loads(child.stdout), strict=True)}


def test_fifty_distinct_entries():
    assert len(CASES) >= 50
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_configuration_gives_clear_errors(case: Bad, outcomes: dict[str, list]):
    code, out, err, seconds = outcomes[case.name]
    assert code == 2, err
    assert out == ""
    assert seconds < MAX_SECONDS
    assert 0 < len(err.splitlines()) <= MAX_LINES
    assert "Traceback" not in err and "\x1b" not in err
    missing = [text for text in case.says if text not in err]
    assert not missing, f"{missing} not in:\n{err}"


def test_good_configuration_passes(tmp_path: Path):
    write_case(tmp_path, Bad("good", text=RUN))
    result = subprocess.run(
        [sys.executable, "-m", "shoal", "grpo", "run.yaml", "--dry-run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.yaml"]


@pytest.mark.parametrize("name", ["typo in a key", "tab", "models differ", "unknown environment", "used run directory"])
def test_real_command(name: str, tmp_path: Path):
    case = next(case for case in CASES if case.name == name)
    argv = write_case(tmp_path, case)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "shoal", *argv], cwd=tmp_path, capture_output=True, text=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    modules = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time:")
    }
    assert result.returncode == 2
    assert all(text in result.stderr for text in case.says)
    assert "shoal.cli" in modules and not {"torch", "transformers"} & modules
    assert seconds < MAX_SECONDS
