"""Any content of a file, an override or a row gives a result or one clear error with exit code 2."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.build.load import check_launch
from shoal.config.load import ConfigDraft, load_data, load_run
from shoal.config.rules import check_run
from shoal.config.schema import RunConfig
from shoal.core.errors import EXIT_USAGE, ConfigError, DataError
from shoal.envs.datasets import DatasetSpec, fingerprint, supervised_tasks

bounded = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
    | st.sampled_from(["${HOME}", "${NOT_SET_AT_ALL}", "../x", "1e400", "nan", "0x10", "\x1b[31m", "é", "-1", "[", "{"])
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
GOOD: dict[str, Any] = {
    "train": {"model": "m", "max_steps": 3, "output_dir": "out"},
    "orch": {"env": [{"id": "arithmetic"}], "batch_size": 8, "rollouts_per_example": 4},
}


def dotted_keys(schema: dict[str, Any], root: dict[str, Any], prefix: str = "") -> list[str]:
    """All keys of the configuration, from its JSON schema."""
    found: list[str] = []
    for part in [schema, *schema.get("anyOf", []), *schema.get("oneOf", []), *schema.get("allOf", [])]:
        if "$ref" in part:
            part = root["$defs"][part["$ref"].rsplit("/", 1)[-1]]
        for name, inner in part.get("properties", {}).items():
            found += [f"{prefix}{name}", *dotted_keys(inner, root, f"{prefix}{name}.")]
    return sorted(set(found))


SCHEMA = RunConfig.model_json_schema()
KEYS = dotted_keys(SCHEMA, SCHEMA)


def judge(work: Any) -> None:
    """A result, or an error of Shoal that can be printed."""
    try:
        work()
    except ConfigError as error:
        assert error.exit_code == EXIT_USAGE and str(error).strip()
        assert "\x1b" not in str(error), "control characters never reach the terminal"


def check(draft: ConfigDraft[RunConfig]) -> None:
    check_run(draft.config).raise_errors(draft.origins)


def test_keys_are_those_of_the_configuration():
    assert len(KEYS) > 100 and {"train.loss.kl.beta", "orch.sampling.temperature", "infer.port"} <= set(KEYS)


@bounded
@given(st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=3))
def test_overrides(pairs: list[tuple[str, Any]]):
    overrides = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in pairs]
    judge(lambda: check(load_data(GOOD, overrides, rules=check_launch)))


@bounded
@given(st.text(max_size=60))
def test_overrides_that_are_any_text(text: str):
    judge(lambda: load_data(GOOD, [text]))


@bounded
@given(st.lists(st.tuples(st.sampled_from(KEYS), values), min_size=1, max_size=3))
def test_configuration_files(pairs: list[tuple[str, Any]]):
    data = json.loads(json.dumps(GOOD))
    for key, value in pairs:
        *sections, last = key.split(".")
        place = data
        for section in sections:
            if not isinstance(place.get(section), dict):
                place[section] = {}
            place = place[section]
        place[last] = value
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_text(yaml.safe_dump(data, allow_unicode=True), "utf-8", "surrogatepass")
        judge(lambda: check(load_run(str(file), rules=check_launch)))


@bounded
@given(st.binary(max_size=200) | st.text(alphabet="{}[]:,-&*!|>'\"#%@ \n\tab1", max_size=80).map(str.encode))
def test_configuration_files_that_are_any_bytes(content: bytes):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.yaml"
        file.write_bytes(content)
        judge(lambda: load_run(str(file)))


prompts = st.text(max_size=8) | st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "x"]), "content": values}), max_size=3
)
rows = st.one_of(
    st.fixed_dictionaries({"prompt": prompts, "completion": values}),
    st.fixed_dictionaries({"prompt": st.just("q"), "completion": st.text(min_size=1, max_size=5), "more": values}),
    st.fixed_dictionaries({"messages": prompts | values}),
    values,
)


@bounded
@given(st.lists(rows, max_size=4), st.booleans())
def test_rows_of_a_data_set(content: list[Any], as_json: bool):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / ("rows.json" if as_json else "rows.jsonl")
        lines = "\n".join(json.dumps(row) for row in content)
        file.write_text(json.dumps(content) if as_json else lines)
        try:
            tasks = supervised_tasks(DatasetSpec(path=str(file)))
        except DataError:
            return
        assert all(isinstance(task.data["completion"], str) and task.messages for task in tasks)
        assert fingerprint(tasks) == fingerprint(tasks)


@bounded
@given(st.binary(max_size=200), st.sampled_from([".jsonl", ".json", ".csv", ".parquet"]))
def test_data_files_that_are_any_bytes(content: bytes, suffix: str):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows{suffix}"
        file.write_bytes(content)
        judge(lambda: supervised_tasks(DatasetSpec(path=str(file))))


def test_nesting_is_bounded_everywhere(tmp_path: Path):
    for levels in (99, 300, 3_000):
        nested = "[" * levels + "]" * levels
        file = tmp_path / "rows.jsonl"
        file.write_text(f'{{"prompt": "q", "completion": "a", "x": {nested}}}\n')
        if levels < 100:
            assert supervised_tasks(DatasetSpec(path=str(file)))
        else:
            with pytest.raises(DataError, match="nested"):
                supervised_tasks(DatasetSpec(path=str(file)))
        judge(lambda text=nested: load_data(GOOD, [f"train.seed={text}"]))
        (tmp_path / "run.yaml").write_text(f"train: {nested}")
        judge(lambda: load_run(str(tmp_path / "run.yaml")))
