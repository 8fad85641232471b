"""A tiny model that was trained to call a tool: `increment` with a random step, then a last answer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from shoal.models.chat import Chat
from shoal.models.tokenizer import load_tokenizer
from support.folders import write_model

STEPS = 100


def write_calling_model(folder: Path) -> Path:
    """For prompts such as "Increment the counter by 3." with numbers from 1 to 6."""
    write_model(folder)
    chat, rng = Chat(load_tokenizer(str(folder))), random.Random(0)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(STEPS):
        ids, labels = zip(*(_example(chat, rng) for _ in range(8)), strict=True)
        loss = model(input_ids=torch.tensor(ids), labels=torch.tensor(labels)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def _example(chat: Chat, rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids of a conversation, and the labels of what the model says in it. All have the same length."""
    step = rng.randint(1, 6)
    call = json.dumps({"name": "increment", "arguments": {"step": step}})
    messages: list[dict[str, Any]] = [{"role": "user", "content": f"Increment the counter by {rng.randint(1, 6)}."}]
    ids = chat.prompt_ids(messages)
    labels = [-100] * len(ids)
    for text, result in ((call, str(step)), ("ok", None)):
        said = [*chat.encode(text), chat.tokenizer.eos_token_id]
        ids, labels = ids + said, labels + said
        if result is not None:
            messages += [{"role": "assistant", "content": text}]
            following = [{"role": "tool", "tool_call_id": "call_2_0", "name": "increment", "content": result}]
            longer = chat.next_prompt_ids(ids, messages, following)
            labels += [-100] * (len(longer) - len(ids))
            ids = longer
    return ids, labels
