"""The difference between the policy's log-probs and those that the engine reported."""

from __future__ import annotations

import numpy as np

from shoal.models.decoder import Decoder
from support.engines import ask, make_engine, run
from support.models import EOS, random_prompts
from support.training import as_rollout, grpo, make_policy, one_turn, rows_of


def mismatch(decoder: Decoder, graphs: bool | None) -> tuple[float, float]:
    """mismatch/k3 of the policy against the engine, and the mean absolute difference of the log-probs."""
    prompts = random_prompts(5, 6, 20, 50, 90)
    asked = [ask(f"{g}/{i}", p, seed=10 * g + i, max_tokens=40) for g, p in enumerate(prompts) for i in range(4)]
    answers = run(make_engine(decoder, slots=16, context_tokens=192, eos_token_ids=(EOS,), graphs=graphs), asked)
    rollouts = [
        as_rollout(int(name[2:]), one_turn(prompts[int(name[0])], answer), 1.0, group=int(name[0]))
        for name, answer in sorted(answers.items())
    ]
    rows = rows_of(rollouts)
    policy = make_policy(decoder)
    gaps = [
        np.abs(v - r.sampler_logprobs)[r.loss_mask] for v, r in zip(policy.logprobs(rows).read()[1], rows, strict=True)
    ]
    metrics, _ = policy.forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    return total / count, float(np.concatenate(gaps).mean())
