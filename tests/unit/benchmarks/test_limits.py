"""The limits that benchmarks divide by, compared with manual computations."""

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from models.families import build
from shoal.models.random_models import shape_config
from support.models import as_decoder


def load_benchmark(name: str):
    path = Path(__file__).parents[3] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


limits = load_benchmark("limits")
# 10 body weights, 5 head weights, 2 layers of 3 query numbers, 4 numbers of keys and values per token, 2 bytes each.
SMALL = limits.ModelShape(20, 10, 5, layers=2, query_numbers=3, cache_numbers=4, adapter_numbers=7)


def test_decode_counts_the_minimum_bytes():
    # One sequence, prompt 3, 3 new tokens: two steps, with 4 and 5 keys.
    work = SMALL.decode([(3, 3)], slots=8)
    assert work.bytes == 2 * (15 * 2) + (4 + 5) * 8 + 2 * 8
    assert work.operations == 2 * 15 * 2 + 4 * 2 * 3 * (4 + 5)


def test_decode_shares_weights_between_slots():
    alone = SMALL.decode([(1, 2)], slots=1)
    together, one_by_one = (SMALL.decode([(1, 2)] * 4, slots) for slots in (4, 1))
    assert together.bytes == 4 * alone.bytes - 3 * 30
    assert one_by_one.bytes == 4 * alone.bytes
    assert together.operations == one_by_one.operations == 4 * alone.operations


def test_longest_sequence_bounds_the_steps():
    # 1 + 5 tokens after the first ones in two slots: 5 steps, not 3.
    work = SMALL.decode([(1, 2), (1, 6)], slots=2)
    assert work.bytes == 5 * 30 + (2 + (2 + 3 + 4 + 5 + 6)) * 8 + 6 * 8


def test_prefill_computes_a_shared_prompt_once_and_writes_it_everywhere():
    work = SMALL.prefill([2], sequences=3)
    assert work.operations == 2 * (10 * 2 + 5 * 3) + 4 * 2 * 3 * (1 + 2)
    assert work.bytes == 30 + 2 * 3 * 8


def test_training_counts_six_operations_a_parameter_and_four_under_adapters():
    assert SMALL.train(10).operations == 6 * 20 * 10
    assert SMALL.train(10, adapter_parameters=3).operations == (4 * 20 + 6 * 3) * 10
    assert SMALL.optimizer_bytes(20) == 20 * (24 + 4 + 2)


def test_limit_is_the_lower_of_two_rates():
    rates = limits.Rates(bytes_per_s=100.0, operations_per_s=1000.0)
    found = limits.Work(bytes=200.0, operations=500.0).limits(rates, tokens=4, measured=1.0)
    assert found == {"limit_bytes": 2.0, "limit_operations": 8.0, "fraction": 0.5}
    assert limits.Work(200.0, 500.0).least_s(rates) == 2.0


def test_known_shape():
    shape = limits.ModelShape.of(shape_config("qwen2.5-0.5b"))
    assert shape.parameters == 494_032_768
    assert shape.head_weights == 151_936 * 896
    # Queries, output, keys and values, gate, up and down of 24 layers.
    assert shape.body_weights == 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
    assert shape.cache_bytes == 24 * 2 * 2 * 64 * 2
    assert shape.adapter_numbers == 24 * (2 * (896 + 896) + 2 * (896 + 128) + 3 * (896 + 4864))
    rates = limits.Rates(4.3e12, 790e12)
    assert shape.train(24_576).limits(rates, 24_576, 0.0)["limit_operations"] == pytest.approx(266_500, rel=1e-3)
    decode = shape.decode([(128, 256)] * 128, 128)
    assert decode.limits(rates, 128 * 255, 0.0)["limit_bytes"] == pytest.approx(395_800, rel=5e-3)


def test_untied_embedding_reads_only_needed_rows():
    shape = limits.ModelShape.of(shape_config("qwen2.5-7b"))
    assert shape.parameters - (shape.body_weights + shape.head_weights) > 151_936 * 3584


def test_experts_that_a_step_uses():
    # 4 experts of 25 weights, 2 per token: one token reads half of them, two read 3/4 on average.
    mixture = replace(SMALL, expert_weights=100, experts=4, experts_per_token=2)
    assert [mixture.step_weight_bytes(tokens) for tokens in (1, 2)] == [2 * (15 + 50), 2 * (15 + 75)]
    assert mixture.decode([(3, 3)], slots=8).operations == SMALL.decode([(3, 3)], slots=8).operations + 2 * 50 * 2
    assert mixture.train(1).operations == 6 * (20 - 50)


def test_keys_within_a_window():
    # Queries at positions 4 to 6 see 4, 5 and 6 keys, or 5 at most in the second layer.
    windowed = replace(SMALL, windows=(5,))
    assert SMALL.keys(3, 3) == 15 and windowed.keys(3, 3) == (15 + 14) / 2
    assert windowed.keys(0, 2) == SMALL.keys(0, 2) and windowed.keys(9, 2) == (10 + 11 + 5 + 5) / 2


def test_states_are_read_and_written_in_every_step():
    stateful = replace(SMALL, state_bytes=1000)
    assert stateful.decode([(3, 3)] * 2, 8).bytes == SMALL.decode([(3, 3)] * 2, 8).bytes + 2 * 2 * 2 * 1000
    assert stateful.prefill([2], 3).bytes == SMALL.prefill([2], 3).bytes + 3 * 1000


def test_shapes_with_experts_windows_and_states():
    mixture = limits.ModelShape.of(shape_config("qwen3-30b-a3b"))
    assert (mixture.experts, mixture.experts_per_token) == (128, 8)
    assert mixture.expert_weights == 48 * 128 * 3 * 2048 * 768
    assert mixture.token_weights + mixture.head_weights == pytest.approx(3.0e9, rel=0.03)
    gemma = limits.ModelShape.of(shape_config("gemma-3-4b"))
    assert gemma.layers == 34 and gemma.windows == (1024,) * 29
    hybrid = limits.ModelShape.of(shape_config("qwen3.5-0.8b"))
    assert hybrid.layers == 6 and hybrid.cache_bytes == 6 * 2 * 2 * 256 * 2
    oss = limits.ModelShape.of(shape_config("gpt-oss-20b"))
    assert oss.expert_weights == 24 * 32 * 3 * 2880 * 2880 and len(oss.windows) == 12


def test_state_size_is_that_of_the_engine():
    model = build("qwen3_5_text")
    engine = sum(layer.state_bytes for layer in as_decoder(model).verify().values())
    assert limits.ModelShape.of(model.config, element_bytes=4).state_bytes == engine > 0
