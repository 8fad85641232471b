"""Quantise and dequantise against float64 NumPy from the definitions of the formats, and manual examples."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
import torch

from shoal.models.quantize import E2M1, FORMATS

# Sizes that end inside a block of 128, inside a group of 16 and inside a block of 64, and a plain size.
SHAPES = ((130, 200), (7, 20), (128, 256), (1, 2))


def e4m3_numbers() -> np.ndarray:
    """The 127 finite numbers from 0 up, by code: exponent bias 7, three mantissa bits, no infinities. 127 is NaN."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    return np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest magnitudes of an ascending table. Half-way values take the even code."""
    size = np.minimum(np.abs(values), table[-1])
    high = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low = high - 1
    below, above = size - table[low], table[high] - size
    return np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)


def rounded(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.sign(values) * table[nearest(values, table)]


def random_weight(shape: tuple[int, int], seed: int = 0) -> torch.Tensor:
    """Columns of very different size, some zero rows, and one outlier, in bf16 like checkpoints."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator) * torch.logspace(-3, 0, shape[1])
    weight[::5] *= 0 if shape[0] > 1 else 1
    weight[-1, -1] = 9.0
    return weight.bfloat16()


def restored(name: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    made = FORMATS[name]
    return made.dequantise(made.quantise(weight), (weight.shape[0], weight.shape[1]), dtype)


def scale_of_fp8_block(block: np.ndarray) -> float:
    return float(np.float32(np.abs(block).max()) / np.float32(448)) or 1.0


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_blocks(shape: tuple[int, int]) -> None:
    weight = random_weight(shape)
    exact, found = weight.double().numpy(), restored("fp8", weight).double().numpy()
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            block = exact[row : row + 128, column : column + 128]
            scale = scale_of_fp8_block(block)
            expected = rounded((block / scale).astype(np.float32), e4m3_numbers()) * scale
            np.testing.assert_allclose(found[row : row + 128, column : column + 128], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nvfp4(shape: tuple[int, int]) -> None:
    weight = random_weight(shape)
    exact, found = weight.double().numpy(), restored("fp4", weight).double().numpy()
    whole = np.float32(np.abs(exact).max()) / np.float32(448 * 6)
    for row in range(shape[0]):
        for column in range(0, shape[1], 16):
            group = exact[row, column : column + 16]
            scale = rounded(np.array([np.abs(group).max() / 6 / whole]), e4m3_numbers())[0] * whole
            expected = rounded(group / scale, np.array(E2M1)) * scale if scale > 0 else 0 * group
            ours = found[row, column : column + 16]
            # Half-way values in float64 may round to either side in fp32. Both are representable and equally near.
            np.testing.assert_allclose(np.abs(ours - group), np.abs(expected - group), rtol=1e-5, atol=1e-6 * scale)
            np.testing.assert_allclose(rounded(ours / (scale or 1), np.array(E2M1)) * scale, ours, rtol=1e-6)


def nf4_numbers() -> np.ndarray:
    """Quantiles of the normal distribution, eight above zero and seven below, scaled to ±1, and zero."""
    edge, inverse = 0.9677083, NormalDist().inv_cdf
    above = [inverse(p) for p in np.linspace(edge, 0.5, 9)[:-1]]
    below = [-inverse(p) for p in np.linspace(edge, 0.5, 8)[:-1]]
    return np.sort(np.array([*above, 0.0, *below])) / max(above)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_double_quantised(shape: tuple[int, int]) -> None:
    """Every number is the nearest of 16, times a scale that is stored in 8 bits around the mean of all scales."""
    pytest.importorskip("bitsandbytes", reason="an extra")
    weight = random_weight(shape)
    stored = {name: tensor.double().numpy() for name, tensor in FORMATS["nf4"].quantise(weight).items()}
    table = nf4_numbers()
    flat = weight.double().numpy().reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % 64)).reshape(-1, 64)
    largest = np.abs(blocks).max(1)
    assert stored["offset"] == pytest.approx(largest.mean(), rel=1e-6)
    spread = np.repeat(stored["scale_scales"], 256)[: len(blocks)]
    scales = stored["scale_map"][stored["scales"].astype(int)] * spread + stored["offset"]
    np.testing.assert_allclose(scales, largest, rtol=0, atol=np.abs(largest - largest.mean()).max() / 64)
    packed = stored["codes"].astype(int).reshape(-1)
    codes = np.stack([packed >> 4, packed & 15], 1).reshape(-1)[: len(flat)]
    expected = table[codes] * np.repeat(scales, 64)[: len(flat)]
    np.testing.assert_allclose(restored("nf4", weight).double().numpy().reshape(-1), expected, rtol=1e-5, atol=1e-7)
    ratios = (blocks / np.where(largest > 0, largest, 1)[:, None]).reshape(-1)[: len(flat)]
    gaps = np.abs(ratios[:, None] - table).min(1)
    np.testing.assert_allclose(np.abs(ratios - table[codes]), gaps, rtol=0, atol=1e-6)


def test_matches_manual_computation() -> None:
    """Largest number 448: fp8 keeps it with scale 1, and 17 is half-way between 16 and 18. Largest 2688 = 448 · 6: fp4
    has the tensor scale 1. A group whose largest number is 12 has scale 2, so 5 becomes 2.5, half-way, and then 2 · 2.
    """
    assert restored("fp8", torch.tensor([[448.0, 17.0, -0.3, 0.0]])).tolist() == [[448.0, 16.0, -0.3125, 0.0]]
    weight = torch.zeros(1, 32)
    weight[0, 0] = 2688.0
    weight[0, 16:20] = torch.tensor([12.0, 5.0, -1.0, 0.4])
    assert restored("fp4", weight)[0, [0, 16, 17, 18, 19]].tolist() == [2688.0, 12.0, 4.0, -1.0, 0.0]
    stored = FORMATS["fp4"].quantise(weight)
    assert stored["codes"][0, 8:10].tolist() == [7 | 4 << 4, (8 | 1) | 0 << 4], "two per byte, low half first"
    assert (stored["whole"].item(), stored["scales"].shape) == (1.0, (1, 2))


@pytest.mark.parametrize(("name", "bits"), [("fp8", 8.002), ("fp4", 4.5001), ("nf4", 4.13)])
def test_bits_per_number(name: str, bits: float) -> None:
    """8 + 32/128²; 4 + 8/16; 4 + 8/64 + 32/(64 · 256), and a table of 256 once."""
    if name == "nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    stored = FORMATS[name].quantise(torch.randn(1024, 1024))
    total = sum(t.numel() * t.element_size() for t in stored.values()) * 8 / 1024**2
    assert bits - 0.01 < total < bits + 0.01
    assert all(not t.is_floating_point() or t.dtype == torch.float32 for t in stored.values())


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_any_dtype_is_rounded_once(name: str) -> None:
    if name == "nf4":
        pytest.importorskip("bitsandbytes", reason="an extra")
    assert not restored(name, torch.zeros(20, 40)).any()
    weight = random_weight((33, 48))
    assert torch.equal(restored(name, weight, torch.bfloat16), restored(name, weight).bfloat16())


def test_error_of_each_format() -> None:
    """Of normal numbers: the known relative error of each format, which a wrong scale or order would exceed."""
    pytest.importorskip("bitsandbytes", reason="an extra")
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    errors = {name: float((restored(name, weight) - weight).norm() / weight.norm()) for name in FORMATS}
    assert 0.025 < errors["fp8"] < 0.028 and 0.09 < errors["fp4"] < 0.1 and 0.09 < errors["nf4"] < 0.1, errors
