"""The `final/` folder of a run loads in plain transformers and PEFT with the log-probs of the policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, attach
from shoal.trainer.checkpoint import export_weights
from shoal.trainer.policy import TrainedPolicy
from support.models import ARCHITECTURES, TOKENIZER, as_decoder, lora_decoder, small_decoder, small_model
from support.training import grpo, make_policy, pack, random_samples

SAMPLES = random_samples(0, (5, 20), (30, 9))


@torch.no_grad()
def plain_logprobs(model: Any) -> dict[str, np.ndarray]:
    """Transformers alone, one sequence at a time, with "eager" attention, because the default may omit soft-capping."""
    found = {}
    for (sample,) in SAMPLES:
        ids = torch.tensor(sample.token_ids)
        scored = torch.log_softmax(model.eval()(ids[None]).logits[0, :-1].float(), -1).gather(-1, ids[1:, None])[:, 0]
        found[sample.rollout_id] = scored.numpy()[sample.loss_mask[1:]]
    return found


def policy_logprobs(policy: TrainedPolicy) -> dict[str, np.ndarray]:
    found = {}
    for rollout in SAMPLES:
        (row,) = pack([rollout]).rows
        found[rollout[0].rollout_id] = policy.logprobs([row]).read()[1][0][row.loss_mask]
    return found


def trained(decoder: Decoder) -> TrainedPolicy:
    policy = make_policy(decoder)
    for _ in range(2):
        policy.forward_backward(pack(SAMPLES).rows, grpo())
        policy.optim_step()
    return policy


def assert_same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], atol: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_allclose(values, other[name], rtol=0, atol=atol)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_full_model_in_transformers(architecture: str, tmp_path: Path) -> None:
    policy = trained(small_decoder(architecture))
    export_weights(policy, TOKENIZER, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    assert_same(policy_logprobs(policy), plain_logprobs(loaded))
    for (name, ours), theirs in zip(policy.decoder.model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_bf16_model_in_transformers(tmp_path: Path) -> None:
    policy = trained(small_decoder(dtype=torch.bfloat16))
    export_weights(policy, TOKENIZER, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    for (name, ours), theirs in zip(policy.decoder.model.named_parameters(), loaded.parameters(), strict=True):
        assert theirs.dtype == torch.bfloat16 and torch.equal(ours, theirs), name


@pytest.mark.parametrize("architecture", ("qwen3", "llama-tied", "gemma2"))
def test_adapter_in_peft(architecture: str, tmp_path: Path) -> None:
    """The base is a folder, as in a run, so the adapter names where it is."""
    small_model(architecture).save_pretrained(tmp_path / "base")
    base: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
    )
    policy = trained(Decoder(attach(as_decoder(base).model, LoraSettings(rank=4))))
    export_weights(policy, TOKENIZER, tmp_path / "final")
    ours = policy_logprobs(policy)
    assert_same(
        ours,
        plain_logprobs(
            AutoPeftModelForCausalLM.from_pretrained(
                tmp_path / "final", dtype=torch.float32, attn_implementation="eager"
            )
        ),
    )
    again: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32, attn_implementation="eager"
    )
    bare = plain_logprobs(again)
    merged = PeftModel.from_pretrained(again, str(tmp_path / "final")).merge_and_unload()
    assert_same(ours, plain_logprobs(merged), atol=2e-5)
    assert max(np.abs(bare[name] - values).max() for name, values in ours.items()) > 1e-3, "it was trained"


def test_tokenizer_is_exported(tmp_path: Path) -> None:
    export_weights(make_policy(lora_decoder()), TOKENIZER, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    messages = [{"role": "user", "content": "Hello <answer>"}]
    assert loaded.chat_template == TOKENIZER.chat_template
    assert loaded.apply_chat_template(messages, tokenize=False) == TOKENIZER.apply_chat_template(
        messages, tokenize=False
    )
    assert loaded.encode("Hello <answer>") == TOKENIZER.encode("Hello <answer>")
    assert loaded.eos_token_id == TOKENIZER.eos_token_id
