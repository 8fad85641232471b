"""Quantised bases and 8-bit moments on a CUDA device: against the CPU, in graphs, and in bytes."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from shoal.models.decoder import Decoder
from shoal.models.lora import as_reference
from shoal.models.quantize import FORMATS, QuantisedLinear, quantise_linears
from shoal.models.sampler_view import SamplerView
from shoal.trainer.optimizer import AdamSettings, MasterAdamW
from shoal.trainer.policy import Reference
from support.engines import ask, make_engine, run
from support.mismatch import mismatch
from support.models import lora_decoder, random_prompts, small_model
from support.training import gradients, grpo, make_policy, pack, random_samples

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]

CUDA = torch.device("cuda")
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
TF32 = 5e-3
ENGINE: dict[str, Any] = {"slots": 16, "context_tokens": 192}
REQUESTS = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]


@pytest.fixture(params=("fp8", "fp4", "nf4"))
def stored(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    return request.param


def no_waiting() -> Any:
    """Within the block, any sync of the host with the device raises."""

    class Watch:
        def __enter__(self) -> None:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_: object) -> None:
            torch.cuda.set_sync_debug_mode("default")

    return Watch()


# --- quantised bases ---------------------------------------------------------------------------------------------


def test_kernels_read_weights_stored_by_the_cpu(stored: str) -> None:
    """Equal bits in fp32 and after one rounding to bf16, and the GPU stores the same values as the CPU."""
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
            assert same > 0.995, (shape, name, float(same))  # a division that rounds half-way cases differently


def test_captured_layer_reads_weights_in_place_without_sync(stored: str) -> None:
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


def test_graphs_use_updated_weights_and_noise(stored: str) -> None:
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
    off, on = policy.reference_logprobs(rows).read()[1][0], policy.logprobs(rows).read()[1][0]
    assert not np.allclose(off, on) and np.isfinite(off).all()
    with torch.no_grad():
        for name, parameter in decoder.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    np.testing.assert_allclose(policy.logprobs(rows).read()[1][0], off, rtol=0, atol=1e-6)


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
    """Fifty steps within 5 % of AdamW's path, resumed bit for bit, a quarter of the bytes, no sync in a step."""
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
