"""Generates docs/coming-from.md: `python -m shoal.coming_from > docs/coming-from.md`.

The tables here have the commands, imports and paths of other systems. The tables of arguments are derived from their
declarations. A new table goes into TABLES.
"""

from __future__ import annotations

from shoal.config.fields import known_keys, sections_at, walk_keys
from shoal.config.schema import RunConfig
from shoal.grpo_trainer import KEYS as TRAINER_KEYS
from shoal.launcher.keys import KEYS as LAUNCHER_KEYS
from shoal.recipes.config import KEYS as RECIPE_KEYS
from shoal.surfaces import trl
from shoal.surfaces.names import KeyRow, KeyTable, rows_of

QUICKSTART = KeyTable(
    "Three files, one command (the quickstart)",
    (
        KeyRow(
            "surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`shoal grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml`",
            "the files work unchanged; `shoal init DIR` writes them",
        ),
        KeyRow(
            "uv run surogate grpo --train examples/grpo/train.yaml --infer examples/grpo/infer.yaml "
            "--orch examples/grpo/orch.yaml",
            "`uv run shoal grpo …`, the same arguments",
        ),
        KeyRow(
            "CUDA_VISIBLE_DEVICES=0 surogate grpo-infer infer.yaml",
            "`CUDA_VISIBLE_DEVICES=0 shoal grpo-infer infer.yaml`",
        ),
        KeyRow("surogate grpo-orch orch.yaml", "`shoal grpo-orch orch.yaml`"),
        KeyRow(
            "CUDA_VISIBLE_DEVICES=1 surogate grpo-train train.yaml",
            "`CUDA_VISIBLE_DEVICES=1 shoal grpo-train train.yaml`",
        ),
        KeyRow("examples/grpo/", "`examples/grpo/`"),
        KeyRow("train.yaml", "`examples/grpo/train.yaml`", "configuration.md lists all keys"),
        KeyRow("infer.yaml", "`examples/grpo/infer.yaml`"),
        KeyRow("orch.yaml", "`examples/grpo/orch.yaml`"),
        KeyRow("./outputs", "`./outputs`", "the run directory"),
        KeyRow("vllm (to be installed)", (), "not needed: the embedded engine samples with the trained model"),
    ),
)

TRAINER = KeyTable(
    "A Python class (the GRPO training guide)",
    (
        KeyRow("GRPOTrainer", "`from shoal import GRPOTrainer`", "arguments below"),
        KeyRow(
            "accelerate launch --num_processes 2 examples/grpo_trainer_math.py",
            "`accelerate launch --num_processes 2 examples/grpo_trainer_math.py`",
            "with `use_accelerate=True`; without a GPU, `--multi_gpu` starts two processes on the CPU",
        ),
        KeyRow("examples/grpo_trainer_math.py", "`examples/grpo_trainer_math.py`"),
        KeyRow("pip install vllm", "`pip install vllm`", "only for `use_vllm=True`"),
        KeyRow("vllm.LLM()", "`use_vllm=True, vllm_args={…}`"),
        KeyRow("get_reward", "`get_reward(completion) -> float | None`", "None excludes a completion from its group"),
        KeyRow("AdamW", '`optimizer="AdamW"`', "torch.optim.AdamW is accepted too"),
    ),
)

RECIPE = KeyTable(
    "A recipe and its API level (the cookbook's rl_loop)",
    (
        KeyRow("training/recipes/rl_loop.py", "`from shoal.recipes.rl_loop import Config, main`", "src/shoal/recipes/"),
        KeyRow("Config + main", "`main(Config(…), reward_fn)`"),
        KeyRow("training.utils.rl.setup_infra", "`shoal.recipes.rl_loop.setup_infra`"),
        KeyRow("Infra", "`shoal.recipes.rl_loop.Infra`", "policy, reference, sampler, sync_weights, close"),
        KeyRow("skills/dev/", "`docs/recipes.md`"),
        KeyRow("forward_backward_custom", "`infra.policy.forward_backward_custom(datums, loss_fn)`"),
        KeyRow("optim_step", "`infra.policy.optim_step(AdamParams(…))`", "raises an error on the reference"),
        KeyRow("DeploymentSampler", "`shoal.recipes.rl_loop.DeploymentSampler`"),
        KeyRow("DeploymentSampler.sample_with_tokens()", "`await infra.sampler.sample_with_tokens(prompt, n)`"),
        KeyRow("make_grpo_loss_fn", "`make_grpo_loss_fn(config, reference_logprobs, old_logprobs)`"),
        KeyRow("build_grpo_datums", "`build_grpo_datums(groups)`", "zero-variance groups are skipped"),
        KeyRow("WeightSyncScope.PER_TRAINER", "`WeightSyncScope.PER_TRAINER`", "the default"),
        KeyRow("PER_DEPLOYMENT", "`WeightSyncScope.PER_DEPLOYMENT`"),
        KeyRow("WeightSyncConfig", "`WeightSyncConfig(weight_sync_interval=1, dcp_save_interval=0)`"),
        KeyRow("dcp_save_interval=0", "`train.save_steps=0`", "a checkpoint only when interrupted"),
        KeyRow("weight_sync_interval", "`orch.weight_sync_interval`", "1, N > 1 and 0 have the same meaning"),
        KeyRow(
            "--forward-only",
            "`infra.reference`",
            "a frozen copy in the same process; the flag is an error",
        ),
        KeyRow("asyncio.run(...)", "`asyncio.run(infra.sampler.sample_with_tokens(…))`"),
        KeyRow(
            "inference[1:]",
            "`datum.sampler_logprobs[1:]`",
            "`shoal.recipes.datums` aligns them for the built-in losses",
        ),
        KeyRow('"grpo"', '`policy_loss="grpo"`'),
        KeyRow('"importance_sampling"', '`policy_loss="importance_sampling"`'),
        KeyRow('"reinforce"', '`policy_loss="reinforce"`'),
        KeyRow('"dapo"', '`policy_loss="dapo"`'),
        KeyRow('"dro"', '`policy_loss="dro"`'),
        KeyRow('"gspo"', '`policy_loss="gspo"`'),
        KeyRow('"cispo"', '`policy_loss="cispo"`'),
    ),
)

LAUNCHER = KeyTable(
    "Config file and launcher (GSM8K)",
    (
        KeyRow(
            "python -m areal.launcher.local train_grpo.py --config train_grpo.yaml experiment_name=… trial_name=…",
            "`python -m shoal.launcher.local examples/gsm8k/train_grpo.py --config examples/gsm8k/train_grpo.yaml "
            "experiment_name=… trial_name=…`",
        ),
        KeyRow("train_grpo.py", "`examples/gsm8k/train_grpo.py`"),
        KeyRow("train_grpo.yaml", "`examples/gsm8k/train_grpo.yaml`", "keys below"),
        KeyRow("train_local_simple.py", "`examples/gsm8k/train_local_simple.py`"),
        KeyRow("train_hf_trainer.py", "`examples/gsm8k/train_hf_trainer.py`"),
        KeyRow("areal.reward.math_parser", "`shoal.rewards.math_parser`", "`process_results(completion, gold)`"),
        KeyRow(
            "DOCKER_WINDOWS_SETUP.md, CURSOR_DOCKER_WORKFLOW.md", "`examples/gsm8k/README.md`", "WSL2 and a container"
        ),
        KeyRow("algorithms/grpo.md of its documentation", "`docs/algorithms.md`"),
        KeyRow("math/gsm8k_grpo.py of its examples", "`examples/gsm8k/train_grpo.py`"),
        KeyRow("outputs of a trial", "`outputs/<experiment>/<trial>`", "the run directory"),
    ),
)


ARGUMENTS = KeyTable(
    "`GRPOTrainer`: arguments",
    rows_of(TRAINER_KEYS),
    intro="`from shoal import GRPOTrainer`. Loss `grpo`, group mean and std, `seq-mean-token-mean`, KL k3.",
    columns=("argument", "schema key"),
)
FIELDS = KeyTable(
    "`shoal.recipes.rl_loop`: fields of `Config`",
    rows_of(RECIPE_KEYS),
    intro=(
        "Group mean and unbiased std, `token-mean` (gspo has its own aggregation). Zero-variance groups are skipped."
    ),
    columns=("field", "schema key"),
)
LAUNCHER_FIELDS = KeyTable("Keys of the launcher's files", rows_of(LAUNCHER_KEYS))

TABLES: tuple[KeyTable, ...] = (
    QUICKSTART,
    TRAINER,
    ARGUMENTS,
    RECIPE,
    FIELDS,
    LAUNCHER,
    LAUNCHER_FIELDS,
    trl.TRAINER,
    trl.FIELDS,
)
INTRO = """# Coming from elsewhere

Find the Shoal name for a name, command or path of another system. [configuration.md](configuration.md) describes the
schema keys. Set them on the command line (`train.learning_rate=1e-5`), or with `overrides` in `GRPOTrainer` and
`Config`. This page is generated: `python -m shoal.coming_from > docs/coming-from.md`.
"""


def page() -> str:
    contents = "\n".join(f"- [{table.title.replace('`', '')}](#{_anchor(table.title)})" for table in TABLES)
    return "\n".join([INTRO, contents, "", *(render(table) for table in TABLES)])


def render(table: KeyTable) -> str:
    head = [f"## {table.title}", ""] + ([table.intro, ""] if table.intro else [])
    rows = [f"| {table.columns[0]} | {table.columns[1]} | |", "|---|---|---|", *(_line(row) for row in table.rows)]
    return "\n".join([*head, *rows, ""])


def _line(row: KeyRow) -> str:
    ours = "not supported" if row.refused else ", ".join(k if "`" in k else f"`{k}`" for k in row.keys) or "–"
    return f"| {_cell(f'`{row.theirs}`')} | {_cell(ours)} | {_cell(row.note)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def unknown_keys() -> list[str]:
    """Keys in the tables that the schema does not have."""
    known = {key.dotted for key in walk_keys(RunConfig)}
    named = [key for table in TABLES for row in table.rows for key in row.keys if "`" not in key]
    return [key for key in named if key not in known and not _free_form(key)]


def _free_form(key: str) -> bool:
    """True for keys under free-form data, such as infer.engine_args."""
    *parent, _ = key.split(".")
    above = sections_at(RunConfig, tuple(parent[:-1]))
    return bool(above) and parent[-1] in known_keys(*above) and not sections_at(RunConfig, tuple(parent))


if __name__ == "__main__":
    print(page(), end="")
