"""Tokenizers for tests of chats: characters, and a small byte-pair tokenizer whose merges cross word borders."""

from __future__ import annotations

from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from shoal.models.random_models import CHAT_TEMPLATE, SPECIAL

# Like reasoning models: the template removes reasoning of earlier answers and trims content.
THINK_TEMPLATE = (
    "{%- for m in messages -%}"
    "{%- set content = m['content'] | trim -%}"
    "{%- if m['role'] == 'assistant' and '</think>' in content -%}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}"
    "{%- endif -%}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' + ('<think>\\n' if enable_thinking is not defined or enable_thinking else '') }}"
    "{%- endif -%}"
)
TEXT = (
    "the quick brown fox jumps over the lazy dog. what is 12 plus 30? it is 42.\n"
    "system user assistant think answer reversed text <think> </think> hello, world! say it again: hello.\n"
) * 20


@lru_cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)  # type: ignore[call-arg]
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return tokenizer.to_str()


def byte_pair_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Only the end-of-turn token has a name. The token that opens a turn is only marked as special, as usual."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained()),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )
