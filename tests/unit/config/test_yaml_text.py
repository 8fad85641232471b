"""YAML 1.2 numbers and words, line numbers of keys, variables, and texts that must be refused."""

import math

import pytest

from shoal.config.yaml_text import Source, parse_yaml
from shoal.core.errors import ConfigError

SOURCE = Source("run.yaml")


def value(text: str, **environ: str):
    return parse_yaml(f"a: {text}", SOURCE, environ).value["a"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2e-4", 2e-4), ("1E5", 1e5), (".5", 0.5), ("1.", 1.0), ("-3", -3), ("+3", 3), ("010", 10), ("0x1F", 31),
        ("0o17", 15),
        ("true", True), ("False", False), ("null", None), ("~", None), ("", None), ("'2e-4'", "2e-4"),
        ("on", "on"), ("off", "off"), ("yes", "yes"), ("no", "no"), ("y", "y"), ("1_000", "1_000"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"), ("[1, a]", [1, "a"]), ("{b: 1}", {"b": 1}), ("0b1", "0b1"), ("1.2.3", "1.2.3"),
    ],
)  # fmt: skip
def test_yaml_1_2_scalars(text: str, expected: object):
    assert value(text) == expected
    assert type(value(text)) is type(expected)


def test_infinity_and_nan():
    assert value(".inf") == math.inf and value("-.INF") == -math.inf
    assert math.isnan(value(".NaN"))


def test_lines_match_the_keys():
    document = parse_yaml("a: 1\nb:\n  c:\n    - x\n    - d: 2\n", SOURCE, {})
    assert document.lines[("a",)] == 1
    assert document.lines[("b", "c")] == 3
    assert document.lines[("b", "c", 1, "d")] == 5


def test_variables():
    assert value("${DIR}/model", DIR="/data") == "/data/model"
    assert value("${LR}", LR="1e-5") == 1e-5
    assert value("'${LR}'", LR="1e-5") == "1e-5"
    document = parse_yaml("a: ${KEY}", SOURCE, {"KEY": "private"})
    assert document.templates[("a",)] == "${KEY}"


@pytest.mark.parametrize("text", ["a: ${NOPE}", "a: ${}", "a: ${x y}"])
def test_variables_that_are_not_there(text: str):
    with pytest.raises(ConfigError, match=r"run\.yaml:1: "):
        parse_yaml(text, SOURCE, {})


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\na: 2\n", 2, "duplicate"),
        ("a:\n\tb: 1\n", 2, "tab"),
        ("a: [1, 2\n", 2, "invalid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "documents"),
        ("a: !!python/name:os.system\n", 1, "not allowed"),
        ("a: !thing 3\n", 1, "not allowed"),
        ("? [x]\n: 1\n", 1, "key must be a string"),
        ("a: &a {b: *a}\n", 1, "alias"),
        ("a: \x07\n", 1, "character"),
    ],
)
def test_refused_with_one_line(text: str, line: int, words: str):
    with pytest.raises(ConfigError, match=rf"run\.yaml:{line}: .*{words}"):
        parse_yaml(text, SOURCE, {})


def test_alias_used_in_measure_is_fine():
    assert parse_yaml("a: &x [1]\nb: *x\n", SOURCE, {}).value == {"a": [1], "b": [1]}


def test_argument_error_has_no_line_number():
    with pytest.raises(ConfigError, match=r"^here: invalid"):
        parse_yaml("[1", Source("here", has_lines=False), {})
