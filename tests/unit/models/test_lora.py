"""Adapters: which layers have one, what is trained, the reference, and independent slots."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import ModelError
from shoal.models import lora
from shoal.models.decoder import Decoder
from shoal.models.lora import LoraSettings, attach, trained_parameters
from shoal.trainer.policy import Reference
from support.models import ARCHITECTURES, as_decoder, lora_decoder, shake_adapter, small_decoder, small_model
from support.training import grpo, make_policy, pack, random_samples, weights

SAMPLES = random_samples(0, (4, 8), (10, 6))
ROWS = pack(SAMPLES).rows


def reference_of(decoder: Decoder) -> Reference:
    return Reference(decoder, lambda: lora.as_reference(decoder.model))  # type: ignore[arg-type]


def logprobs(decoder: Decoder) -> np.ndarray:
    return make_policy(decoder).logprobs(ROWS).read()[1][0]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_new_adapter_is_identity_and_covers_all_linear_layers_except_the_head(architecture: str) -> None:
    bare = logprobs(small_decoder(architecture))
    wrapped = Decoder(attach(as_decoder(small_model(architecture)).model, LoraSettings(rank=4)))
    np.testing.assert_array_equal(logprobs(wrapped), bare)
    names = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained_parameters(wrapped.model)}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name in trained_parameters(wrapped.model))
    assert sum("lora_A" in name for name in trained_parameters(wrapped.model)) == 2 * 7


def test_selected_layers_only() -> None:
    decoder = lora_decoder(target_modules=("q_proj", "v_proj"))
    assert {name.split(".lora_")[0].rsplit(".", 1)[-1] for name in trained_parameters(decoder.model)} == {
        "q_proj",
        "v_proj",
    }
    with pytest.raises(ModelError, match=r"lora_target_modules: \['nowhere'\] match no layer of Qwen3ForCausalLM"):
        lora_decoder(target_modules=("nowhere",))


def test_equal_adapters_are_equal_files(tmp_path: Path) -> None:
    """PEFT keeps target modules as a set, whose order differs from process to process."""
    lora_decoder().model.save_pretrained(str(tmp_path / "one"), selected_adapters=[lora.TRAINED])  # type: ignore[operator]
    attach(small_model("qwen3"), LoraSettings(adapter_path=str(tmp_path / "one"))).save_pretrained(
        str(tmp_path / "two"), selected_adapters=[lora.TRAINED]
    )
    for name in ("one", "two"):
        written = json.loads((tmp_path / name / "adapter_config.json").read_text("utf-8"))["target_modules"]
        assert written == sorted(written) and len(written) == 2 * 7


def test_alpha_over_rank_is_the_scale() -> None:
    """Doubling alpha is doubling B."""
    one, other = lora_decoder(alpha=8), lora_decoder(alpha=16)
    with torch.no_grad():
        for name, parameter in other.model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(0.5)
    np.testing.assert_allclose(logprobs(one), logprobs(other), rtol=0, atol=1e-5)
    assert np.abs(logprobs(one) - logprobs(lora_decoder(alpha=16))).max() > 1e-2


def test_only_adapter_weights_move() -> None:
    decoder = lora_decoder()
    before = weights(decoder)
    policy = make_policy(decoder)
    policy.forward_backward(ROWS, grpo())
    policy.optim_step()
    for name, value in weights(decoder).items():
        assert torch.equal(value, before[name]) == ("lora_" not in name), name


def test_reference_is_the_base_with_the_adapter_off() -> None:
    decoder = lora_decoder()
    policy = make_policy(decoder, reference=reference_of(decoder))
    base = logprobs(small_decoder())
    before = policy.logprobs(ROWS).read()[1][0]
    np.testing.assert_array_equal(policy.reference_logprobs(ROWS).read()[1][0], base)
    assert np.abs(before - base).max() > 1e-2
    np.testing.assert_array_equal(policy.logprobs(ROWS).read()[1][0], before)
    for _ in range(3):
        policy.forward_backward(ROWS, grpo())
        policy.optim_step()
    np.testing.assert_array_equal(policy.reference_logprobs(ROWS).read()[1][0], base)
    assert np.abs(policy.logprobs(ROWS).read()[1][0] - before).max() > 1e-3


def test_with_a_start_adapter_the_reference_is_that_start(tmp_path: Path) -> None:
    first = lora_decoder(seed=4)
    first.model.save_pretrained(str(tmp_path))  # type: ignore[operator]
    decoder = lora_decoder(seed=4, adapter_path=str(tmp_path))
    start = logprobs(first)
    np.testing.assert_array_equal(logprobs(decoder), start)
    assert trained_parameters(decoder.model).keys() == trained_parameters(first.model).keys()
    policy = make_policy(decoder, reference=reference_of(decoder))
    for _ in range(3):
        policy.forward_backward(ROWS, grpo())
        policy.optim_step()
    assert np.abs(policy.logprobs(ROWS).read()[1][0] - start).max() > 1e-3
    np.testing.assert_array_equal(policy.reference_logprobs(ROWS).read()[1][0], start)
    assert np.abs(start - logprobs(small_decoder(seed=4))).max() > 1e-2


def test_folder_without_an_adapter(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config.json"):
        lora_decoder(adapter_path=str(tmp_path))


def test_adapter_slots_are_independent_and_gradients_reach_the_trained_one() -> None:
    decoder = lora_decoder()
    model: Any = decoder.model
    policy, trained = make_policy(decoder), set(trained_parameters(model))

    def scored() -> np.ndarray:
        return policy.logprobs(ROWS).read()[1][0]

    lora.add_slot(model, lora.SAMPLER)
    assert set(trained_parameters(model)) == trained
    before = scored()
    shake_adapter(decoder, seed=9)
    after = scored()
    assert np.abs(after - before).max() > 1e-2
    with lora.using_slot(model, lora.SAMPLER):
        np.testing.assert_array_equal(scored(), before)
    np.testing.assert_array_equal(scored(), after)
    assert set(trained_parameters(model)) == trained
    with lora.as_reference(model):
        np.testing.assert_array_equal(scored(), logprobs(small_decoder()))
    assert set(trained_parameters(model)) == trained
    lora.copy_slot(model, lora.TRAINED, lora.SAMPLER)
    with lora.using_slot(model, lora.SAMPLER):
        np.testing.assert_array_equal(scored(), after)


def test_adapters_have_the_dtype_of_the_model() -> None:
    decoder = lora_decoder(dtype=torch.bfloat16)
    assert {p.dtype for p in decoder.model.parameters()} == {torch.bfloat16}


def test_dropout_is_off_when_scoring_and_sampling() -> None:
    decoder = lora_decoder(dropout=0.5)
    policy = make_policy(decoder)
    np.testing.assert_array_equal(policy.logprobs(ROWS).read()[1][0], policy.logprobs(ROWS).read()[1][0])
    policy.forward_backward(ROWS, grpo())
    assert not decoder.model.training
    np.testing.assert_array_equal(policy.logprobs(ROWS).read()[1][0], logprobs(lora_decoder(dropout=0.0)))
