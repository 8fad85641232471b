"""fp8-hybrid on a CUDA device: rounding as in torchao, gradients close to bf16, the sampler unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models import fp8_linear as hybrid
from support.engines import ask, make_engine, run
from support.mismatch import mismatch
from support.models import as_decoder, hybrid_decoder, random_prompts, small_model
from support.training import gradients, grpo, make_policy, pack, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]

CUDA = torch.device("cuda")
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
ENGINE: dict[str, Any] = {"slots": 16, "context_tokens": 192}
REQUESTS = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exact = values.detach().double().cpu()
    scale = 2.0 ** np.floor(np.log2(torch.finfo(dtype).max / float(exact.abs().max())))
    return (exact * scale).to(dtype).double() / scale


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Within the rounding of bf16 outputs and of the accumulators of tensor cores. FP8 rounding is ten times larger."""
    assert actual is not None
    return bool((actual.detach().double().cpu() - expected).norm() / expected.norm() < 5e-3)


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_e4m3_forward_and_e5m2_backward(frozen: bool) -> None:
    """37 tokens are not a multiple of 16, which FP8 products need padding for."""
    pytest.importorskip("torchao", reason="an extra")
    model = small_model("llama", dtype=torch.bfloat16).to(CUDA)
    hybrid.convert(model)
    layer: Any = model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(37, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(37, 128, device=CUDA, dtype=torch.bfloat16)
    with hybrid.scoring(hybrid.scoring_switch(model)):
        out = layer(x)
    out.backward(upstream)
    x8, weight8 = rounded(x, torch.float8_e4m3fn), rounded(layer.weight, torch.float8_e4m3fn)
    up8 = rounded(upstream, torch.float8_e5m2)
    assert close(out, x8 @ weight8.T) and close(x.grad, up8 @ weight8)
    assert layer.weight.grad is None if frozen else close(layer.weight.grad, up8.T @ x8)
    assert not close(x.detach() @ layer.weight.detach().T, x8 @ weight8.T)


@pytest.mark.parametrize("kind", (torch.float8_e4m3fn, torch.float8_e5m2), ids=("e4m3", "e5m2"))
def test_numbers_round_as_torchao_rounds_them(kind: torch.dtype) -> None:
    """Bit for bit, in both directions. NaN stays NaN."""
    pytest.importorskip("torchao", reason="an extra")
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    from shoal.models.kernels.quant import largest, rounded

    for seed, (rows, columns, size) in enumerate(((5, 48, 1e-3), (300, 1040, 1.0), (37, 64, 300.0), (0, 16, 1.0))):
        generator = torch.Generator(CUDA).manual_seed(seed)
        x = (torch.randn(max(rows, 1), columns, generator=generator, device=CUDA) * size * (rows > 0)).bfloat16()
        theirs = hp_tensor_to_float8_dynamic(
            x, kind, LinearMMConfig(), gemm_input_role=GemmInputRole.INPUT, round_scales_to_power_of_2=True
        )
        ours = rounded(x, kind, largest(x), turned=True)
        assert ours.plain is not None and ours.turned is not None
        assert torch.equal(theirs._data.view(torch.uint8), ours.plain.view(torch.uint8))
        assert torch.equal(theirs._scale.reciprocal().flatten(), ours.inverse)
        assert torch.equal(ours.turned[:, : len(x)].view(torch.uint8), ours.plain.T.contiguous().view(torch.uint8))
        assert not ours.turned[:, len(x) :].float().any()
        for bad in (float("inf"), float("nan")):
            x[0, 2] = bad
            broken = rounded(x, kind, largest(x))
            assert broken.plain is not None
            assert not torch.isfinite(broken.plain.float() * broken.inverse)[0, 2]


@pytest.mark.parametrize("trained", (True, False))
def test_fused_quantised_products_equal_torchao(trained: bool) -> None:
    pytest.importorskip("torchao", reason="an extra")
    model = small_model("llama", dtype=torch.bfloat16).to(CUDA)
    hybrid.convert(model)
    layer: Any = model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(trained)
    x = torch.randn(37, 64, device=CUDA, dtype=torch.bfloat16)
    upstream = torch.randn(37, 128, device=CUDA, dtype=torch.bfloat16)
    found = []
    torchaos_own: Any = super(type(layer), layer)
    for product in (layer, torchaos_own.forward):
        layer.weight.grad, own = None, x.clone().requires_grad_()
        with hybrid.scoring(hybrid.scoring_switch(model)):
            out = product(own)
        out.backward(upstream)
        found.append([out.detach(), own.grad, *([layer.weight.grad] if trained else [])])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
def test_fp8_gradients_align_with_bf16(lora: bool, recompute: bool) -> None:
    rows = pack(random_samples(2, *SHAPES)).rows
    found = []
    for fp8 in (True, False):
        decoder = hybrid_decoder("qwen2", lora)
        if recompute:
            decoder.inner.gradient_checkpointing_enable()  # type: ignore[operator]
        if not fp8:
            for module in decoder.model.modules():
                if type(module).__name__ == "HybridLinear":
                    module.__class__ = nn.Linear
        policy = make_policy(decoder)
        policy.forward_backward(rows, grpo())
        found.append(gradients(policy))
    assert found[0].keys() == found[1].keys() and all(("lora_" in name) == lora for name in found[0])
    ours, theirs = (torch.cat([g.flatten() for g in grads.values()]) for grads in found)
    assert 0.9 < float(F.cosine_similarity(ours, theirs, dim=0)) < 0.9999


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_fp8_mismatch_is_bounded_and_larger_than_bf16_s(lora: bool, record_property: Any) -> None:
    """The policy scores in FP8 and the sampler in bf16. The figure is added to the test report."""
    k3, mean = mismatch(hybrid_decoder("qwen2", lora), None)
    record_property("mismatch/k3", k3)
    record_property("mean |log-prob difference|", mean)
    print(f"fp8-hybrid, {'lora' if lora else 'full'}: mismatch/k3 {k3:.2e}, mean difference {mean:.3f}")
    assert 1e-5 < k3 < 0.05


def test_sampler_keeps_its_fused_path_and_outputs() -> None:
    decoder = hybrid_decoder("llama", lora=False)
    engine = make_engine(decoder, **ENGINE, graphs=True)
    assert "fused kernels" in engine.path, engine.path
    plain = make_engine(as_decoder(small_model("llama", dtype=torch.bfloat16).to(CUDA)), **ENGINE, graphs=True)
    ours, theirs = run(engine, REQUESTS), run(plain, REQUESTS)
    assert all(answer.logprobs == theirs[name].logprobs for name, answer in ours.items())
    policy = make_policy(decoder)
    policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
    policy.optim_step()
    assert run(engine, REQUESTS)["1"].logprobs != ours["1"].logprobs, "graphs use the new weights"
