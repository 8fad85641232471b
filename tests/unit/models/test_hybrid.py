"""fp8-hybrid through torchao: what is rounded to which format, what is not, and that samplers never use it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models import fp8_linear as hybrid
from shoal.models.decoder import Decoder
from shoal.models.quantize import held_bytes
from shoal.models.sampler_view import SamplerView
from support.engines import ask, make_engine, run
from support.models import hybrid_decoder, random_prompts, small_model
from support.training import gradients, grpo, make_policy, pack, random_samples

pytest.importorskip("torchao", reason="an extra")

ROWS = pack(random_samples(0, (4, 8), (10, 6), (30, 21))).rows


class Holder(nn.Module):
    def __init__(self, *layers: nn.Linear) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(16, 32)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def scored(model: nn.Module) -> Any:
    return hybrid.scoring(hybrid.scoring_switch(model))


def rounded(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """float64, rounded with the largest power of two that keeps the largest number inside the format."""
    exact = values.detach().double()
    scale = 2.0 ** np.floor(np.log2(torch.finfo(dtype).max / float(exact.abs().max())))
    return (exact * scale).to(dtype).double().numpy() / scale


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_e4m3_forward_and_e5m2_backward(frozen: bool) -> None:
    """Eleven tokens, not a multiple of 16. Products in FP8 are exact except for the order of their sums."""
    torch.manual_seed(0)
    model = Holder(nn.Linear(32, 48))
    assert hybrid.convert(model) == 1
    layer: Any = model.layers[0]
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(11, 32, requires_grad=True)
    upstream = torch.randn(11, 48)
    with scored(model):
        out = layer(x)
    out.backward(upstream)
    e4, e5 = torch.float8_e4m3fn, torch.float8_e5m2
    x8, weight8, up8 = rounded(x, e4), rounded(layer.weight, e4), rounded(upstream, e5)
    bias = layer.bias.detach().double().numpy()
    np.testing.assert_allclose(out.detach().numpy(), x8 @ weight8.T + bias, rtol=0, atol=1e-5)
    np.testing.assert_allclose(x.grad, up8 @ weight8, rtol=0, atol=1e-5)  # type: ignore[arg-type]
    if frozen:
        assert layer.weight.grad is None
    else:
        np.testing.assert_allclose(layer.weight.grad, up8.T @ x8, rtol=0, atol=1e-5)
    assert not np.allclose(x.detach() @ layer.weight.detach().T, x8 @ weight8.T, rtol=0, atol=1e-2)


def test_kept_layers() -> None:
    """Without the head, and without layers with a side that is not a multiple of 16."""
    model = Holder(nn.Linear(32, 48), nn.Linear(32, 24), nn.Linear(20, 32))
    assert hybrid.convert(model) == 1
    assert [type(layer).__name__ for layer in model.layers] == ["HybridLinear", "Linear", "Linear"]
    assert type(model.head) is nn.Linear


def test_linear_layer_is_plain_outside_scoring() -> None:
    model = Holder(nn.Linear(32, 48))
    hybrid.convert(model)
    layer, x = model.layers[0], torch.randn(4, 32)
    plain = F.linear(x, layer.weight, layer.bias)  # type: ignore[arg-type]
    assert torch.equal(layer(x), plain)
    with scored(model):
        inside = layer(x)
        with scored(model):
            pass
        assert torch.equal(layer(x), inside), "an inner one does not end the outer one"
    assert torch.equal(layer(x), plain) and not torch.equal(inside, plain)


def on_cpu(lora: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    return hybrid_decoder("qwen2", lora, dtype, "cpu")


def without_fp8(decoder: Decoder) -> Decoder:
    model: Any = copy.deepcopy(decoder.model)
    for module in model.modules():
        if type(module).__name__ == "HybridLinear":
            module.__class__ = nn.Linear
    return Decoder(model)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_policy_scores_in_fp8_and_the_sampler_does_not(lora: bool) -> None:
    decoder = on_cpu(lora)
    plain = without_fp8(decoder)
    request = ask("r", random_prompts(0, 12)[0], seed=3, max_tokens=12)
    assert run(make_engine(decoder), [request])["r"].logprobs == run(make_engine(plain), [request])["r"].logprobs
    policy, twin = make_policy(decoder), make_policy(plain)
    gap = np.abs(policy.logprobs(ROWS).read()[1][0] - twin.logprobs(ROWS).read()[1][0])[ROWS[0].loss_mask]
    assert 1e-3 < gap.mean() < 0.2
    for each in (policy, twin):
        each.forward_backward(ROWS, grpo())
    ours, theirs = gradients(policy), gradients(twin)
    assert ours.keys() == theirs.keys() and all(("lora_" in name) == lora for name in ours)
    one, other = (torch.cat([g.flatten() for g in grads.values()]) for grads in (ours, theirs))
    assert 0.95 < F.cosine_similarity(one, other, dim=0) < 0.9999


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_checkpointing_runs_forward_again_in_fp8(lora: bool) -> None:
    found = []
    for recompute in (False, True):
        decoder = on_cpu(lora)
        if recompute:
            decoder.inner.gradient_checkpointing_enable()  # type: ignore[operator]
        policy = make_policy(decoder)
        policy.forward_backward(ROWS, grpo())
        found.append(gradients(policy))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_weights_are_unchanged_and_snapshots_have_their_own_switch() -> None:
    decoder = on_cpu(lora=False, dtype=torch.bfloat16)
    assert decoder.dtype == torch.bfloat16 and decoder.weight_bytes == held_bytes(without_fp8(decoder).model)
    assert decoder.model.state_dict().keys() == small_model("qwen2").state_dict().keys()
    view = SamplerView(decoder, "snapshot")
    assert hybrid.scoring_switch(view.decoder.model) is not hybrid.scoring_switch(decoder.model)
    with decoder.scoring():
        assert not hybrid.scoring_switch(view.decoder.model).on  # type: ignore[union-attr]


def test_scores_do_not_depend_on_the_batch() -> None:
    """Scales are powers of two: the rest of the batch changes the scale and not the rounding."""
    torch.manual_seed(0)
    model = Holder(nn.Linear(64, 32))
    hybrid.convert(model)
    x, loud = torch.randn(3, 64), 10 * torch.randn(5, 64)
    with scored(model):
        alone, among = model.layers[0](x), model.layers[0](torch.cat([x, loud]))[:3]
    torch.testing.assert_close(among, alone, rtol=0, atol=1e-4)
    assert (alone - model.layers[0](x)).abs().max() > 1e-2, "the rounding itself is far larger"
