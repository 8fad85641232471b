"""Three optimizer steps of `shoal dpo` against those of TRL's DPOTrainer: metrics, gradient norm and weights.

fixtures/trl_dpo.py recorded TRL's numbers, and has the rows, the cases and the weights that both sides start from.
TRL computes both sides of all pairs in one padded batch with autograd through the loss. Here they are packed into
several rows and trained with fixed weights per token. Tolerance: rounding of fp32 over three steps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from fixtures.trl_dpo import (
    CASES,
    FILE,
    LEARNING_RATE,
    LORA_ALPHA,
    LORA_RANK,
    PAIRS,
    STEPS,
    base_model,
    change_of,
    set_adapters,
    weights_of,
)
from shoal.config.preference import PreferenceLossConfig
from shoal.core.types import Task
from shoal.envs.datasets import to_messages
from shoal.models.chat import Chat
from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, as_reference, attach
from shoal.trainer.optimizer import AdamSettings, Schedule
from shoal.trainer.policy import Reference
from shoal.trainer.supervised import PreferenceSteps, preference_pairs
from support.models import EOS, TOKENIZER, as_decoder
from support.training import make_policy

TRL = json.loads(FILE.read_text("utf-8"))["cases"]
NAMES = {
    "dpo/loss": "loss",
    "dpo/chosen_reward": "rewards/chosen",
    "dpo/rejected_reward": "rewards/rejected",
    "dpo/accuracy": "rewards/accuracies",
    "dpo/margin": "rewards/margins",
    "dpo/chosen_logprobs": "logps/chosen",
    "dpo/rejected_logprobs": "logps/rejected",
    "optim/grad_norm": "grad_norm",
    "policy/entropy": "entropy",
}


def make_steps(loss: Mapping[str, Any], lora: bool) -> PreferenceSteps:
    decoder = as_decoder(base_model())
    reference = Reference(as_decoder(base_model()))
    if lora:
        model = attach(decoder.model, LoraSettings(LORA_RANK, LORA_ALPHA))
        set_adapters(model)
        decoder = Decoder(model)
        reference = Reference(decoder, lambda: as_reference(model))
    adam = AdamSettings(weight_decay=0.0)
    policy = make_policy(decoder, Schedule(LEARNING_RATE, STEPS), reference, adam=adam)
    tasks = [Task(to_messages(pair["prompt"]), pair) for pair in PAIRS]
    pairs, too_long = preference_pairs(tasks, Chat(TOKENIZER), EOS, 100)
    assert too_long == 0
    made = TypeAdapter(PreferenceLossConfig).validate_python(loss)
    return PreferenceSteps(policy, pairs, len(PAIRS), 80, 2, None, 0, made)


@pytest.mark.parametrize("case", CASES)
def test_three_steps_equal_trl(case: str) -> None:
    steps = make_steps(*CASES[case])
    model = steps.policy.decoder.model
    before = weights_of(model)
    for number, theirs in enumerate(TRL[case]["steps"], start=1):
        ours = steps.step(number)
        for name, trls in NAMES.items():
            assert ours[name] == pytest.approx(theirs[trls], rel=1e-4, abs=1e-5), (number, name)
    after = change_of(before, weights_of(model))
    assert after.keys() == TRL[case]["change"].keys()
    for name, theirs in TRL[case]["change"].items():
        assert after[name] == pytest.approx(theirs, rel=1e-3, abs=1e-4), name


def test_recorded_steps_trained_tokens() -> None:
    assert all(len(case["steps"]) == STEPS for case in TRL.values())
    assert all(torch.tensor(list(case["change"].values()))[:, 0].sum() > 0.1 for case in TRL.values())
