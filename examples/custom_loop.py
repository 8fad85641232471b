"""A custom training loop with a custom loss, built from shoal.recipes.rl_loop.

    shoal make-model tiny models/tiny
    python examples/custom_loop.py models/tiny

The task is to write in capital letters. A model with random weights learns it on a CPU in about a minute.
"""

from __future__ import annotations

import asyncio
import sys

import torch

from shoal.recipes.clients import AdamParams
from shoal.recipes.config import Config, DeployConfig, WeightSyncConfig
from shoal.recipes.datums import Datum, PromptGroup, build_grpo_datums
from shoal.recipes.infra import Infra, setup_infra

WORDS = ["shoal", "river", "stone", "cloud", "ember", "maple", "otter", "linen"]


def shouting(completion: str) -> float:
    """The share of capital letters."""
    return sum(letter.isupper() for letter in completion) / max(len(completion), 1)


def my_loss(datums: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """The clipped policy gradient, averaged over tokens. `logprobs` are the policy's: N-1 values for N tokens."""
    total, tokens = logprobs[0].new_zeros(()), 0
    for datum, policy in zip(datums, logprobs, strict=True):
        sampled = torch.as_tensor(datum.loss_mask, device=policy.device)
        sampler = policy.new_tensor(datum.sampler_logprobs[1:])  # the sampler returns N values; the first is None
        ratio = (policy - sampler)[sampled].exp()
        total = total + torch.maximum(-ratio * datum.advantage, -ratio.clamp(0.8, 1.2) * datum.advantage).sum()
        tokens += int(sampled.sum())
    return total / tokens, {"tokens": float(tokens)}


async def sample_groups(infra: Infra, words: list[str], n: int) -> list[PromptGroup]:
    answers = await asyncio.gather(*(infra.sampler.sample_with_tokens(f"Shout: {word}", n) for word in words))
    return [PromptGroup(group, [shouting(answer.text) for answer in group]) for group in answers]


def train(config: Config, steps: int) -> list[float]:
    """Sample, train, sync the weights, repeat. Returns the mean reward of each step."""
    rewards: list[float] = []
    with setup_infra(config, needs_reference=False, needs_inference=True) as infra:
        for step in range(1, steps + 1):
            groups = asyncio.run(sample_groups(infra, WORDS, config.completions_per_prompt))
            scored = [reward for group in groups for reward in group.rewards if reward is not None]
            rewards.append(sum(scored) / len(scored))
            datums = build_grpo_datums(groups)
            if datums:  # zero-variance groups have no training signal and are left out
                result = infra.policy.forward_backward_custom(datums, my_loss)
                infra.policy.optim_step(AdamParams(learning_rate=config.learning_rate))
                print(f"step {step}  reward {rewards[-1]:.3f}  loss {result.loss:+.4f}", flush=True)
            if step % config.weight_sync.weight_sync_interval == 0:
                asyncio.run(infra.sync_weights())
        infra.policy.export(f"{config.log_path}/final")
    return rewards


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "models/tiny"
    train(
        Config(
            log_path="outputs/custom_loop",
            base_model=model,
            dataset=WORDS,
            deployment=DeployConfig(tokenizer_model=model),
            weight_sync=WeightSyncConfig(weight_sync_interval=1),
            completions_per_prompt=8,
            max_completion_tokens=16,
            learning_rate=1e-3,
        ),
        steps=int(sys.argv[2]) if len(sys.argv) > 2 else 30,
    )
