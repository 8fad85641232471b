"""Models with random weights: the demo's tiny model with a character tokenizer, and known shapes.

Called by `shoal make-model`, and for `train.model: shape:NAME`. Seeded: the same command gives the same weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from shoal.config.model_names import SHAPES, shape_problem
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


def shape_config(name: str) -> Any:
    """The config of a shape. Its special tokens are those of `character_tokenizer`."""
    if problem := shape_problem(name):
        raise ConfigError(f"{problem[0]}; {problem[1]}")
    shape = SHAPES[name]
    config = getattr(transformers, shape.config)(**{"vocab_size": len(character_tokenizer()), **shape.arguments})
    config.bos_token_id = None
    config.eos_token_id = SPECIAL.index("<|im_end|>")
    config.pad_token_id = SPECIAL.index("<|endoftext|>")
    return config


def shape_tokenizer(name: str) -> PreTrainedTokenizerFast:
    return character_tokenizer(shape_config(name).vocab_size)


def tiny_config(vocab_size: int) -> Any:
    config = shape_config("tiny")
    config.vocab_size = vocab_size
    return config


def random_model(name: str, dtype: torch.dtype, device: torch.device, seed: int = 0) -> nn.Module:
    """A model of a shape, whose weights are drawn on the device. The same seed and device give the same weights."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(shape_config(name), dtype=dtype)


def make_model(kind: str, folder: Path, seed: int = 0, dtype: torch.dtype | None = None) -> nn.Module:
    """Write model and tokenizer into `folder`; `kind` is one of SHAPES."""
    dtype = dtype or (torch.float32 if kind == "tiny" else torch.bfloat16)
    model: Any = random_model(kind, dtype, torch.device("cpu"), seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    shape_tokenizer(kind).save_pretrained(folder)
    return model
