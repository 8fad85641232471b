"""The sampler's log-probs equal the trainer's for the same tokens: fp32, all architectures and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shoal.core.types import Rollout, Row, Turn
from shoal.models.decoder import Decoder
from support.engines import ask, make_engine, run
from support.models import ARCHITECTURES, EOS, VOCABULARY, lora_decoder, random_prompts, small_decoder
from support.training import as_rollout, grpo, make_policy, one_turn, rows_of

SETTINGS = {
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.6},
    "top-p": {"top_p": 0.7},
    "top-k": {"top_k": 5, "temperature": 1.3},
    "min-p": {"min_p": 0.1, "temperature": 0.8},
    "min tokens": {"min_tokens": 20, "temperature": 1.5},
    "min tokens, cut": {"min_tokens": 20, "top_p": 0.9},
    "min tokens, all kept": {"min_tokens": 20, "top_k": VOCABULARY, "temperature": 1.5},
    "all three": {"top_p": 0.9, "top_k": 20, "min_p": 0.02, "temperature": 1.2},
}


def sample_rollouts(decoder: Decoder, sampling: dict[str, Any], seed: int = 0) -> list[Rollout]:
    """Two groups of four, one prompt longer than every sliding window."""
    prompts = random_prompts(seed, 7, 30)
    requests = [
        ask(f"{g}/{i}", prompts[g], seed=10 * g + i, max_tokens=24, **sampling) for g in (0, 1) for i in range(4)
    ]
    answers = run(make_engine(decoder, eos_token_ids=(EOS,)), requests)
    temperature = sampling.get("temperature", 1.0)
    return [
        as_rollout(int(name[2:]), one_turn(prompts[int(name[0])], answer, temperature), 1.0, group=int(name[0]))
        for name, answer in sorted(answers.items())
    ]


def gaps(decoder: Decoder, rows: list[Row]) -> np.ndarray:
    values = make_policy(decoder).logprobs(rows).read()[1]
    return np.concatenate([(v - row.sampler_logprobs)[row.loss_mask] for row, v in zip(rows, values, strict=True)])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("setting", ("plain", "cold", "all three"))
def test_sampler_and_trainer_agree(architecture: str, setting: str) -> None:
    decoder = small_decoder(architecture)
    rollouts = sample_rollouts(decoder, SETTINGS[setting])
    assert max(rollout.completion_tokens for rollout in rollouts) == 24
    for budget in (60, 1000):
        assert np.abs(gaps(decoder, rows_of(rollouts, budget))).max() < 1e-5


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_every_sampling_mode_with_lora(setting: str, lora: bool) -> None:
    decoder = lora_decoder() if lora else small_decoder()
    assert np.abs(gaps(decoder, rows_of(sample_rollouts(decoder, SETTINGS[setting])))).max() < 1e-5


def test_missing_temperature_or_kept_ids_fails_the_comparison() -> None:
    """The agreement above is not trivial."""
    decoder = small_decoder()
    for setting, name in (("cold", "temperatures"), ("top-p", "kept_ids")):
        rows = rows_of(sample_rollouts(decoder, SETTINGS[setting]))
        for row in rows:
            setattr(row, name, np.ones_like(row.temperatures) if name == "temperatures" else None)
        assert np.abs(gaps(decoder, rows)).max() > 0.1


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_first_step_mismatch_is_zero(architecture: str) -> None:
    """fp32: with the sampler's weights k3 contains only rounding, and the ratio is 1."""
    decoder = small_decoder(architecture)
    policy = make_policy(decoder)
    rows = rows_of(sample_rollouts(decoder, SETTINGS["hot"]))
    metrics, _ = policy.forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    assert count == sum(row.loss_mask.sum() for row in rows) > 0
    assert 0 <= total / count < 1e-6
    total, count = metrics["policy/ratio_mean"]
    assert total / count == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_turns_of_a_conversation(lora: bool) -> None:
    """Three turns with different temperatures. The prompt of a turn contains the sampled ids of earlier turns."""
    decoder = lora_decoder("mistral") if lora else small_decoder("mistral")
    rollouts = []
    for number in range(3):
        history, turns = random_prompts(number, 9)[0], []
        for turn, temperature in enumerate((0.7, 1.0, 1.5)):
            request = ask("r", history, seed=number, max_tokens=10 + turn, temperature=temperature)
            answer = run(make_engine(decoder), [request])["r"]
            turns.append(Turn(history, answer, temperature))
            history = history + answer.token_ids + random_prompts(turn, 5)[0]
        rollouts.append(as_rollout(number, turns, 1.0))
    rows = rows_of(rollouts)
    assert sum(len(row.segment_starts) - 1 for row in rows) == 3, "each conversation is one sample"
    found = gaps(decoder, rows)
    assert len(found) == 3 * (10 + 11 + 12) and np.abs(found).max() < 1e-5


def test_sampled_end_token_is_trained() -> None:
    """The end token is in the loss with its log-prob, like any other token."""
    decoder = small_decoder()
    prompts = dict(enumerate(random_prompts(0, *[6] * 40)))
    requests = [ask(str(i), prompt, seed=i, max_tokens=60) for i, prompt in prompts.items()]
    answers = run(make_engine(decoder, slots=40, eos_token_ids=(EOS,)), requests)
    ended = {int(name): answer for name, answer in answers.items() if answer.finish_reason == "stop"}
    assert len(ended) > 5
    for i, answer in ended.items():
        (row,) = rows_of([as_rollout(i, one_turn(prompts[i], answer), 1.0)])
        assert row.token_ids[-1] == EOS and row.loss_mask[-1] and row.weights[-1] > 0
        (values,) = make_policy(decoder).logprobs([row]).read()[1]
        assert values[-1] == pytest.approx(answer.logprobs[-1], abs=1e-5) and values[-1] < 0
