"""The same task, seed and hyperparameters give the same metrics through every interface. Each interface is one row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .helpers.processes import WarmPython
from .helpers.runs import Run

WORDS = "shoal river stone cloud ember maple otter linen carp perch".split()  # noqa: SIM905
STEPS, PROMPTS, GROUP, TOKENS, RATE, SEED = 4, 2, 4, 8, 1e-3, 3
# Settings with different defaults per interface: the token average and the handling of zero-variance groups.
ALIKE = ["train.loss.aggregation=token-mean", "orch.groups.uniform=skip"]

JUDGE = '''
"""The judge of the task, in the form the configuration names it and in the form Python surfaces take it."""


def shouting(completion, **_):
    return sum(letter.isupper() for letter in completion) / max(len(completion), 1)


def reward(task, messages):
    return shouting(messages[-1]["content"])
'''
PYTHON = (
    "import json, sys\nfrom judge import shouting\nrows = [json.loads(line) for line in open('data/train.jsonl')]\n"
)
TRAINER = (
    PYTHON
    + """
from shoal import GRPOTrainer

GRPOTrainer(
    {model!r}, rows, shouting, num_steps={STEPS}, batch_size={PROMPTS}, group_size={GROUP}, max_new_tokens={TOKENS},
    sampling_temperature=1.0, optimizer_args={{"lr": {RATE}}}, seed={SEED}, max_seq_len=128, output_dir="out",
    overrides={ALIKE!r},
).train()
"""
)
RECIPE = (
    PYTHON
    + """
from shoal.recipes.rl_loop import Config, DeployConfig, main

main(
    Config(
        log_path="out", base_model={model!r}, dataset=rows, deployment=DeployConfig({model!r}), temperature=1.0,
        completions_per_prompt={GROUP}, prompt_groups_per_step={PROMPTS}, max_completion_tokens={TOKENS}, tis=None,
        learning_rate={RATE}, seed={SEED}, max_seq_len=128, overrides={ALIKE!r},
        max_rows={ROWS},
    ),
    shouting,
)
"""
)
LAUNCHED = """
from judge import reward
from shoal.launcher import load_config, train


def main(args):
    train(load_config(args, env="dataset", reward=reward))
"""
# Its files have no key for ALIKE, and have their own clip, scale and statistic.
LAUNCHER_KEYS = f"""
experiment_name: agree
trial_name: same
seed: {SEED}
total_train_epochs: 1
gconfig: {{n_samples: {GROUP}, max_new_tokens: {TOKENS}, temperature: 1.0}}
actor: {{lr: {RATE}, eps_clip: 0.2, reward_scaling: 1.0, use_decoupled_loss: false, recompute_logprob: false,
         adv_norm: group}}
mb_spec: {{max_tokens_per_mb: 128}}
train_dataset: {{path: data, batch_size: {PROMPTS}}}
evaluator: {{mode: disabled}}
"""


def by_configuration(model: Path) -> dict[str, Any]:
    return {
        "train": {
            "model": str(model), "output_dir": "out", "max_steps": STEPS, "learning_rate": RATE, "seed": SEED,
            "sequence_len": 128, "loss": {"type": "grpo", "aggregation": "token-mean"},
        },
        "orch": {
            "env": [{"id": "dataset", "args": {"reward": "judge:reward"}}], "dataset": {"path": "data"},
            "batch_size": PROMPTS * GROUP, "rollouts_per_example": GROUP, "groups": {"uniform": "skip"},
            "sampling": {"max_tokens": TOKENS},
        },
    }  # fmt: skip


def run_configuration(warm: WarmPython, folder: Path, model: Path) -> None:
    assert Run(folder, warm).write(by_configuration(model)).grpo().wait() == 0


def run_as_launched(warm: WarmPython, folder: Path, model: Path) -> None:
    """The same configuration without keys that the launcher's files lack."""
    config = by_configuration(model)
    config["train"] |= {"loss": {"type": "grpo"}, "recompute_old": False}
    config["orch"].pop("groups")
    assert Run(folder, warm).write(config).grpo().wait() == 0


def run_launcher(warm: WarmPython, folder: Path, model: Path) -> None:
    (folder / "script.py").write_text(LAUNCHED)
    (folder / "file.yaml").write_text(LAUNCHER_KEYS)
    command = ["-m", "shoal.launcher.local", "script.py", "--config", "file.yaml", f"actor.path={model}"]
    run_python(warm, folder, *command)
    (folder / "out").symlink_to(folder / "outputs" / "agree" / "same")


def run_python(warm: WarmPython, folder: Path, *words: str) -> None:
    command = warm.run(words, folder, python=True)
    assert command.wait() == 0, command.text()[-3000:]


def run_script(text: str) -> Callable[[WarmPython, Path, Path], None]:
    def start(warm: WarmPython, folder: Path, model: Path) -> None:
        values = {"model": str(model), "ROWS": STEPS * PROMPTS, **globals()}
        (folder / "script.py").write_text(text.format(**values))
        run_python(warm, folder, "script.py")

    return start


SURFACES: dict[str, Callable[[WarmPython, Path, Path], None]] = {
    "configuration": run_configuration,
    "GRPOTrainer": run_script(TRAINER),
    "recipe": run_script(RECIPE),
    "configuration as launched": run_as_launched,
    "launcher": run_launcher,
}
PAIRS = [
    ("GRPOTrainer", "configuration"),
    ("recipe", "configuration"),
    ("launcher", "configuration as launched"),
]


@pytest.fixture(scope="module")
def results(warm: WarmPython, raw_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    found = {}
    for name, start in SURFACES.items():
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        (folder / "judge.py").write_text(JUDGE)
        (folder / "data").mkdir()
        rows = [json.dumps({"prompt": f"Shout: {word}", "answer": "any"}) for word in WORDS[: STEPS * PROMPTS]]
        (folder / "data" / "train.jsonl").write_text("\n".join(rows) + "\n")
        (folder / "data" / "test.jsonl").write_text(json.dumps({"prompt": "Shout: fish", "answer": "any"}) + "\n")
        start(warm, folder, raw_model)
        found[name] = Run(folder, warm)
    return found


@pytest.mark.parametrize(("surface", "same_as"), PAIRS)
def test_same_run_through_every_surface(results: dict[str, Run], surface: str, same_as: str):
    wanted, found = results[same_as], results[surface]
    assert found.metrics() == wanted.metrics()
    assert [line["step"] for line in wanted.metrics()] == list(range(1, STEPS + 1))
    assert len({line["reward/mean"] for line in wanted.metrics()}) == STEPS  # something was trained
    assert [(r["rollout_id"], r["completion"], r["advantage"]) for r in found.rollouts()] == [
        (r["rollout_id"], r["completion"], r["advantage"]) for r in wanted.rollouts()
    ]
