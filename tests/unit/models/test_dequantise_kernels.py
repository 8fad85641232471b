"""The kernels that read quantised weights, bit for bit against plain torch, under Triton's interpreter."""

from __future__ import annotations

import textwrap

import pytest

from support.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is installed on Linux only")


def run(code: str) -> None:
    prelude = """
        import os, torch
        from shoal.models.quantize import FORMATS
        torch.manual_seed(0)

        def both(name, weight, dtype):
            made, shape = FORMATS[name], tuple(weight.shape)
            stored = made.quantise(weight)
            os.environ["TRITON_INTERPRET"] = "0"
            plain = made.dequantise(stored, shape, dtype)
            os.environ["TRITON_INTERPRET"] = "1"
            return plain, made.dequantise(stored, shape, dtype)
    """
    run_interpreted(textwrap.dedent(prelude) + textwrap.dedent(code))


@pytest.mark.parametrize("name", ("fp8", "fp4"))
def test_random_weights_of_every_size(name: str) -> None:
    """Rows and columns that end inside a block. Numbers over six decades, so that scales of all sizes occur."""
    run(f"""
        for shape in ((130, 200), (7, 20), (128, 256), (1, 2), (300, 33)):
            weight = torch.randn(shape) * torch.logspace(-6, 0, shape[1])
            for dtype in (torch.float32, torch.float16):  # the interpreter cuts bf16 off instead of rounding
                plain, kernel = both("{name}", weight, dtype)
                assert plain.shape == shape and kernel.dtype == dtype
                assert torch.equal(plain, kernel), (shape, dtype, (plain - kernel).abs().max())
    """)


def test_every_code() -> None:
    """All 254 finite E4M3 numbers and all 16 of E2M1."""
    run("""
        from shoal.models.kernels.quant import fp8_blocks, nvfp4
        codes = torch.tensor([c for c in range(256) if c % 128 != 127], dtype=torch.uint8)[None]
        exact = codes.view(torch.float8_e4m3fn).float()
        scales = torch.ones(1, 2)
        assert torch.equal(fp8_blocks(codes, scales, torch.float32, 128), exact)
        packed = torch.tensor([[2 * i | (2 * i + 1) << 4 for i in range(8)]], dtype=torch.uint8)
        one = torch.tensor([[0x38]], dtype=torch.uint8)  # 1.0 in E4M3
        found = nvfp4((packed, one, torch.ones(1)), (1, 16), torch.float32, 16)
        half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        assert found.tolist() == [[*half, *(-x for x in half)]]
    """)


def test_layer_reads_its_storage_in_place() -> None:
    """Captured graphs rely on this: the next call uses new values of the stored tensors."""
    run("""
        from shoal.models.quantize import QuantisedLinear
        for name in ("fp8", "fp4"):
            layer = QuantisedLinear(torch.nn.Linear(48, 32, bias=False), name, torch.device("cpu"))
            other = QuantisedLinear(torch.nn.Linear(48, 32, bias=False), name, torch.device("cpu"))
            x = torch.randn(3, 48)
            assert not torch.equal(layer(x), other(x))
            for mine, theirs in zip(layer.buffers(), other.buffers()):
                mine.copy_(theirs)
            assert torch.equal(layer(x), other(x))
    """)
