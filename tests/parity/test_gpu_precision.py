"""Quantised bases, fp8-hybrid and 8-bit moments on a CUDA device: against the CPU, in graphs, and in bytes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.models import hybrid
from shoal.models.decoder import Decoder
from shoal.models.formats import FORMATS
from shoal.models.lora import LoraSettings, as_reference, attach
from shoal.models.quantised import QuantisedLinear, quantise_linears
from shoal.models.sampler_view import SamplerView
from shoal.trainer.optimizer import AdamSettings, MasterAdamW
from shoal.trainer.policy import Reference
from support.engines import ask, make_engine, run
from support.models import EOS, as_decoder, lora_decoder, random_prompts, shake_adapter, small_model
from support.training import as_rollout, gradients, grpo, make_policy, one_turn, pack, random_samples, rows_of

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
TF32 = 5e-3
ENGINE: dict[str, Any] = {"slots": 16, "context_tokens": 192}
REQUESTS = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]


@pytest.fixture(autouse=True)
def whole_fp32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture(params=("fp8", "fp4", "nf4"))
def stored(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    return request.param


def no_waiting() -> Any:
    """Inside, whatever makes the host wait for the device raises."""

    class Watch:
        def __enter__(self) -> None:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    return Watch()


def mismatch(decoder: Decoder, graphs: bool | None) -> tuple[float, float]:
    """mismatch/k3 of the policy against what the engine reported, and the mean size of the log-probs' difference."""
    prompts = random_prompts(5, 6, 20, 50, 90)
    asked = [ask(f"{g}/{i}", p, seed=10 * g + i, max_tokens=40) for g, p in enumerate(prompts) for i in range(4)]
    answers = run(make_engine(decoder, **ENGINE, eos_token_ids=(EOS,), graphs=graphs), asked)
    rollouts = [
        as_rollout(int(name[2:]), one_turn(prompts[int(name[0])], answer), 1.0, group=int(name[0]))
        for name, answer in sorted(answers.items())
    ]
    rows = rows_of(rollouts)
    policy = make_policy(decoder)
    gaps = [np.abs(v - r.sampler_logprobs)[r.loss_mask] for v, r in zip(policy.logprobs(rows), rows, strict=True)]
    metrics, _ = policy.forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    return total / count, float(np.concatenate(gaps).mean())


# --- quantised bases ---------------------------------------------------------------------------------------------


def test_kernels_read_what_the_cpu_stored(stored: str) -> None:
    """To the bit, in fp32 and rounded once to bf16; and the GPU stores what the CPU stores."""
    made = FORMATS[stored]
    for shape in ((130, 200), (7, 20), (256, 1024), (1, 2), (2048, 576)):
        generator = torch.Generator().manual_seed(0)
        weight = (torch.randn(shape, generator=generator) * torch.logspace(-4, 0, shape[1])).bfloat16()
        on_cpu = made.quantise(weight)
        moved = {name: tensor.to(CUDA) for name, tensor in on_cpu.items()}
        exact = made.dequantise(on_cpu, shape, torch.float32)
        assert torch.equal(made.dequantise(moved, shape, torch.float32).cpu(), exact), shape
        assert torch.equal(made.dequantise(moved, shape, torch.bfloat16).cpu(), exact.bfloat16()), shape
        for name, tensor in made.quantise(weight.to(CUDA)).items():
            same = (tensor.cpu() == on_cpu[name]).double().mean() if not tensor.is_floating_point() else 1.0
            assert same > 0.995, (shape, name, float(same))  # a division that rounds the other way at half-way


def test_a_captured_layer_reads_its_storage_in_place_and_nothing_waits(stored: str) -> None:
    torch.manual_seed(0)
    layer, other = (QuantisedLinear(nn.Linear(512, 256).to(CUDA, torch.bfloat16), stored, CUDA) for _ in "ab")
    x = torch.randn(16, 512, device=CUDA, dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        with no_waiting():
            layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        graph.replay()
        assert torch.equal(out, layer(x)) and not torch.equal(out, other(x))
        for mine, theirs in zip(layer.buffers(), other.buffers(), strict=True):
            mine.copy_(theirs)
        layer.bias.copy_(other.bias)
        graph.replay()
        assert torch.equal(out, other(x))


@pytest.mark.parametrize("graphs", (False, True), ids=("eager", "graphs"))
def test_bf16_mismatch_of_sampler_and_trainer(stored: str, graphs: bool) -> None:
    k3, _ = mismatch(lora_decoder("qwen2", dtype=torch.bfloat16, stored=stored, device="cuda"), graphs)
    assert 0 <= k3 < 1e-3


def test_graphs_see_optimizer_steps_and_noise(stored: str) -> None:
    decoder = lora_decoder(stored=stored, device="cuda")
    view = SamplerView(decoder)
    engine, policy = make_engine(decoder, view, **ENGINE, graphs=True), make_policy(decoder)
    eager = make_engine(decoder, view, **ENGINE, graphs=False)
    seen = []
    for sigma in (0.0, 0.2, 0.1, 0.0):
        policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
        policy.optim_step()
        view.refresh(view.version + 1, sigma, seed=1)
        ours, theirs = run(engine, REQUESTS), run(eager, REQUESTS)
        for name, answer in ours.items():
            assert answer.token_ids == theirs[name].token_ids
            np.testing.assert_allclose(answer.logprobs, theirs[name].logprobs, rtol=0, atol=TF32)
        seen.append(ours["1"].logprobs)
    assert len({tuple(values) for values in seen}) == 4


def test_gradients_are_the_cpu_s(stored: str) -> None:
    rows = pack(random_samples(2, *SHAPES), 130).rows
    found = []
    for device in ("cpu", "cuda"):
        decoder = lora_decoder("qwen2", stored=stored)
        policy = make_policy(Decoder(decoder.model.to(device)))
        for row in rows:
            policy.forward_backward([row], grpo())
        found.append(gradients(policy))
    assert found[0].keys() == found[1].keys() and all("lora_" in name for name in found[0])
    exact, ours = (torch.cat([g.flatten().cpu() for g in grads.values()]) for grads in found)
    assert (ours - exact).norm() / exact.norm() < 1e-3


def test_adapter_off_is_the_quantised_base(stored: str) -> None:
    decoder = lora_decoder("qwen2", dtype=torch.bfloat16, stored=stored, device="cuda")
    wrapped: Any = decoder.model
    policy = make_policy(decoder, reference=Reference(decoder, lambda: as_reference(wrapped)))
    rows = pack(random_samples(2, *SHAPES)).rows
    off, on = policy.reference_logprobs(rows)[0], policy.logprobs(rows)[0]
    assert not np.allclose(off, on) and np.isfinite(off).all()
    with torch.no_grad():
        for name, parameter in decoder.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    np.testing.assert_allclose(policy.logprobs(rows)[0], off, rtol=0, atol=1e-6)


def test_bytes_held_are_the_bytes_allocated(stored: str) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
    plain = small_model("llama", dtype=torch.bfloat16, **sizes, head_dim=64)
    whole = Decoder(plain).weight_bytes
    model = copy.deepcopy(plain)
    quantise_linears(model, stored, CUDA)
    decoder = Decoder(model.to(CUDA))
    allocated = torch.cuda.memory_allocated() - before
    # The code books of NF4 are shared by all layers but counted with each.
    assert 0.95 * decoder.weight_bytes <= allocated < 1.05 * decoder.weight_bytes + 2**16
    assert decoder.weight_bytes < (0.56 if stored == "fp8" else 0.36) * whole


# --- fp8-hybrid --------------------------------------------------------------------------------------------------


def hybrid_decoder(name: str, lora: bool) -> Decoder:
    pytest.importorskip("torchao", reason="an extra")
    decoder = as_decoder(small_model(name, dtype=torch.bfloat16).to(CUDA))
    assert hybrid.convert(decoder.model) == 14
    if not lora:
        return Decoder(decoder.model)
    torch.manual_seed(0)
    wrapped = Decoder(attach(decoder.model, LoraSettings(rank=4, alpha=8)))
    shake_adapter(wrapped, 0)
    return wrapped


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    exact = values.detach().double().cpu()
    scale = 2.0 ** np.floor(np.log2(torch.finfo(dtype).max / float(exact.abs().max())))
    return (exact * scale).to(dtype).double() / scale


def close(actual: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Within what bf16 outputs and the tensor cores' short accumulators cost; rounding to FP8 costs ten times that."""
    assert actual is not None
    return bool((actual.detach().double().cpu() - expected).norm() / expected.norm() < 5e-3)


@pytest.mark.parametrize("frozen", (False, True), ids=("trained", "frozen"))
def test_e4m3_forward_and_e5m2_backward(frozen: bool) -> None:
    """37 tokens: no multiple of 16, which FP8 products would refuse without padding."""
    pytest.importorskip("torchao", reason="an extra")
    model = small_model("llama", dtype=torch.bfloat16).to(CUDA)
    hybrid.convert(model)
    layer: Any = model.model.layers[0].mlp.up_proj
    layer.weight.requires_grad_(not frozen)
    x = torch.randn(37, 64, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn(37, 128, device=CUDA, dtype=torch.bfloat16)
    with hybrid.scoring(hybrid.switch_of(model)):
        out = layer(x)
    out.backward(upstream)
    x8, weight8 = rounded(x, torch.float8_e4m3fn), rounded(layer.weight, torch.float8_e4m3fn)
    up8 = rounded(upstream, torch.float8_e5m2)
    assert close(out, x8 @ weight8.T) and close(x.grad, up8 @ weight8)
    assert layer.weight.grad is None if frozen else close(layer.weight.grad, up8.T @ x8)
    assert not close(x.detach() @ layer.weight.detach().T, x8 @ weight8.T)


@pytest.mark.parametrize("kind", (torch.float8_e4m3fn, torch.float8_e5m2), ids=("e4m3", "e5m2"))
def test_numbers_round_as_torchao_rounds_them(kind: torch.dtype) -> None:
    """Bit for bit, in both directions; what is no number stays none."""
    pytest.importorskip("torchao", reason="an extra")
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig

    from shoal.models.kernels.fp8 import largest, rounded

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
def test_products_in_few_kernels_are_torchao_s(trained: bool) -> None:
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
        with hybrid.scoring(hybrid.switch_of(model)):
            out = product(own)
        out.backward(upstream)
        found.append([out.detach(), own.grad, *([layer.weight.grad] if trained else [])])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
@pytest.mark.parametrize("recompute", (False, True), ids=("kept", "recomputed"))
def test_gradients_in_fp8_point_where_bf16_s_do(lora: bool, recompute: bool) -> None:
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
    """The policy scores in FP8 and the sampler in bf16; the figure goes into the test report."""
    k3, mean = mismatch(hybrid_decoder("qwen2", lora), None)
    record_property("mismatch/k3", k3)
    record_property("mean |log-prob difference|", mean)
    print(f"fp8-hybrid, {'lora' if lora else 'full'}: mismatch/k3 {k3:.2e}, mean difference {mean:.3f}")
    assert 1e-5 < k3 < 0.05


def test_the_sampler_keeps_its_fused_path_and_its_answers() -> None:
    decoder = hybrid_decoder("llama", lora=False)
    engine = make_engine(decoder, **ENGINE, graphs=True)
    assert "few kernels" in engine.path, engine.path
    plain = make_engine(as_decoder(small_model("llama", dtype=torch.bfloat16).to(CUDA)), **ENGINE, graphs=True)
    ours, theirs = run(engine, REQUESTS), run(plain, REQUESTS)
    assert all(answer.logprobs == theirs[name].logprobs for name, answer in ours.items())
    policy = make_policy(decoder)
    policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
    policy.optim_step()
    assert run(engine, REQUESTS)["1"].logprobs != ours["1"].logprobs, "graphs see the step"


# --- adamw_8bit --------------------------------------------------------------------------------------------------


def fall(optimizer: MasterAdamW, steps: range) -> None:
    for seed in steps:
        generator = torch.Generator(CUDA).manual_seed(seed)
        for parameter in optimizer.parameters.values():
            noise = torch.randn(parameter.shape, generator=generator, device=CUDA)
            (parameter.float() * (parameter.float().detach() + noise)).sum().backward()
        optimizer.step(1e-2)
        optimizer.zero_grad()


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = {name: torch.randn(shape, generator=generator) for name, shape in (("m", (97, 130)), ("n", (64,)))}
    return {name: nn.Parameter(value.to(CUDA, torch.bfloat16)) for name, value in made.items()}


def test_eight_bit_moments() -> None:
    """Fifty steps within 5 % of AdamW's way, continued bit for bit, a quarter of the bytes, no waiting in a step."""
    pytest.importorskip("bitsandbytes", reason="an extra")
    start = {name: p.detach().float() for name, p in parameters().items()}
    exact, small, again = (MasterAdamW(parameters(), AdamSettings(eight_bit=bits)) for bits in (False, True, True))
    fall(exact, range(50))
    fall(small, range(25))
    again.load_state({name: tensor.cpu() for name, tensor in small.state().items()})
    for optimizer in (small, again):
        fall(optimizer, range(25, 50))
    assert all(torch.equal(small.state()[name], again.state()[name]) for name in small.state())
    way = (exact.masters["m"] - start["m"]).norm()
    assert (exact.masters["m"] - small.masters["m"]).norm() / way < 0.05
    masters = 4 * (97 * 130 + 64)
    assert small.state_bytes - masters < 0.3 * (exact.state_bytes - masters)
    for parameter in small.parameters.values():
        parameter.sum().backward()
    with no_waiting():
        small.step(1e-2)
