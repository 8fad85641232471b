"""The sampler's weights: the trainer's tensors, a snapshot updated on request, and noise for the sampler only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.models.decoder import Decoder
from shoal.models.sampler_view import SamplerView, noisy_norms
from support.engines import ask, make_engine, run
from support.models import lora_decoder, random_prompts, small_decoder
from support.training import grpo, make_policy, pack, random_samples, weights

ROWS = pack(random_samples(0, (4, 8), (10, 6))).rows
(PROMPT,) = random_prompts(0, 12)


def train_one_step(decoder: Decoder) -> None:
    policy = make_policy(decoder)
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()


def sample(decoder: Decoder, view: SamplerView) -> tuple[list[int], list[float]]:
    answer = run(make_engine(decoder, view), [ask("r", PROMPT, seed=3, max_tokens=12)])["r"]
    return answer.token_ids, answer.logprobs


def logprobs(decoder: Decoder) -> np.ndarray:
    return make_policy(decoder).logprobs(ROWS).read()[1][0]


@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_shared_weights_are_the_trainer_s_own(make) -> None:
    decoder = make()
    view = SamplerView(decoder)
    assert view.decoder is decoder
    before = sample(decoder, view)
    train_one_step(decoder)
    assert sample(decoder, view)[1] != before[1], "a step is visible at once"


@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_snapshot_keeps_the_old_weights_until_it_is_refreshed(make) -> None:
    decoder = make()
    view = SamplerView(decoder, "snapshot")
    before = sample(view.decoder, view)
    assert before == sample(make(), SamplerView(make())), "and it starts equal"
    train_one_step(decoder)
    assert sample(view.decoder, view) == before
    trained = make_policy(decoder).logprobs(ROWS).read()[1][0]
    view.refresh(1)
    assert view.version == 1
    after = sample(view.decoder, view)
    assert after[1] != before[1]
    np.testing.assert_array_equal(logprobs(decoder), trained)
    train_one_step(decoder)
    assert sample(view.decoder, view) == after


@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_version_already_served_keeps_its_weights(make) -> None:
    decoder = make()
    view = SamplerView(decoder, "snapshot")
    view.refresh(1)
    before = sample(view.decoder, view)
    train_one_step(decoder)
    view.refresh(1)
    assert sample(view.decoder, view) == before


def test_snapshot_is_not_trained() -> None:
    decoder = small_decoder()
    view = SamplerView(decoder, "snapshot")
    assert not any(p.requires_grad for p in view.decoder.model.parameters())
    ours = {p.data_ptr() for p in decoder.model.parameters()}
    assert not ours & {p.data_ptr() for p in view.decoder.model.parameters()}


@pytest.mark.parametrize("mode", ("shared", "snapshot"))
@pytest.mark.parametrize("make", (small_decoder, lora_decoder), ids=("full", "lora"))
def test_noise_affects_only_the_sampler(make, mode) -> None:
    decoder = make()
    view = SamplerView(decoder, mode)
    clean, before = sample(view.decoder, view), weights(decoder)
    scored = logprobs(decoder)
    view.refresh(1, sigma=0.2, seed=7)
    noisy = sample(view.decoder, view)
    assert noisy[1] != clean[1]
    after = weights(decoder)
    assert all(torch.equal(after[name], value) for name, value in before.items() if name in after), "restored exactly"
    np.testing.assert_array_equal(logprobs(decoder), scored)
    view.refresh(2)
    assert sample(view.decoder, view) == clean, "sigma 0 is no noise"


@pytest.mark.parametrize("architecture", ("qwen3", "gemma3", "llama"))
def test_norms_that_get_noise(architecture: str) -> None:
    decoder = small_decoder(architecture)
    view = SamplerView(decoder)
    view.refresh(1, sigma=0.1)
    before = weights(decoder)
    with view.active():
        changed = {name for name, value in weights(decoder).items() if not torch.equal(value, before[name])}
    assert "model.norm.weight" in changed and "model.layers.1.input_layernorm.weight" in changed
    assert "model.layers.0.post_attention_layernorm.weight" in changed
    assert all("norm" in name for name in changed)
    assert not any("q_norm" in name or "k_norm" in name for name in changed)
    assert len(changed) == len(noisy_norms(decoder.inner))


def noise(seed: int, version: int, sigma: float = 0.1) -> torch.Tensor:
    decoder = small_decoder()
    view = SamplerView(decoder)
    before = weights(decoder)
    view.refresh(version, sigma, seed)
    with view.active():
        after = weights(decoder)
    return torch.cat([(after[name] - value).flatten() for name, value in before.items() if "layernorm" in name])


def test_noise_is_drawn_from_seed_and_version() -> None:
    torch.manual_seed(0)
    first = noise(1, 5)
    torch.manual_seed(1)
    assert torch.equal(noise(1, 5), first), "independent of other random draws"
    assert not torch.equal(noise(1, 6), first) and not torch.equal(noise(2, 5), first)
    assert first.std().item() == pytest.approx(0.1, rel=0.2) and abs(first.mean().item()) < 0.02
    torch.testing.assert_close(noise(1, 5, sigma=0.2), 2 * first, rtol=0, atol=1e-6)


def test_error_while_sampling_leaves_no_noise_behind() -> None:
    decoder = small_decoder()
    view = SamplerView(decoder)
    view.refresh(1, sigma=0.5)
    before = weights(decoder)
    with pytest.raises(RuntimeError, match="out of luck"), view.active():
        raise RuntimeError("out of luck")
    assert all(torch.equal(value, before[name]) for name, value in weights(decoder).items())


def test_training_between_two_noisy_samplings() -> None:
    """The optimizer changes the clean weights while the noise is removed."""
    decoder, plain = small_decoder(), small_decoder()
    view = SamplerView(decoder)
    view.refresh(1, sigma=0.3)
    sample(decoder, view)
    train_one_step(decoder)
    sample(decoder, view)
    train_one_step(plain)
    for (name, one), other in zip(weights(decoder).items(), weights(plain).values(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.parametrize(("sigma", "share"), [(0.05, (0.9, 1.1)), (2e-4, (0.0, 0.5))])
def test_applied_noise_is_measured_after_rounding(sigma: float, share: tuple[float, float]) -> None:
    """Norm weights are near 1, where neighbouring bf16 numbers differ by 0.004 below and 0.008 above."""
    decoder = small_decoder()
    view = SamplerView(decoder)
    view.refresh(1, sigma, seed=3)
    assert view.applied_sigma == pytest.approx(sigma, rel=0.1)
    decoder.model.to(torch.bfloat16)  # type: ignore[operator]
    view = SamplerView(decoder)
    clean = [norm.weight.data.clone() for norm in noisy_norms(decoder.inner)]  # type: ignore[union-attr,operator]
    view.refresh(1, sigma, seed=3)
    with view.active():
        noisy = [norm.weight.data.clone() for norm in noisy_norms(decoder.inner)]  # type: ignore[union-attr,operator]
    applied = torch.cat([(now.double() - before).flatten() for now, before in zip(noisy, clean, strict=True)])
    assert view.applied_sigma == pytest.approx(applied.square().mean().sqrt().item(), rel=1e-6)
    assert share[0] * sigma <= view.applied_sigma <= share[1] * sigma
    view.refresh(2)
    assert view.applied_sigma == 0.0
