"""The JSON schema for editors: every key, the short forms, and no false error for a file that Shoal accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.config.fields import field_names, fields_of, walk_keys
from shoal.config.load import load_run
from shoal.config.reference import json_schema, schema_file
from shoal.config.schema import SECTIONS, RunConfig
from shoal.config.yaml_text import Source, parse_yaml
from shoal.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[3] / "examples"
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,), "array": (list,), "string": (str,), "integer": (int,), "number": (int, float),
    "boolean": (bool,), "null": (type(None),),
}  # fmt: skip


def accepts(schema: Any, value: Any, root: dict[str, Any]) -> bool:
    """Validation by the part of JSON schema for keys, types and choices."""
    if "$ref" in schema:
        return accepts(root["$defs"][schema["$ref"].rpartition("/")[2]], value, root)
    if "anyOf" in schema and not any(accepts(part, value, root) for part in schema["anyOf"]):
        return False
    if "oneOf" in schema and sum(accepts(part, value, root) for part in schema["oneOf"]) != 1:
        return False
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        return False
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        known = schema.get("properties", {})
        if schema.get("additionalProperties") is False and not set(value) <= set(known):
            return False
        if not set(schema.get("required", ())) <= set(value):
            return False
        return all(accepts(known[key], item, root) for key, item in value.items() if key in known)
    return not isinstance(value, list) or all(accepts(schema.get("items", {}), item, root) for item in value)


def data_of(text: str) -> Any:
    return parse_yaml(text, Source("x"), {}).value


def test_preference_training():
    schema = json_schema("dpo")
    data: dict[str, Any] = {"train": {"model": "m"}, "dataset": {"path": "d"}}
    for loss in ({}, {"beta": 0.2}, {"type": "ipo", "sft_weight": 0.5}, {"type": "robust", "label_smoothing": 0.1}):
        assert accepts(schema, {**data, "loss": loss}, schema), loss
    for loss in ({"type": "grpo"}, {"type": "ipo", "label_smoothing": 0.1}):
        assert not accepts(schema, {**data, "loss": loss}, schema), loss


@pytest.mark.parametrize("name", SECTIONS)
def test_examples_are_accepted(name: str):
    data = data_of((EXAMPLES / "grpo" / f"{name}.yaml").read_text())
    schema = json_schema(name)
    assert accepts(schema, data, schema)
    assert not accepts(schema, {**data, "no_such_key": 1}, schema)


SHORT_FORMS = """
train: {model: m, max_steps: 1, report_to: wandb, loss: {type: ppo, clip_low: 0.1}, lora: true, lora_target_modules: q}
infer: {tensor_parallel_size: 1}
orch:
  env: arithmetic
  sampling: {stop: x, temperature: {start: 1.0, end: 0.5}}
  advantage: {mean: group}
  reward: {clip: 5}
  truncated: mask
"""


@pytest.mark.parametrize(
    ("old", "new", "accepted"),
    [
        ("", "", True),
        ("type: ppo, clip_low: 0.1", "kl_tau: 0.1", True),
        ("type: ppo, ", "", False),
        ("{type: ppo, clip_low: 0.1}", "{type: 'my.module:loss'}", True),
        ("advantage: {mean: group}", "advantage: 'my.module:estimate'", True),
        ("env: arithmetic", "env: [arithmetic, {id: countdown}]", True),
        ("env: arithmetic", "dataset: {path: rows}", True),
        ("env: arithmetic", "batch_size: 8", False),
        ("max_steps: 1", "max_steps: '1'", False),
        ("type: ppo", "type: pppo", False),
        ("clip_low", "clip_lower", False),
        ("report_to: wandb", "report_to: wandbb", False),
    ],
)
def test_schema_agrees_with_the_loader(old: str, new: str, accepted: bool, tmp_path: Path):
    text = SHORT_FORMS.replace(old, new) if old else SHORT_FORMS
    schema = json_schema()
    assert accepts(schema, data_of(text), schema) is accepted
    (tmp_path / "run.yaml").write_text(text)
    if accepted:
        load_run(str(tmp_path / "run.yaml"))
    else:
        with pytest.raises(ConfigError):
            load_run(str(tmp_path / "run.yaml"))


def test_every_key_has_its_description():
    schema = json_schema()
    text = json.dumps(schema)
    for key in walk_keys(RunConfig):
        assert json.dumps(key.info.description) in text, key.dotted
    for section in SECTIONS.values():
        properties = schema["$defs"][section.__name__]["properties"]
        assert {name for field, info in fields_of(section).items() for name in field_names(field, info)} <= set(
            properties
        )


def test_schema_file_is_json():
    name, text = schema_file("orch")
    assert name == "orch.schema.json" and json.loads(text) == json_schema("orch")
