"""Log-probs of given texts and the most likely tokens, against the forward pass of transformers (fp32, CPU)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shoal.core.types import ScoreRequest
from shoal.engine import scoring
from shoal.engine.scoring import score, take_batch
from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView
from support.models import ARCHITECTURES, as_decoder, lora_decoder, random_prompts, small_model

TEXTS = random_prompts(5, 40, 3, 17, 40, 2, 25)


def expected(model: Any, text: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[len - 1, V] log-probs by the forward pass of the model."""
    with torch.no_grad():
        model.set_attn_implementation("eager")
        logits = model(input_ids=torch.tensor([text]), use_cache=False).logits[0, :-1]
    return torch.log_softmax(logits.float() / temperature, -1)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_equal_the_model_forward(name: str, monkeypatch: pytest.MonkeyPatch):
    decoder, own = as_decoder(small_model(name)), small_model(name)
    monkeypatch.setattr(scoring, "TILE_NUMBERS", 16 * decoder.vocab_size)  # several tiles
    requests = [ScoreRequest(text, 1 + i % 2, temperature=(0, 0.7)[i % 2], top=i) for i, text in enumerate(TEXTS)]
    requests = [request for request in requests if len(request.token_ids) > request.start]
    for request, scored in zip(requests, score(SamplerView(decoder), requests), strict=True):
        logprobs = expected(own, request.token_ids, request.temperature or 1.0)[request.start - 1 :]
        targets = torch.tensor(request.token_ids[request.start :])
        values = logprobs.gather(-1, targets[:, None]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(scored.logprobs), values, rtol=0, atol=1e-5)
        best, ids = logprobs.topk(request.top) if request.top else (logprobs[:, :0], targets[:, None][:, :0])
        assert [[i for i, _ in row] for row in scored.top] == ids.tolist()
        found = torch.tensor([[value for _, value in row] for row in scored.top])
        torch.testing.assert_close(found, best, rtol=0, atol=1e-5)
        greedy = [row[0][1] == value for row, value in zip(scored.top, scored.logprobs, strict=True) if row]
        assert greedy == (targets == logprobs.argmax(-1)).tolist()[: len(greedy)], "equal bits if greedy"


def test_only_ids_that_could_be_sampled_have_a_score():
    decoder = as_decoder(small_model("qwen3"))
    text, kept = TEXTS[2], [[5, TEXTS[2][-2]], [~7]]
    (scored,) = score(SamplerView(decoder), [ScoreRequest(text, len(text) - 3, top=20, kept_ids=kept)])
    assert [len(row) for row in scored.top] == [20, 2, 20]
    assert {i for i, _ in scored.top[1]} == set(kept[0])
    assert sum(torch.tensor([value for _, value in scored.top[1]]).exp()) == pytest.approx(1, abs=1e-6)
    assert 7 not in {i for i, _ in scored.top[2]}


def test_served_weights_include_adapters_and_noise():
    decoder: Decoder = lora_decoder()
    view = SamplerView(decoder)
    request = ScoreRequest(TEXTS[0])
    (clean,) = score(view, [request])
    own = expected(decoder.inner, TEXTS[0])[torch.arange(39), torch.tensor(TEXTS[0][1:])]
    torch.testing.assert_close(torch.tensor(clean.logprobs), own, rtol=0, atol=1e-5)
    decoder.inner.set_attn_implementation("shoal")  # type: ignore[operator]
    view.refresh(1, sigma=0.1, seed=3)
    (noisy,) = score(view, [request])
    assert noisy.logprobs != clean.logprobs


def test_batches_are_bounded_in_tokens():
    assert take_batch([5, 5, 5], 10) == 2 and take_batch([50], 10) == 1 and take_batch([4, 50], 10) == 1
