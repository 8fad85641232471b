"""Chat templates that replace the tokenizer's: built-in ones, files, and refused templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from shoal.build.model import make_chat
from shoal.build.sampler import chat_options
from shoal.config.orch import OrchConfig
from shoal.core.errors import ModelError
from shoal.models.chat_templates import CHATML, PLAIN, with_chat_template
from shoal.models.random_models import character_tokenizer
from shoal.models.tokenizer import load_tokenizer, turn_end_id
from support.models import EOS, small_model

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, {"role": "user", "content": "and?"}]


def base_model(folder: Path) -> str:
    small_model("llama").save_pretrained(folder)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_base_model_gets_a_chat_template_that_is_saved(tmp_path: Path) -> None:
    name = base_model(tmp_path / "base")
    with pytest.raises(ModelError, match=r"orch\.chat_template"):
        load_tokenizer(name)
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}")
    for source, text in (("plain", PLAIN), ("chatml", CHATML), (str(own), own.read_text())):
        chat = make_chat(name, chat_template=source)
        assert chat.tokenizer.chat_template == text and turn_end_id(chat.tokenizer) == EOS
        chat.tokenizer.save_pretrained(tmp_path / "final")
        assert AutoTokenizer.from_pretrained(tmp_path / "final").chat_template == text
    assert make_chat(name, chat_template="plain").full_text(
        make_chat(name, chat_template="plain").prompt_ids(TALK)
    ) == ("User: hi\n\nAssistant: ho<|im_end|>\n\nUser: and?\n\nAssistant:")


def test_keys_of_a_run_reach_its_chat(tmp_path: Path) -> None:
    orch = OrchConfig.model_validate({"env": "arithmetic", "chat_template": "plain", "chat_history": "template"})
    chat = make_chat(base_model(tmp_path), **chat_options(orch))
    prompt = chat.prompt_ids(TALK[:1])
    sampled = [prompt[0], EOS]  # no tokenizer would produce these ids
    after = chat.next_prompt_ids([*prompt, *sampled], TALK[:2], TALK[2:])
    assert after == chat.prompt_ids(TALK) and after[: len(prompt) + 2] != [*prompt, *sampled]


def test_object_of_the_caller_is_not_changed() -> None:
    tokenizer = character_tokenizer()
    chat = make_chat("", tokenizer, chat_template="plain")
    assert chat.tokenizer.chat_template == PLAIN and tokenizer.chat_template == CHATML
    assert make_chat("", tokenizer).tokenizer is tokenizer


def test_invalid_templates_are_refused(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    for source in ("chatlm", str(tmp_path), str(tmp_path / "none.jinja")):
        with pytest.raises(ModelError, match="must be chatml, plain or a file"):
            with_chat_template(tokenizer, source)
    (tmp_path / "empty.jinja").write_text("\n")
    (tmp_path / "bytes.jinja").write_bytes(b"\xff\xfe\x00")
    for name in ("empty.jinja", "bytes.jinja"):
        with pytest.raises(ModelError, match=name):
            with_chat_template(tokenizer, str(tmp_path / name))
    (tmp_path / "broken.jinja").write_text("{% for %}")
    with pytest.raises(ModelError, match="cannot be used"):
        load_tokenizer(base_model(tmp_path / "base"), str(tmp_path / "broken.jinja"))


def test_chatml_needs_its_tokens() -> None:
    with pytest.raises(ModelError, match=r"needs the token <\|im_start\|>.*plain"):
        with_chat_template(
            PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a"))), "chatml"
        )
