"""Chat templates for models without one, and for models whose template is replaced. Called by load_tokenizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CHARACTERS = 1_000_000
CHATML = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
# For base models: nothing but text and the token that ends every text they were trained on.
PLAIN = (
    "{%- for message in messages -%}"
    "{%- if loop.first and bos_token -%}{{ bos_token }}{%- endif -%}"
    "{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{%- if message['role'] == 'assistant' -%}{{ eos_token }}{%- endif -%}{{ '\\n\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 'Assistant:' }}{%- endif -%}"
)
# Name → template, and the tokens that the vocabulary must have.
BUILT_IN: dict[str, tuple[str, tuple[str, ...]]] = {
    "chatml": (CHATML, ("<|im_start|>", "<|im_end|>")),
    "plain": (PLAIN, ()),
}
HOW = (
    "set orch.chat_template (for `shoal sft`: chat_template, for a server: infer.chat_template) to "
    f"{', '.join(BUILT_IN)} or a file with a Jinja template"
)


def with_chat_template(tokenizer: PreTrainedTokenizerBase, source: str) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with the template `source`, which is a built-in name or a file."""
    found = copy.deepcopy(tokenizer)
    if source not in BUILT_IN:
        found.chat_template = read_template(source)
        return found
    found.chat_template, needed = BUILT_IN[source]
    vocabulary = found.get_vocab()
    if missing := [token for token in needed if token not in vocabulary]:
        raise ModelError(
            f"chat_template: {source!r} needs the token {missing[0]}, which the tokenizer lacks; use 'plain'"
        )
    if source == "plain" and not found.eos_token:
        raise ModelError("chat_template: 'plain' needs an end-of-sequence token, which the tokenizer does not have")
    return found


def read_template(source: str) -> str:
    """The text of a template file. Raises ModelError that says what else the key may be."""
    path = Path(source).expanduser()
    names = f"it must be {', '.join(BUILT_IN)} or a file with a Jinja template"
    if not path.is_file():
        raise ModelError(f"chat_template: {source!r} is not a file; {names}")
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"chat_template: {source!r} cannot be read: {error}; {names}") from error
    if not text.strip() or len(text) > MAX_CHARACTERS:
        raise ModelError(f"chat_template: {source!r} has {len(text)} characters; {names}")
    return text
