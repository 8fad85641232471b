"""Three files, one file and overrides give the same configuration, and messages name the location."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.config.load import load_run, load_section, load_supervised
from shoal.config.schema import DpoConfig, SftConfig
from shoal.core.errors import ConfigError

TRAIN = "model: m\nmax_steps: 3\nlearning_rate: 2e-4\n"
ORCH = "env:\n  - id: arithmetic\nbatch_size: 8\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "infer.yaml").write_text("max_lora_rank: 32\n")
    (tmp_path / "orch.yaml").write_text(ORCH)
    indent = lambda text: "".join(f"  {line}\n" for line in text.splitlines())  # noqa: E731
    (tmp_path / "run.yaml").write_text(f"train:\n{indent(TRAIN)}infer:\n  max_lora_rank: 32\norch:\n{indent(ORCH)}")
    return tmp_path


PARTS = {"train": "train.yaml", "infer": "infer.yaml", "orch": "orch.yaml"}


def test_three_files_are_one_file(folder: Path):
    assert load_run(parts=PARTS).config == load_run("run.yaml").config


def test_places(folder: Path):
    assert load_run(parts=PARTS).origins.at(("train", "learning_rate")) == "train.yaml:3"
    loaded = load_run("run.yaml", overrides=["train.seed=4"])
    assert loaded.origins.at(("train", "learning_rate")) == "run.yaml:4"
    assert loaded.origins.at(("train", "seed")) == "command line"
    assert loaded.origins.at(("orch", "sampling", "top_p")) == "run.yaml:7"


def test_overrides(folder: Path):
    config = load_run(
        "run.yaml",
        overrides=[
            "train.learning_rate=1e-5",
            "orch.sampling.stop=[a, b]",
            "orch.sampling.temperature={start: 1, end: 0.5}",
            "orch.env.0.args.level=2",
            "orch.env.1.id=gsm8k",
            "train.loss.kl.in=reward",
            "train.report_to=wandb",
        ],
    ).config
    assert config.train.learning_rate == 1e-5
    assert config.orch.sampling.stop == ["a", "b"]
    assert config.orch.sampling.temperature.end == 0.5  # type: ignore[union-attr]
    assert [env.id for env in config.orch.env] == ["arithmetic", "gsm8k"]
    assert config.orch.env[0].args == {"level": 2}
    assert config.train.loss.kl.where == "reward"
    assert config.train.report_to == ["wandb"]


def test_run_from_overrides_alone():
    config = load_run(overrides=["train.model=m", "train.max_steps=1", "orch.env=arithmetic"]).config
    assert config.orch.env[0].id == "arithmetic"


def test_short_forms(folder: Path):
    orch = load_run("run.yaml", overrides=["orch.truncated=zero", "orch.reward={clip: 2}"]).config.orch
    assert orch.truncated.type == "zero"
    assert orch.reward.clip == [-2.0, 2.0]
    orch = load_run("run.yaml", overrides=["orch.truncated={tokens: 8}", "orch.advantage=my.code:f"]).config.orch
    assert orch.truncated.type == "overlong" and orch.truncated.tokens == 8
    assert orch.advantage.function == "my.code:f"
    assert load_run("run.yaml", overrides=["infer.tensor_parallel_size=2"]).config.infer.tp == 2


def test_all_problems_are_reported_at_once_on_one_screen(folder: Path):
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml", overrides=["train.a=1", "orch.b=2", "infer.port=x"])
    assert [line.split(": ")[1] for line in str(caught.value).splitlines()] == ["train.a", "infer.port", "orch.b"]
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml", overrides=[f"train.a{i}=1" for i in range(40)])
    assert len(str(caught.value).splitlines()) == 13
    assert str(caught.value).splitlines()[-1] == "… and 28 more"


def test_private_values_stay_private(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_VALUE", "canary-93")
    (folder / "train.yaml").write_text("max_steps: ${MY_VALUE}\nlora_rank: 3\n")
    with pytest.raises(ConfigError) as caught:
        load_run(parts=PARTS)
    assert "canary-93" not in str(caught.value) and "${MY_VALUE}" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_run("run.yaml", overrides=["orch.api_key=canary-93"])
    assert "canary-93" not in str(caught.value) and "orch.api_key" in str(caught.value)


@pytest.mark.parametrize("key", ("min_len", "seed", "level"), ids=str)
def test_environment_argument_error_names_its_location(folder: Path, key: str):
    """Even if another section has a key of this name."""
    with pytest.raises(ConfigError, match=rf"orch\.env\.0\.{key}: unknown key .* under `args`: \{{{key}: …\}}"):
        load_run("run.yaml", overrides=[f"orch.env=[{{id: reverse-text, {key}: 50}}]"])
    with pytest.raises(ConfigError, match=r"orch\.env\.0\.weigth: unknown key .*did you mean `weight`"):
        load_run("run.yaml", overrides=["orch.env=[{id: reverse-text, weigth: 2}]"])
    with pytest.raises(ConfigError, match=r"train\.loss\.learning_rat: .*did you mean `train\.learning_rate`"):
        load_run("run.yaml", overrides=["train.loss.learning_rat=1"])


@pytest.mark.parametrize(
    ("key", "ours"), [("train.lr", "train.learning_rate"), ("train.num_generations", "orch.rollouts_per_example")]
)
def test_keys_of_other_systems_suggest_ours(folder: Path, key: str, ours: str):
    with pytest.raises(ConfigError, match=f"{key}: unknown key .* `{ours}`"):
        load_run("run.yaml", overrides=[f"{key}=3"])


def test_data_without_an_environment_has_the_one_that_reads_data(folder: Path):
    (folder / "data.yaml").write_text("train: {model: m}\norch: {dataset: {path: rows.jsonl}}\n")
    assert [env.id for env in load_run("data.yaml").config.orch.env] == ["dataset"]
    (folder / "none.yaml").write_text("train: {model: m}\norch: {batch_size: 8}\n")
    with pytest.raises(ConfigError, match=r"orch\.env: is required but not set; set orch\.env\.id \(a built-in"):
        load_run("none.yaml")


def test_run_file_states_shared_values_once(folder: Path):
    (folder / "all.yaml").write_text("train: {model: m, output_dir: there}\ninfer:\norch: {env: arithmetic}\n")
    infer, orch = (load_section(name, "all.yaml").config for name in ("infer", "orch"))
    assert (infer.model, infer.output_dir) == ("m", "there") == (orch.model.name, orch.output_dir)
    orch = load_section("orch", "all.yaml", ["orch.model.name=n"]).config
    assert orch.model.name == "n" and orch.output_dir == "there"
    (folder / "odd.yaml").write_text("train: 3\ninfer: {prot: 1}\n")
    with pytest.raises(ConfigError, match=r"infer\.prot: unknown key"):
        load_section("infer", "odd.yaml")


def test_one_section(folder: Path):
    loaded = load_section("infer", "infer.yaml", ["infer.port=9"])
    assert (loaded.config.port, loaded.config.max_lora_rank) == (9, 32)
    with pytest.raises(ConfigError, match=r"infer\.yaml:1: infer\.prot: unknown key .*`port`"):
        (folder / "infer.yaml").write_text("prot: 3\n")
        load_section("infer", "infer.yaml")
    with pytest.raises(ConfigError, match="is not a section"):
        load_section("infer", None, ["train.seed=1"])
    with pytest.raises(ConfigError, match=r"^orch\.yaml:1: looks like the `orch` section, but --infer"):
        load_section("infer", "orch.yaml")


def test_swapped_files_give_one_line(folder: Path):
    with pytest.raises(ConfigError, match=r"^orch\.yaml:1: looks like the `orch` section, but --train"):
        load_run(parts={"train": "orch.yaml", "orch": "train.yaml"})
    with pytest.raises(ConfigError, match=r"^run\.yaml:1: has the sections of a whole run; .*without --orch"):
        load_run(parts={"train": "train.yaml", "orch": "run.yaml"})
    (folder / "empty.yaml").write_text("{}\n")
    load_section("infer", "empty.yaml", ["infer.model=m"])  # a key of no section could belong to any


def test_nearest_file_is_near_by_its_name_not_by_its_suffix(folder: Path):
    with pytest.raises(ConfigError, match=r"^trian\.yaml: no such file; did you mean train\.yaml\?"):
        load_run(parts={"train": "trian.yaml"})
    with pytest.raises(ConfigError, match=r"^nope\.yaml: no such file; `shoal init DIR` writes examples"):
        load_run(parts={"train": "nope.yaml"})


def test_supervised_runs(folder: Path):
    keys = ["train.model=m", "train.max_steps=2", "dataset.path=d.jsonl", "batch_size=4"]
    config = load_supervised(SftConfig, None, keys).config
    assert (config.dataset.path, config.batch_size) == ("d.jsonl", 4)
    preferences = load_supervised(DpoConfig, None, [*keys, "loss.type=ipo", "loss.beta=0.3"]).config
    assert (preferences.dataset.path, preferences.loss.type, preferences.loss.beta) == ("d.jsonl", "ipo", 0.3)


@pytest.mark.parametrize("name", ["nope.yaml", ".", "latin1.yaml", "/dev/zero", "/dev/null"])
def test_files_that_are_none(folder: Path, name: str):
    (folder / "latin1.yaml").write_bytes(b"a: 1\nb: \xe9\n")
    with pytest.raises(ConfigError) as caught:
        load_run(name)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("override", "length"),
    [
        ("train.max_steps=5", (5, None, None)),
        ("train.epochs=2", (None, 2, None)),
        ("orch.max_steps=7", (None, None, 7)),
        ("train.max_steps=null", (None, None, 3)),
    ],
)
def test_training_length_options_override_each_other(folder: Path, override: str, length: tuple):
    """A resolved file contains train.max_steps and orch.max_steps. One override extends the run."""
    (folder / "orch.yaml").write_text(ORCH + "max_steps: 3\n")
    config = load_run(parts=PARTS, overrides=[override]).config
    assert (config.train.max_steps, config.train.epochs, config.orch.max_steps) == length
    both = load_run(parts=PARTS, overrides=["train.max_steps=5", "orch.max_steps=6"]).config
    assert (both.train.max_steps, both.orch.max_steps) == (5, 6), "repeated values are compared, not omitted"


def test_missing_section_names_its_required_key():
    with pytest.raises(ConfigError, match=r"orch: is required but not set; set orch\.env \(environments"):
        load_run(overrides=["train.model=models/tiny", "train.max_steps=2"])


def test_reading_a_configuration_imports_neither_numpy_nor_torch(folder: Path):
    script = (
        "import sys\nfrom shoal.config.load import load_run\nfrom shoal.config.resolve import resolve_run\n"
        "from shoal.config.rules import check_run\nconfig = load_run('run.yaml').config\ncheck_run(config)\n"
        "resolve_run(config)\nprint([name for name in ('numpy', 'torch') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
