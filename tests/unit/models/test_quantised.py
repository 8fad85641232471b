"""A quantised base under LoRA: the numbers of its dequantised weights, and gradients only in adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import nn

from shoal.core.errors import ModelError
from shoal.models.decoder import Decoder
from shoal.models.lora import as_reference
from shoal.models.quantize import QuantisedLinear, count_weights, held_bytes, quantise_linears
from shoal.models.sampler_view import SamplerView
from shoal.trainer.checkpoint import export_weights
from shoal.trainer.policy import Reference
from support.engines import ask, make_engine, run
from support.models import TOKENIZER, as_decoder, lora_decoder, random_prompts, small_model
from support.training import gradients, grpo, make_policy, pack, random_samples

ROWS = pack(random_samples(0, (4, 8), (10, 6), (30, 21))).rows
CPU = torch.device("cpu")


@pytest.fixture(params=("fp8", "fp4", "nf4"))
def stored(request: pytest.FixtureRequest) -> str:
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    return request.param


def dequantised(decoder: Decoder) -> Decoder:
    """The same model and adapter with plain linear layers that contain the dequantised weights."""
    model: Any = copy.deepcopy(decoder.model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, QuantisedLinear):
                linear = nn.Linear(child.in_features, child.out_features, bias=False)
                linear.weight = nn.Parameter(child.weight, requires_grad=False)
                linear.bias = child.bias
                setattr(parent, name, linear)
    return Decoder(model)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_forward_and_backward_are_those_of_the_dequantised_weight(stored: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(40, 24).to(dtype)
    layer = QuantisedLinear(plain, stored, CPU)
    twin = nn.Linear(40, 24).to(dtype)
    twin.weight.data, twin.bias.data = layer.weight, plain.bias.data
    one, other = (torch.randn(3, 5, 40, generator=generator.manual_seed(1)).to(dtype).requires_grad_() for _ in "ab")
    upstream = torch.randn(3, 5, 24, generator=generator).to(dtype)
    layer(one).backward(upstream)
    twin(other).backward(upstream)
    assert torch.equal(layer(one), twin(other))
    assert one.grad is not None and other.grad is not None
    torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
    assert [p.requires_grad for p in layer.parameters()] == [False], "the bias, frozen; the weight is not a parameter"


def test_policy_gradients_equal_the_dequantised_model(stored: str) -> None:
    decoder = lora_decoder("qwen2", stored=stored)
    policy, twin = make_policy(decoder), make_policy(dequantised(decoder))
    np.testing.assert_allclose(policy.logprobs(ROWS).read()[1][0], twin.logprobs(ROWS).read()[1][0], rtol=0, atol=1e-5)
    for each in (policy, twin):
        each.forward_backward(ROWS, grpo())
    ours, theirs = gradients(policy), gradients(twin)
    assert ours.keys() == theirs.keys() and len(ours) == 2 * 7 * 2 and all("lora_" in name for name in ours)
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-3, atol=1e-6)


def test_training_moves_adapters_and_nothing_else(stored: str) -> None:
    decoder = lora_decoder(stored=stored)
    base = {name: t.clone() for name, t in decoder.model.state_dict().items() if "lora_" not in name}
    assert any(t.dtype == torch.uint8 for t in base.values())
    policy = make_policy(decoder)
    before = policy.logprobs(ROWS).read()[1][0]
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()
    after = decoder.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())
    assert not np.allclose(policy.logprobs(ROWS).read()[1][0], before)


def test_sampler_and_trainer_agree_before_and_after_a_step(stored: str) -> None:
    decoder = lora_decoder(stored=stored)
    policy, engine = make_policy(decoder), make_engine(decoder)
    request = ask("r", random_prompts(0, 12)[0], seed=3, max_tokens=12)
    answers = []
    for _ in range(2):
        answer = run(engine, [request])["r"]
        answers.append(answer.logprobs)
        sample = random_samples(0, (12, 12))[0][0]
        sample.token_ids[:] = [*request.prompt_ids, *answer.token_ids]
        (row,) = pack([[sample]]).rows
        np.testing.assert_allclose(
            policy.logprobs([row]).read()[1][0][row.loss_mask], answer.logprobs, rtol=0, atol=1e-5
        )
        policy.forward_backward(ROWS, grpo())
        policy.optim_step()
    assert answers[0] != answers[1]


def test_noise_and_snapshots(stored: str) -> None:
    decoder = lora_decoder(stored=stored)
    request = ask("r", random_prompts(0, 12)[0], seed=3, max_tokens=12)
    view = SamplerView(decoder, "snapshot")
    engine = make_engine(decoder, view)
    clean = run(engine, [request])["r"].logprobs
    view.refresh(1, sigma=0.3, seed=5)
    assert run(engine, [request])["r"].logprobs != clean
    view.refresh(1)
    policy = make_policy(decoder)
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()
    assert run(engine, [request])["r"].logprobs == clean, "the snapshot's slot is unchanged, and noise is removed"


def test_reference_is_the_quantised_base_alone(stored: str) -> None:
    decoder = lora_decoder("qwen2", stored=stored)
    model = small_model("qwen2")
    quantise_linears(model, stored, CPU)
    wrapped: Any = decoder.model
    policy = make_policy(decoder, reference=Reference(decoder, lambda: as_reference(wrapped)))
    np.testing.assert_array_equal(
        policy.reference_logprobs(ROWS).read()[1][0], make_policy(as_decoder(model)).logprobs(ROWS).read()[1][0]
    )


def test_exported_adapter_loads_with_peft_on_the_published_base(stored: str, tmp_path: Path) -> None:
    decoder = lora_decoder("qwen2", stored=stored)
    export_weights(make_policy(decoder), TOKENIZER, tmp_path)
    assert {file.suffix for file in tmp_path.glob("adapter_*")} == {".json", ".safetensors"}
    loaded: Any = PeftModel.from_pretrained(small_model("qwen2"), str(tmp_path))
    ours = {name: p for name, p in decoder.model.named_parameters() if "lora_" in name}
    theirs = {name: p for name, p in loaded.named_parameters() if "lora_" in name}
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    loaded.merge_and_unload()
    again = lora_decoder("qwen2", stored=stored, adapter_path=str(tmp_path))
    np.testing.assert_array_equal(
        make_policy(again).logprobs(ROWS).read()[1][0], make_policy(decoder).logprobs(ROWS).read()[1][0]
    )


def test_merging_into_the_stored_base_is_refused(stored: str, tmp_path: Path) -> None:
    decoder: Any = lora_decoder(stored=stored)
    export_weights(make_policy(decoder), TOKENIZER, tmp_path)
    again: Any = lora_decoder(stored=stored, adapter_path=str(tmp_path))
    for model in (decoder.model, again.model):
        with pytest.raises(ModelError, match="cannot be merged into a quantised base"):
            model.merge_and_unload()


def test_memory_and_dtype(stored: str) -> None:
    """Linear layers of a layer: 64·(4+2+2)·32 and the transposed ones, and 3·64·128, twice. The rest has 16 bits."""
    model = small_model("qwen3", dtype=torch.bfloat16)
    weights, plain = count_weights(model), held_bytes(model)
    assert plain == 2 * weights + sum(b.nbytes for b in model.buffers())
    assert quantise_linears(model, stored, CPU) == 14
    assert Decoder(model).dtype == torch.bfloat16 and Decoder(model).device == CPU
    assert count_weights(model) == weights
    linear = 2 * (64 * 8 * 32 + 64 * 4 * 32 + 3 * 64 * 128)
    saved = plain - Decoder(model).weight_bytes
    bits = {"fp8": 8.01, "fp4": 4.51, "nf4": 5.31}[
        stored
    ]  # small layers: the table of bitsandbytes is the largest part
    assert linear * (16 - bits) / 8 <= saved < linear * 1.5


def test_head_keeps_its_dtype_and_copies_are_independent(stored: str) -> None:
    model: Any = small_model("llama")
    quantise_linears(model, stored, CPU)
    assert type(model.lm_head) is nn.Linear and isinstance(model.model.layers[0].mlp.up_proj, QuantisedLinear)
    twin = copy.deepcopy(model)
    expected = twin.model.layers[0].mlp.up_proj.weight
    model.model.layers[0].mlp.up_proj.codes.zero_()  # type: ignore[operator]
    assert torch.equal(twin.model.layers[0].mlp.up_proj.weight, expected)
    assert f"stored as {stored}" in repr(twin)
