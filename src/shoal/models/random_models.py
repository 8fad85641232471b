"""Models with random weights: the demo's tiny model with a character tokenizer, and known shapes.

Called by `shoal make-model`. Seeded: the same command gives the same weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3Config

from shoal.core.errors import ConfigError
from shoal.models.chat_templates import CHATML

# Printable ASCII and the line break, enough for the built-in tasks; other characters become <unk>.
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
TAGS = ("<reversed_text>", "</reversed_text>", "<answer>", "</answer>", "<think>", "</think>")
ROLES = ("system", "user", "assistant", "tool")
CHAT_TEMPLATE = CHATML


def character_tokenizer(size: int | None = None) -> PreTrainedTokenizerFast:
    """One token per character; special tokens, task tags and role names are single tokens.

    `size` pads the vocabulary with placeholder words, so that every id a model of that size samples can be decoded.
    """
    words = [*SPECIAL, *TAGS, *ROLES, *CHARACTERS]
    words += [f" w{i}" for i in range(len(words), size or 0)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    # A role name is one token only directly after the token that opens a turn.
    roles = "|".join(ROLES)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(rf"\A(?:{roles})(?=\n)|[\s\S]"), "isolated")  # type: ignore[assignment]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, special=False, normalized=False) for word in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(vocab_size: int) -> Qwen3Config:
    """Three layers, wide initial weights, and a small rotary base that separates the positions of short texts."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        initializer_range=0.04,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
        bos_token_id=None,
    )


def shape_config(shape: str) -> Qwen2Config | Qwen3Config:
    theta = {"rope_type": "default", "rope_theta": 1_000_000.0}
    common = {"vocab_size": 151_936, "max_position_embeddings": 32_768, "bos_token_id": None}
    if shape == "qwen3-0.6b":
        return Qwen3Config(
            hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, tie_word_embeddings=True, rope_parameters=theta, **common,
        )  # fmt: skip
    if shape == "qwen2.5-0.5b":
        return Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=theta, **common,
        )  # fmt: skip
    if shape == "qwen2.5-7b":
        return Qwen2Config(
            hidden_size=3584, intermediate_size=18_944, num_hidden_layers=28, num_attention_heads=28,
            num_key_value_heads=4, tie_word_embeddings=False, rope_parameters=theta, **common,
        )  # fmt: skip
    raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


SHAPES = ("qwen3-0.6b", "qwen2.5-0.5b", "qwen2.5-7b")


def make_model(kind: str, folder: Path, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Write model and tokenizer into `folder`; `kind` is "tiny" or one of SHAPES."""
    torch.manual_seed(seed)
    if kind == "tiny":
        tokenizer = character_tokenizer()
        config, default_dtype = tiny_config(len(tokenizer)), torch.float32
    else:
        config, default_dtype = shape_config(kind), torch.bfloat16
        tokenizer = character_tokenizer(config.vocab_size)
        config.eos_token_id = SPECIAL.index("<|im_end|>")
        config.pad_token_id = SPECIAL.index("<|endoftext|>")
    model = AutoModelForCausalLM.from_config(config, dtype=dtype or default_dtype)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
