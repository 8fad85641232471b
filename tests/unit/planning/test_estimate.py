"""The predictions of `shoal plan` against exact counts, lower limits and hand calculation."""

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.models.attention import KEY_MULTIPLE, ROW_MULTIPLE
from shoal.models.random_models import shape_config
from shoal.planning import estimate as estimates
from shoal.planning import memory
from shoal.planning.estimate import Workload, estimate
from shoal.planning.shapes import KNOWN_SHAPES, read_shape, shape_of
from shoal.planning.time_model import CONSTANTS, DEVICES, GIB, Rollouts, TimeModel

ROOT = Path(__file__).parents[3]
H200 = DEVICES["h200"]


def load_limits():
    spec = importlib.util.spec_from_file_location("plan_limits", ROOT / "benchmarks" / "limits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


limits = load_limits()


def exact(name: str):
    """Counted on the real model, without storage."""
    return limits.ModelShape.of(shape_config(name))


@pytest.mark.parametrize("name", KNOWN_SHAPES)
def test_shape_counts_what_the_model_has(name: str):
    shape, model = read_shape(name), exact(name)
    assert shape.parameters == model.parameters
    assert shape.layers * shape.layer_weights == model.body_weights and shape.head_weights == model.head_weights
    assert shape.key_value_bytes == model.cache_bytes
    assert shape.adapter_rank_numbers == model.adapter_numbers


def test_layers_without_attention_are_refused():
    with pytest.raises(ConfigError, match="linear_attention"):
        shape_of("model", {**KNOWN_SHAPES["qwen2.5-0.5b"], "layer_types": ["full_attention", "linear_attention"]})


def test_large_shapes_have_their_published_parameters():
    assert read_shape("llama-3-8b").parameters == 8_030_261_248
    assert read_shape("llama-3-70b").parameters == 70_553_706_496


def test_folder_and_nested_config_are_read(tmp_path: Path):
    config = KNOWN_SHAPES["qwen2.5-0.5b"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert replace(read_shape(str(tmp_path)), name="qwen2.5-0.5b") == read_shape("qwen2.5-0.5b")
    assert shape_of("qwen2.5-0.5b", {"text_config": config}) == read_shape("qwen2.5-0.5b")


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"num_experts": 8}, "mixture-of-experts"),
        ({"hidden_size": None}, "hidden_size"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"num_hidden_layers": "24"}, "num_hidden_layers"),
        ({"head_dim": -64}, "head_dim"),
        ({"num_key_value_heads": "two"}, "num_key_value_heads"),
    ],
)
def test_unplannable_config_is_refused(change: dict[str, object], word: str):
    with pytest.raises(ConfigError, match=word):
        shape_of("model", {**KNOWN_SHAPES["qwen2.5-0.5b"], **change})


@pytest.mark.parametrize("name", KNOWN_SHAPES)
@pytest.mark.parametrize(("count", "prompt", "new"), [(8, 128, 256), (512, 128, 256), (128, 4096, 64)])
def test_no_prediction_is_faster_than_the_device_allows(name: str, count: int, prompt: int, new: int):
    shape, model = exact(name), TimeModel(read_shape(name), H200, CONSTANTS)
    rates = limits.Rates(H200.bytes_per_s, H200.operations_per_s)
    rollouts = Rollouts(count, count // 8, prompt, new, new, count)
    assert model.decode_s(rollouts) > shape.decode([(prompt, new)] * count, count).least_s(rates)
    assert model.prefill_s(rollouts) > shape.prefill([prompt] * (count // 8), count).least_s(rates)
    tokens = count * (prompt + new)
    assert model.train_s(tokens, count * new, prompt + new) > 6.0 * shape.body_weights * tokens / rates.operations_per_s
    assert model.optimizer_s(shape.parameters) > shape.optimizer_bytes(shape.parameters) / rates.bytes_per_s


def test_keys_and_steps_of_rollouts():
    """Two completions of three tokens after a prompt of 4: the keys of the prompt in each of the two steps."""
    even = Rollouts(2, 1, 4, 3, 3, slots=2)
    assert (even.drawn, even.steps, even.keys) == (4, 2, 4 * 4 + 2 * 9 / 2)
    assert replace(even, slots=1).steps == 4
    assert replace(even, longest=9).steps == 8 and replace(even, longest=9).keys == 4 * 4 + 2 * 18 / 2


def test_group_in_one_row_shares_its_prompt():
    together = Workload(rollouts=16, group=8, prompt_tokens=128, new_tokens=256, longest=256, sequence_len=2176)
    assert together.trained_tokens == 16 * 256 + 2 * 128
    assert replace(together, sequence_len=384).trained_tokens == 16 * (256 + 128)


def test_memory_of_full_training_adapters_and_shards():
    shape = read_shape("qwen2.5-7b")
    workload = Workload(sharding="none")
    full = dict(estimate(shape, H200, workload).memory["device"].parts)
    assert full["weights"] == 2 * shape.parameters
    assert full["masters, moments and gradients"] == 16 * shape.parameters
    adapted = dict(estimate(shape, H200, replace(workload, lora_rank=16)).memory["device"].parts)
    assert adapted["adapters, masters, moments and gradients"] == 16 * 16 * shape.adapter_rank_numbers
    sharded = estimate(shape, H200, replace(workload, gpus=8, sharding="fsdp")).memory["device"]
    parts = dict(sharded.parts)
    assert parts["masters, moments and gradients"] == 2 * shape.parameters
    assert parts["weights for sampling, one full copy"] == 2 * shape.parameters
    assert sharded.fits and sum(parts.values()) == sharded.used


def test_reference_is_a_copy_only_without_adapters_and_takes_a_pass():
    shape, workload = read_shape("qwen2.5-0.5b"), Workload(reference=True)
    assert dict(estimate(shape, H200, workload).memory["device"].parts)["reference model"] == 2 * shape.parameters
    plain, scored = (estimate(shape, H200, Workload(lora_rank=8, reference=given)) for given in (False, True))
    assert plain.memory == scored.memory and plain.parts_s["training"] < scored.parts_s["training"]


def test_slots_fall_until_a_row_fits():
    """24 GiB do not hold the caches of 512 long sequences beside the optimizer state."""
    found = estimate(read_shape("qwen2.5-0.5b"), DEVICES["4090"], Workload(rollouts=512, sequence_len=8192))
    kept = found.memory["device"]
    assert found.fits and 8 <= kept.slots < 512
    assert kept.used <= kept.total * (1 - memory.RESERVE)
    assert kept.micro_batch_tokens >= 8192


def test_activation_checkpointing_is_the_last_resort():
    shape, long = read_shape("qwen2.5-0.5b"), Workload(sequence_len=131_072)
    assert not estimate(shape, H200, Workload()).memory["device"].recompute
    assert estimate(shape, H200, long).memory["device"].recompute
    assert not estimate(shape, H200, replace(long, recompute=False)).fits


@pytest.mark.parametrize("workload", [Workload(), Workload(sequence_len=16_384, recompute=False)])
def test_every_suggested_change_makes_the_run_fit(workload: Workload):
    shape = read_shape("qwen2.5-7b")
    found = estimate(shape, H200, workload)
    assert not found.fits and found.advice
    ways = {
        "--lora": {"lora_rank": 16}, "--sequence-len": {"sequence_len": max(768, workload.sequence_len // 2)},
        "--gpus 2": {"gpus": 2}, "--gpus 4": {"gpus": 4}, "--gpus 8": {"gpus": 8}, "recompute": {"recompute": None},
    }  # fmt: skip
    for line in found.advice:
        (change,) = [change for word, change in ways.items() if word in line]
        assert estimate(shape, H200, replace(workload, **change)).fits, line


def test_more_devices_take_less_time_and_cost_communication():
    shape, workload = read_shape("qwen2.5-0.5b"), Workload(rollouts=1024, group=8)
    one, eight = (estimate(shape, H200, replace(workload, gpus=count)) for count in (1, 8))
    assert one.communication_s == 0 < eight.communication_s
    assert one.step_s / 8 < eight.step_s < one.step_s
    assert eight.communication_s == pytest.approx(2 * 7 / 8 * 4 * shape.parameters / (450e9 * 0.7))
    assert any("no run on more than one GPU" in line for line in eight.assumptions)


def test_tensor_parallel_sampling_divides_the_weights():
    shape = read_shape("llama-3-70b")
    found = estimate(shape, H200, Workload(gpus=64, sampler_gpus=32, tensor_parallel=4, rollouts=1024))
    assert found.fits and found.workload.replicas == 8
    assert dict(found.memory["sampler"].parts)["weights"] == 2 * shape.parameters / 4
    assert math.isclose(dict(found.memory["trainer"].parts)["masters, moments and gradients"], shape.parameters / 2)
    assert not estimate(shape, H200, Workload(gpus=64, sampler_gpus=32, rollouts=1024)).fits


def test_constants_that_two_modules_state_are_equal():
    assert (estimates.KEY_MULTIPLE, memory.ROW_MULTIPLE) == (KEY_MULTIPLE, ROW_MULTIPLE)
    assert H200.memory_gib * GIB > 139 * GIB and [name for name, d in DEVICES.items() if d.measured] == ["h200"]
