"""Rules across keys: errors, notices, and the result for the files of the guides."""

import json
from functools import partial
from pathlib import Path

import pytest

from shoal.config.load import load_run, load_supervised
from shoal.config.orch import OrchConfig
from shoal.config.problems import dotted
from shoal.config.rules import check_run, check_supervised
from shoal.config.schema import DpoConfig, RunConfig, SftConfig
from shoal.core.errors import ConfigError
from shoal.core.losses import LOSSES

EXAMPLES = Path(__file__).parents[3] / "examples" / "grpo"
PARTS = {name: str(EXAMPLES / f"{name}.yaml") for name in ("train", "infer", "orch")}


def run(*overrides: str) -> RunConfig:
    return load_run(overrides=["train.model=m", "train.max_steps=8", "orch.env=arithmetic", *overrides]).config


def errors(*overrides: str) -> list[str]:
    return [dotted(problem.path) for problem in check_run(run(*overrides)).errors]


def notices(*overrides: str) -> list[str]:
    return [dotted(problem.path) for problem in check_run(run(*overrides)).notices]


def test_seed_files_pass_without_notices():
    findings = check_run(load_run(parts=PARTS).config)
    assert findings.errors == [] and findings.notices == []


def test_seed_files_pass_for_full_fine_tuning_with_notices_only():
    findings = check_run(load_run(parts=PARTS, overrides=["train.lora=false", "train.recipe=fp32"]).config)
    assert findings.errors == []
    assert {dotted(problem.path) for problem in findings.notices} == {"train.learning_rate", "train.lora"}


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_uses_its_own_defaults(loss: str):
    assert errors(f"train.loss.type={loss}") == []


@pytest.mark.parametrize(
    ("loss", "key", "words"),
    [
        ("{type: dapo, tau_pos: 2}", "train.loss.tau_pos", ["dapo", "sapo"]),
        ("{type: my.code:f, clip_low: 0.2}", "train.loss.clip_low", ["module:function", "grpo", "args"]),
        ("{args: {a: 1}}", "train.loss.args", ["masked", "module:function"]),
        ("{type: grpo, correction: {cap: 3}}", "train.loss.correction.cap", ["none", "tis", "icepop"]),
        ("{type: grpo, correction: {type: icepop, level: token}}", "train.loss.correction.level", ["icepop", "tis"]),
        ("{type: grpoo}", "train.loss.type", ['"grpoo"', "`grpo`", "module:function"]),
        ("{type: 5}", "train.loss.type", ["5", "masked"]),
        ("{type: 'x:'}", "train.loss.type", ["module:function"]),
        ("{type: grpo, clip_lo: 0.1}", "train.loss.clip_lo", ["`clip_low`"]),
        ("masked", "train.loss", ["mapping", "aggregation"]),
    ],
)
def test_parameter_that_the_loss_does_not_have_is_one_line(loss: str, key: str, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        run(f"train.loss={loss}")
    text = str(caught.value)
    assert text.startswith(f"command line: {key}: ") and "\n" not in text
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize("loss", LOSSES)
def test_corrections_and_kl_where_they_exist(loss: str):
    spec = LOSSES[loss]
    expected = [] if spec.takes_correction else ["train.loss.correction.type"]
    assert errors(f"train.loss.type={loss}", "train.loss.correction.type=tis") == expected
    expected = [] if spec.takes_kl else ["train.loss.kl"]
    assert errors(f"train.loss.type={loss}", "train.loss.kl.beta=0.01") == expected


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.loss={type: my.code:f, correction: {type: tis}}"], "train.loss.correction.type"),
        (["train.loss={type: grpo, kl: {beta: 0.1, estimator: k1}}"], "train.loss.kl.estimator"),
        (["train.loss={type: dro, ratio_log_cap: 5}"], "train.loss.ratio_log_cap"),
        (["train.loss.type=decoupled", "train.recompute_old=false"], "train.recompute_old"),
        (["train.loss={type: grpo, kl: {beta: 0.1, in: reward, estimator: k3}}"], "train.loss.kl.estimator"),
        (["train.loss={type: grpo, kl: {beta: 0.1}}", "train.reference=none"], "train.reference"),
        (["train.loss.type=grpo", "train.reference=frozen"], "train.reference"),
        (["orch.eval={env: [{id: arithmetic, args: {level: 3}}]}"], "orch.eval.env.0"),
        (["orch.eval.interval=5", "orch.weight_sync_interval=0"], "orch.eval"),
        (["orch.advantage={mean: batch, leave_one_out: true}"], "orch.advantage.leave_one_out"),
        (["orch.advantage={std: none, eps: 0.1}"], "orch.advantage.eps"),
        (["orch.advantage={function: 'a:b', std: none}"], "orch.advantage.function"),
        (["orch.truncated={type: zero, tokens: 4}"], "orch.truncated.tokens"),
        (["orch.groups={uniform: skip, max_refill: 1}"], "orch.groups.max_refill"),
        (["orch.groups.uniform=refill", "orch.advantage.std=batch"], "orch.groups.uniform"),
        (["orch.groups.uniform=skip", "orch.advantage.mean=batch"], "orch.groups.uniform"),
        (["orch.groups.uniform=keep", "orch.advantage={mean: batch, std: group}"], "orch.groups.uniform"),
        (["orch.groups.uniform=keep", "orch.advantage.mean=none", "train.loss.type=grpo"], "orch.groups.uniform"),
        (["orch.buffer={easy_threshold: 0.2, easy_fraction: 0.1, hard_threshold: 0.8, hard_fraction: 0.1}"],
         "orch.buffer.easy_threshold"),
        (["orch.buffer.replay={}", "orch.rollouts_per_example=1", "orch.advantage={mean: batch, std: batch}"],
         "orch.buffer.replay"),
        (["orch.buffer.replay={fraction: 0.01}"], "orch.buffer.replay.fraction"),
        (["orch.buffer.replay={}", "orch.weight_sync_interval=0"], "orch.buffer.replay"),
        (["orch.buffer.replay={}", "train.loss.type=grpo", "train.recompute_old=true"], "orch.buffer.replay"),
        (["orch.buffer.replay={}", "train.loss.type=dro"], "orch.buffer.replay"),
        (["orch.buffer.replay={}", "train.loss.type=gspo"], "orch.buffer.replay"),
        (["orch.buffer.replay={}", "train.loss={type: reinforce, ratio: none}"], "orch.buffer.replay"),
        (["orch.buffer.replay={}", "train.loss.type=grpo", "train.ppo_epochs=2", "train.recipe=bf16"],
         "orch.buffer.replay"),
        (["orch.sampling={min_tokens: 40, max_tokens: 20}"], "orch.sampling.min_tokens"),
        (["orch.sampling.top_k=500"], "orch.sampling.top_k"),
        (["infer.engine=vllm", "orch.sampling.top_p=0.9"], "orch.sampling"),
        (["orch.weight_sync_interval=0", "orch.max_off_policy_steps=2"], "orch.max_off_policy_steps"),
        (["orch.env=[arithmetic, arithmetic]"], "orch.env.1"),
        (["orch.env=[{id: arithmetic, weight: {0: 1, 10: 0}}]"], "orch.env"),
        (["orch.env=[{id: arithmetic, weight: {5: 0, 10: 1}}, {id: countdown, weight: {2: 2, 4: 0}}]"], "orch.env"),
        (["orch.eval.sampling.max_tokens=4096"], "orch.eval.sampling.max_tokens"),
        (["orch.reward.scale=0"], "orch.reward.scale"),
        (["orch.client.base_url=nowhere", "infer.engine=vllm"], "orch.client.base_url"),
        (["infer.port=9000"], "infer.port"),
        (["infer.tp=2"], "infer.tp"),
        (["infer.dp=2"], "infer.dp"),
        (["infer.max_loras=2"], "infer.max_loras"),
        (["infer.kv_cache_dtype=fp8"], "infer.kv_cache_dtype"),
        (["infer.enable_prefix_caching=false"], "infer.enable_prefix_caching"),
        (["infer.dtype=float16"], "infer.dtype"),
        (["train.recipe=bf16", "infer.dtype=float32"], "infer.dtype"),
        (["train.device=cpu", "infer.engine=vllm", "infer.engine_python=/bin/sh", "infer.gpu_memory_utilization=0.5"],
         "infer.gpu_memory_utilization"),
        (["train.sharding=fsdp", "train.optimizer=adamw_8bit"], "train.sharding"),
        (["train.sharding=fsdp", "train.recipe=fp8-hybrid"], "train.sharding"),
        (["train.sharding=fsdp", "train.lora=true", "train.qlora_fp4=true"], "train.sharding"),
        (["train.lora=true", "infer.enable_lora=false"], "infer.enable_lora"),
        (["train.lora=true", "train.lora_target_modules=[]"], "train.lora_target_modules"),
        (["train.warmup_steps=9"], "train.warmup_steps"),
        (["train.noise_scheduler={enabled: true, sigma_end: 0.5}"], "train.noise_scheduler.sigma_end"),
        (["orch.output_dir=./elsewhere"], "orch.output_dir"),
    ],
)  # fmt: skip
def test_refused(overrides: list[str], key: str):
    assert errors(*overrides) == [key]


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.loss={type: grpo, kl: {beta: 0.1, in: reward}}"],
        ["train.loss={type: grpo, correction: {type: icepop, floor: 0.4}}"],
        ["orch.rollouts_per_example=1", "orch.advantage={mean: batch, std: batch}"],
        ["train.recipe=bf16", "infer.dtype=bfloat16"],
        ["train.device=cpu", "infer.gpu_memory_utilization=0.5"],
        ["train.loss.type=my_package.losses:mine", "train.loss.args={a: 1}"],
        ["orch.weight_sync_interval=4", "orch.max_async_level=1"],
        ["orch.groups.uniform=refill", "orch.advantage={mean: batch, std: group}"],
        ["orch.groups.uniform=keep", "train.loss.type=grpo"],
        [
            "infer.engine=vllm",
            "infer.engine_python=python3",
            "infer.port=9000",
            "infer.engine_args={enforce_eager: true}",
        ],
        ["orch.env=[arithmetic, {id: arithmetic, name: harder, args: {level: 2}}]"],
        ["orch.eval={env: [{id: arithmetic, name: harder, args: {level: 3}}]}"],
    ],
)
def test_accepted(overrides: list[str]):
    assert errors(*overrides) == []


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.learning_rate=1e-2"], "train.learning_rate"),
        (["train.loss={type: masked, ratio_type: sequence}"], "train.loss.ratio_type"),
        (["train.loss.type=grpo", "orch.reward.scale=10"], "orch.reward.scale"),
        (["train.loss.type=gspo", "train.recompute_old=false"], "train.recompute_old"),
        (["orch.sampling.top_p=0.9"], "orch.sampling"),
        (["orch.rollouts_per_example=4"], "orch.rollouts_per_example"),
        (["orch.weight_sync_interval=4", "orch.max_off_policy_steps=1"], "orch.max_off_policy_steps"),
        (["orch.eval.interval=5", "orch.weight_sync_interval=2"], "orch.eval.interval"),
        (["train.noise_scheduler.enabled=true"], "train.noise_scheduler.num_stages"),
        (["train.lora=true", "train.qlora_fp4=true", "train.recipe=fp8-hybrid"], "train.recipe"),
    ],
)
def test_unusual_settings_give_notices(overrides: list[str], key: str):
    assert errors(*overrides) == []
    assert notices(*overrides) == [key]


def test_no_needless_notices():
    assert notices("orch.reward.scale=10") == []  # masked does not divide by a standard deviation
    assert notices("train.loss.ratio_type=sequence", "orch.sampling.max_tokens=64") == []


def test_start_adapter_keeps_its_shape(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"r": 8, "lora_alpha": 64, "lora_dropout": 0.0}')
    start = ("train.lora=true", f"train.adapter_path={tmp_path}")
    assert errors(*start) == errors(*start, "train.lora_rank=8", "train.lora_alpha=64") == []
    assert errors(*start, "train.lora_rank=4", "train.lora_dropout=0.1") == ["train.lora_rank", "train.lora_dropout"]


PAIRS = ["train.model=m", "train.max_steps=8", "dataset.path=pairs.jsonl"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["train.loss.type=grpo"], "train.loss"),
        (["train.ppo_epochs=2"], "train.ppo_epochs"),
        (["train.reference=none"], "train.reference"),
        (["train.reference=adapter-off"], "train.reference"),
        (["train.lora=true", "train.lora_dropout=0.1"], "train.lora_dropout"),
        (["train.gpus=2"], "train.gpus"),
        (["train.sharding=fsdp"], "train.sharding"),
        (["train.max_steps=null"], "train.max_steps"),
    ],
)
def test_keys_that_contradict_preference_training(tmp_path: Path, monkeypatch, overrides: list[str], key: str):
    monkeypatch.chdir(tmp_path)
    Path("pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    found = check_supervised(load_supervised(DpoConfig, None, [*PAIRS, *overrides]).config).errors
    assert [dotted(problem.path) for problem in found] == [key]
    assert check_supervised(load_supervised(DpoConfig, None, PAIRS).config).errors == []


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("loss.type=dpo", "loss.type"),
        ("loss.beta=0", "loss.beta"),
        ("loss.label_smoothing=0.5", "loss.label_smoothing"),
        ("loss={type: ipo, label_smoothing: 0.1}", "it belongs to sigmoid, robust; ipo takes no parameters"),
        ("loss.sft_weigth=1", "did you mean `sft_weight`"),
        ("train.beta=1", "`beta` belongs at `loss.beta`"),
    ],
)
def test_keys_of_the_preference_loss(override: str, says: str):
    with pytest.raises(ConfigError) as caught:
        load_supervised(DpoConfig, None, [*PAIRS, override])
    assert says in str(caught.value) and len(str(caught.value).splitlines()) == 1


FILES = {
    "grpo": "orch: {env: [{id: arithmetic}]}\ntrain: {model: m}\n",
    "sft": "train: {model: m}\ndataset: {path: d}\n",
    "dpo": "train: {model: m}\ndataset: {path: d}\nloss: {beta: 0.2}\n",
}


@pytest.mark.parametrize(("command", "file"), [("sft", "dpo"), ("sft", "grpo"), ("dpo", "grpo"), ("grpo", "sft")])
def test_file_of_another_command_names_that_command(tmp_path: Path, monkeypatch, command: str, file: str):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(FILES[file])
    load = {
        "grpo": load_run,
        "sft": partial(load_supervised, SftConfig),
        "dpo": partial(load_supervised, DpoConfig),
    }[command]
    with pytest.raises(
        ConfigError, match=rf"^mine.yaml:1: has the keys of `shoal {file}` \([^\n]*`shoal {file} mine.yaml`$"
    ):
        load("mine.yaml")


def test_override_of_another_command_names_that_command():
    with pytest.raises(ConfigError, match=r"'loss' is not a section; it is a section of `shoal dpo`$"):
        load_supervised(SftConfig, None, [*PAIRS, "loss.beta=0.2"])


def test_reference_of_sft_has_no_effect():
    found = check_supervised(load_supervised(SftConfig, None, [*PAIRS, "train.reference=frozen"]).config).errors
    assert "train.reference" in [dotted(problem.path) for problem in found]


def test_weights_of_environments_by_step():
    """Linear between the points, constant outside; a weight of 0 is allowed while another environment has one."""
    overrides = ["orch.env=[{id: arithmetic, weight: {10: 1, 20: 0, 30: 4}}, {id: countdown, weight: {10: 0, 20: 1}}]"]
    assert errors(*overrides) == []
    first, second = run(*overrides).orch.env
    assert [first.weight_at(step) for step in (1, 10, 15, 20, 25, 30, 99)] == [1, 1, 0.5, 0, 2, 4, 4]
    assert [second.weight_at(step) for step in (1, 10, 12, 20, 99)] == [0, 0, 0.2, 1, 1]
    sent = json.loads(json.dumps(run(*overrides).orch.model_dump(mode="json", exclude_unset=True)))
    assert OrchConfig.model_validate(sent).env == [first, second], "another process has the same schedule"


@pytest.mark.parametrize("weight", ["0", "{}", "{-1: 2}", "{a: 1}", "{1: -1}", "{1.5: 1}", "[1]"])
def test_weight_that_is_no_schedule_is_refused(weight: str):
    with pytest.raises(ConfigError, match="weight"):
        run(f"orch.env=[{{id: arithmetic, weight: {weight}}}]")


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.loss.type=grpo"],
        ["train.loss.type=grpo", "train.ppo_epochs=2", "train.recipe=fp32"],
        ["train.loss={type: gspo, correction: {type: tis}}"],
        ["train.loss.type=decoupled"],
        ["train.loss.type=masked"],
        ["train.loss.type=reinforce"],
        ["train.loss={type: dro, correction: {type: icepop}}"],
    ],
)
def test_losses_that_weigh_replayed_tokens(overrides: list[str]):
    assert errors("orch.buffer.replay={fraction: 0.5, max_age: 2}", *overrides) == []


def test_replayed_groups_per_step():
    sizes = ["orch.batch_size=40", "orch.rollouts_per_example=4"]
    found = [run(*sizes, f"orch.buffer.replay.fraction={part}").orch.replayed_groups for part in (0.1, 0.26, 1.0)]
    assert found == [1, 3, 10] and run(*sizes).orch.replayed_groups == 0
