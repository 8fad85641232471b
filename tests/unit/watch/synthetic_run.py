"""Writes a run directory with RunDir, with curves and rollouts from a fixed seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.runs.events import EventLog
from shoal.runs.run_dir import RunDir

CONFIG = """
train: {{model: tiny-qwen3, learning_rate: 1.0e-5, max_steps: {steps}, loss: {{type: grpo}}}}
orch: {{env: [{{id: reverse-text}}], batch_size: 32}}
"""
EPOCH_STEPS = 4  # a prompt is repeated after this many steps
WORDS = ["otter", "heron", "minnow", "reed bed", "tide pool", "sand bar"]


def make_run(path: Path, steps: int = 40, groups: int = 4, size: int = 8, seed: int = 3) -> Path:
    dice = random.Random(seed)
    with RunDir.create(path, CONFIG.format(steps=steps), {"seed": seed}) as run_dir:
        events = EventLog(run_dir)
        events.emit("start", "training starts on the CPU in fp32")
        for step in range(1, steps + 1):
            events.step = step
            run_dir.append_metrics(step, metrics_of(step, steps, dice))
            rollouts = list(rollouts_of(step, steps, groups, size, dice))
            run_dir.write_rollouts(step, rollouts)
            run_dir.append_journal(step, journal_of(step, rollouts))
            if step % 20 == 0:
                events.emit("checkpoint", f"saved step {step}")
        events.warn(
            "mismatch", "sampler and trainer log-probs differ: k3 is 0.012, healthy is below 0.01", data={"k3": 0.012}
        )
        run_dir.write_status("finished", step=steps, reason=f"all {steps} steps done", resumable=False)
    return path


def journal_of(step: int, rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    dropped = {r["group"]: r["drop_reason"] for r in rollouts if r["drop_reason"]}
    trained = [r["rollout_id"] for r in rollouts if not r["drop_reason"] and r["reward"] is not None]
    return {"version": step, "rollout_ids": trained, "dropped": dropped}


def metrics_of(step: int, steps: int, dice: random.Random) -> dict[str, float]:
    share = step / steps
    rollout_s, train_s = 3.1 + dice.random(), 2.0 + 0.4 * dice.random()
    metrics = {
        "reward/mean": 0.3 + 0.5 * (1 - math.exp(-3 * share)) + 0.04 * dice.gauss(0, 1),
        "reward/std": 0.22 - 0.12 * share,
        "reward/p10": 0.15 + 0.5 * share,
        "reward/p90": 0.6 + 0.38 * share,
        "reward/part/similarity": 0.4 + 0.4 * share,
        "reward/part/format": min(1.0, 0.7 + 0.4 * share),
        "group/mixed_frac": 0.9 - 0.3 * share,
        "group/all_good_frac": 0.3 * share,
        "group/all_bad_frac": 0.1 * (1 - share),
        "policy/loss": 0.01 * dice.gauss(0, 1),
        "policy/entropy": 1.2 * math.exp(-1.5 * share) + 0.03 * dice.random(),
        "mismatch/k3": 1e-4 * (1 + 3 * dice.random()),
        "masked": 0.01 * dice.random(),
        "optim/lr": 1e-4 * min(1.0, step / 5) * (1 - 0.9 * share),
        "optim/grad_norm": 0.6 + 0.3 * dice.random(),
        "tokens/prompt": 640.0,
        "tokens/completion": 700.0 + 40 * dice.random(),
        "completion/length_mean": 22.0 + 3 * dice.random(),
        "completion/truncated_frac": max(0.0, 0.2 - 0.2 * share),
        "time/step": rollout_s + train_s + 0.9,
        "time/rollout": rollout_s,
        "time/reward": 0.4,
        "time/train": train_s,
        "time/sync": 0.1,
        "time/idle": 0.4,
        "throughput/rollout_tok_s": 720 / rollout_s,
        "throughput/train_tok_s": 1340 / train_s,
    }
    if step % 10 == 0 or step == 1:
        metrics["eval/reverse-text/mean"] = 0.32 + 0.45 * (1 - math.exp(-3 * share))
    return metrics


def rollouts_of(step: int, steps: int, groups: int, size: int, dice: random.Random) -> Iterator[dict[str, Any]]:
    for g in range(groups):
        text = " ".join(dice.choice(WORDS) for _ in range(3))
        zero_variance = g == groups - 1 and step % 3 == 0
        for i in range(size):
            yield rollout_of(
                step,
                g,
                i,
                text,
                1.0 if zero_variance else min(1.0, 0.4 + 0.5 * step / steps * dice.random()),
                zero_variance,
                dice,
            )


def rollout_of(
    step: int, group: int, index: int, text: str, reward: float, zero_variance: bool, dice: random.Random
) -> dict[str, Any]:
    pieces = [*"<|user|>", "\n", *text, "<reversed_text>", *text[::-1], "</reversed_text>", "\n"]
    prompt_tokens = 9 + len(text)
    sampled = len(pieces) - prompt_tokens
    logprobs = [0.0] * prompt_tokens + [-abs(dice.gauss(0, 1)) for _ in range(sampled)]
    failed = index == 5 and group == 1
    prompt_id = f"reverse-text/{10 * ((step - 1) % EPOCH_STEPS) + group}"
    epoch = (step - 1) // EPOCH_STEPS
    return {
        "rollout_id": f"{prompt_id}/{epoch}/0/{index}",
        "prompt_id": prompt_id,
        "group": f"{prompt_id}/{epoch}/0",
        "env": "reverse-text",
        "status": "timeout" if failed else "ok",
        "drop_reason": "uniform-good" if zero_variance else None,
        "prompt": f"Reverse the text character by character. Answer inside <reversed_text> tags.\n\n{text}",
        "completion": "".join(pieces[prompt_tokens:]),
        "reward": None if failed else reward,
        "parts": {} if failed else {"similarity": reward, "format": 1.0},
        "advantage": None if failed or zero_variance else dice.gauss(0, 1),
        "spans": [[0, sampled, step - 1]],
        "token_ids": [ord(piece[0]) for piece in pieces],
        "token_texts": pieces,
        "loss_mask": [0] * prompt_tokens + [1] * sampled,
        "sampler_logprobs": logprobs,
        "policy_logprobs": [value + 0.05 * dice.gauss(0, 1) for value in logprobs],
        "prompt_tokens": prompt_tokens,
    }
