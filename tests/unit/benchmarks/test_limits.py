"""The limits that benchmarks divide by, compared with manual computations."""

import importlib.util
import sys
from pathlib import Path

import pytest

from shoal.models.random_models import shape_config


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
