"""The text of a problem, and values that are never shown."""

import pytest

from shoal.config.fields import nearest, suggestion
from shoal.config.problems import Origins, Problem, is_secret, printable, render, show
from shoal.config.schema import RunConfig


@pytest.mark.parametrize("key", ["api_key", "hf_token", "password", "WANDB_API_KEY", "client.secret"])
def test_secret_keys(key: str):
    assert is_secret(key)
    assert show("canary", ("env", key)) == "[hidden]"


@pytest.mark.parametrize("key", ["max_tokens", "api_key_var", "keys", "monkey", "tokens"])
def test_keys_that_are_not_secret(key: str):
    assert not is_secret(key)


def test_number_is_never_a_secret():
    assert show(32, ("sampling", "max_token")) == "32"


def test_show():
    assert show(True) == "true"
    assert show(None) == "null"
    assert show(float("nan")) == ".nan"
    assert show("a" * 200).endswith("…") and len(show("a" * 200)) == 78
    assert show({"password": "canary"}) == '{"password": "[hidden]"}'


def test_control_characters_are_escaped():
    assert printable("a\x1b[31m\u202eb") == "a\\x1b[31m\\u202eb"
    text = render([Problem(("a\x1b", "b"), "is\nwrong")], Origins(default="f\x07"))
    assert text == "f\\x07: a\\x1b.b: is\\nwrong"


def test_location_is_that_of_the_nearest_known_key():
    origins = Origins({("a",): "f:1", ("a", "b"): "f:2"}, default="nowhere")
    assert [origins.at(path) for path in (("a", "b", "c"), ("a", "x"), ("z",))] == ["f:2", "f:1", "nowhere"]
    origins.forget(("a", "b"))
    assert origins.at(("a", "b")) == "f:1"


@pytest.mark.parametrize(
    ("parent", "key", "expected"),
    [
        (("train",), "learningrate", "did you mean `learning_rate`?"),
        (("train",), "max_tokens", "`max_tokens` belongs at `orch.sampling.max_tokens`"),
        (("infer",), "temprature", "did you mean `orch.sampling.temperature`?"),
        (("orch", "groups"), "zzzz", "known keys here: uniform, max_refill, filter"),
        ((), "training", "did you mean `train`?"),
        (("train",), "sedd", "did you mean `seed`?"),
    ],
)
def test_suggestions(parent: tuple[str, ...], key: str, expected: str):
    assert suggestion(RunConfig, parent, key) == expected


def test_transposed_letters_are_suggested_first():
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == "grpo" and nearest("gsppo", ["grpo", "gspo"]) == "gspo"
    assert nearest("zzz", ["grpo"]) is None
