"""The engine's greedy text equals transformers' `generate`, token for token, and its logits equal the model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from shoal.models.decoder import Decoder
from support.engines import ask, greedy, make_engine, run
from support.models import ARCHITECTURES, WINDOW, as_decoder, random_prompts, small_model

TOKENS = 32
# Shorter than the sliding window, longer than it, and longer than one multiple of padded keys.
LENGTHS = (4, WINDOW, 19, 40, 70)


class RecordingDecoder(Decoder):
    """Keeps its outputs, one [rows, V] tensor per call. Row b of a call is slot b while no row retires."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.recorded: list[Tensor] = []

    def logits(self, hidden: Tensor) -> Tensor:
        logits = super().logits(hidden)
        self.recorded.append(logits.detach().clone())
        return logits


def plain(model: Any) -> Any:
    """The same weights with transformers' attention."""
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    return twin


def generate(model: Any, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def assert_does_not_repeat(text: list[int]) -> None:
    """A repeating text would hide errors, because the next token of a loop is the same for any input."""
    pieces = [tuple(text[i : i + 6]) for i in range(len(text) - 5)]
    assert len(set(pieces)) == len(pieces) and len(set(text)) >= 10, text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_equals_generate(architecture: str) -> None:
    model = small_model(architecture, wild=True)
    reference = plain(model)
    prompts = random_prompts(1, *LENGTHS)
    texts = greedy(as_decoder(model), prompts, TOKENS)
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == generate(reference, prompt, TOKENS), f"prompt of {len(prompt)} tokens"
        assert_does_not_repeat(text)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_last_logits_equal_the_full_forward(architecture: str) -> None:
    model = small_model(architecture, seed=3, wild=True)
    reference = plain(model)
    as_decoder(model)
    decoder = RecordingDecoder(model)
    prompts = random_prompts(2, 1, *LENGTHS)
    engine = make_engine(decoder)
    decoder.recorded.clear()
    answers = run(engine, [ask(str(i), prompt, seed=i, max_tokens=TOKENS) for i, prompt in enumerate(prompts)])
    assert len(decoder.recorded) == TOKENS
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt + answers[str(i)].token_ids])
        expected = reference(ids).logits[0, len(prompt) - 1 : -1]
        actual = torch.stack([logits[i] for logits in decoder.recorded])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "without"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"layer_types": ["full_attention"] * 2}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma3", {"layer_types": ["full_attention"] * 2}),
    ],
)
@torch.no_grad()
def test_windows_and_soft_caps_have_an_effect(architecture: str, without: dict[str, Any]) -> None:
    """Otherwise the parity tests above could pass for an implementation that ignores both."""
    (prompt,) = random_prompts(1, 40)
    one, other = (plain(small_model(architecture, wild=True, **config)) for config in ({}, without))
    assert (one(torch.tensor([prompt])).logits - other(torch.tensor([prompt])).logits).abs().max() > 0.05


@pytest.mark.parametrize("architecture", ("qwen3", "gemma2"))
def test_greedy_text_does_not_depend_on_when_a_request_starts(architecture: str) -> None:
    """Slots are refilled and the batch shrinks while others continue. Each text still equals `generate`."""
    model = small_model(architecture, wild=True)
    reference = plain(model)
    prompts = random_prompts(4, *range(3, 63, 3))
    requests = [ask(str(i), prompt, temperature=0.0, max_tokens=3 + 7 * i % 30) for i, prompt in enumerate(prompts)]
    answers = run(make_engine(as_decoder(model), slots=16, prefill_tokens=80), requests)
    for i, request in enumerate(requests):
        assert answers[str(i)].token_ids == generate(reference, prompts[i], request.sampling.max_tokens)
