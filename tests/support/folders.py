"""A model folder as users have it: the demo's tiny model made smaller, random weights, character tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from shoal.models.random_models import character_tokenizer, tiny_config


def write_model(folder: Path, seed: int = 0) -> Path:
    tokenizer = character_tokenizer()
    config = tiny_config(len(tokenizer))
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 64, 128, 2
    config.layer_types = ["full_attention"] * 2
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
