"""Chat templates that are broken or dangerous are refused when the tokenizer is loaded, within seconds."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.core.errors import EXIT_USAGE, ModelError
from shoal.models import template_check
from shoal.models.template_check import check_template
from shoal.models.tokenizer import load_tokenizer, turn_end_id
from support.models import TOKENIZER

NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BAD = {
    "syntax": ("{% if messages %}", "endif"),
    "unknown tag": ("{% launch %}", "launch"),
    "unknown filter": ("{{ messages | nothing }}", "nothing"),
    "sandbox": ("{{ messages.__class__.__mro__ }}", "SecurityError"),
    "sandbox call": ("{{ ''.__class__.__base__.__subclasses__() }}", "SecurityError"),
    "mutation": ("{{ messages.append(1) }}", "SecurityError"),
    "range": ("{% for i in range(10**9) %}{% endfor %}", "Range"),
    "type": ("{{ 1 + 'a' }}", "TypeError"),
    "refuses": ("{{ raise_exception('no assistant') }}", "no assistant"),
    "recursion": ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "itself"),
    "explodes": ("{{ 'x' * 10**10 }}", "MiB"),
    "explodes by formatting": ("{{ '%10000000000d' % 1 }}", "MiB"),
    "much output": ("{{ 'x' * 10**7 }}", "10,000,000"),
}


def tokenizer_with(template: str) -> Any:
    class Tokenizer:
        def apply_chat_template(self, *arguments: Any, **options: Any) -> Any:
            return TOKENIZER.apply_chat_template(*arguments, **{**options, "chat_template": template})

    return Tokenizer()


@pytest.mark.parametrize("kind", BAD)
def test_bad_template_is_one_clear_error(kind: str):
    template, named = BAD[kind]
    began = time.monotonic()
    with pytest.raises(ModelError, match=named) as caught:
        check_template(tokenizer_with(template), "models/x")
    assert time.monotonic() - began < 5 and caught.value.exit_code == EXIT_USAGE
    assert "models/x" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("condition", ["true", "add_generation_prompt"])
def test_endless_template_is_stopped(condition: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_check, "TIME_LIMIT_S", 0.5)
    began = time.monotonic()
    with pytest.raises(ModelError, match="within"):
        check_template(tokenizer_with(f"{{% if {condition} %}}{NESTED}{{% endif %}}"), "x")
    assert time.monotonic() - began < 4


def test_template_that_rejects_system_prompts_is_accepted():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    check_template(tokenizer_with(template), "x")


def test_loading_a_tokenizer_checks_its_template(tmp_path: Path):
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    load_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    (tmp_path / "chat_template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(ModelError, match="chat template"):
        load_tokenizer(str(tmp_path))


def test_tokenizer_of_a_script_is_checked_too():
    with pytest.raises(ModelError, match="chat template"):
        turn_end_id(tokenizer_with("{{ messages.__class__ }}{% endif %}"))


PIECES = (
    "{% for m in messages %}", "{% endfor %}", "{{ m.content }}", "{% if tools %}", "{% endif %}", "{% macro a(b) %}",
    "{% endmacro %}", "{{ a(a) }}", "{{ messages[9] }}", "{{ messages|tojson }}", "{{ 'x' * 999 }}", "{{ 10**9 }}",
    "{% set ns = namespace(n=0) %}", "{{ ''.__class__ }}", "{{ raise_exception('no') }}", "{% break %}", "{{",
    "%}", "{% include 'x' %}", "{% import 'os' as os %}", "{{ range(10**7)|list }}", "{{ 1/0 }}", "{{ m|attr('f') }}",
)  # fmt: skip


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=6).map("".join))
def test_any_template_is_accepted_or_refused(template: str):
    with suppress(ModelError):
        check_template(tokenizer_with(template), "x")
