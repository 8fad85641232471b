"""Rounding to FP8 in fused kernels, under Triton's interpreter, which does not round to nearest: all numbers here are
FP8 numbers. tests/parity/test_gpu_hybrid.py compares the rounding of a GPU.
"""

from __future__ import annotations

import pytest

from support.interpreter import run_interpreted as run

pytest.importorskip("triton", reason="Triton is installed on Linux only")


def test_rounded_both_ways() -> None:
    """Scales are powers of two, 2^8 for a largest number of 1.75 in E4M3. Rows of the transposed matrix are padded
    with zeros.
    """
    run("""
        from shoal.models.kernels.quant import largest, rounded
        for rows, columns in ((5, 48), (70, 130), (1, 16), (64, 64)):
            x = (torch.randint(-7, 8, (rows, columns)) / 4).bfloat16()
            x[0, 0] = -1.75
            top = largest(x)
            assert top.item() == 1.75
            for kind, inverse in ((torch.float8_e4m3fn, 2.0**-8), (torch.float8_e5m2, 2.0**-15)):
                found = rounded(x, kind, top, turned=True)
                assert found.inverse.item() == inverse
                assert torch.equal(found.plain.float() * inverse, x.float())
                assert found.turned.shape == (columns, -(-rows // 16) * 16)
                assert torch.equal(found.turned[:, :rows].float() * inverse, x.float().T)
                assert not found.turned[:, rows:].float().any()
                alone = rounded(x, kind, top, plain=False, turned=True)
                assert alone.plain is None and torch.equal(alone.turned.float(), found.turned.float())
    """)


def test_all_zero_matrix() -> None:
    run("""
        from shoal.models.kernels.quant import largest, rounded
        zeros = torch.zeros(3, 16, dtype=torch.bfloat16)
        found = rounded(zeros, torch.float8_e4m3fn, largest(zeros))
        assert not found.plain.float().any() and torch.isfinite(found.inverse)
    """)


@pytest.mark.parametrize("trained", (True, False))
def test_products_match_the_reference(trained: bool) -> None:
    """Eleven tokens through a layer of 32 and 48: forward, to the input, and to the weight if it is trained."""
    pytest.importorskip("torchao", reason="an extra")
    run(f"""
        from types import SimpleNamespace
        from shoal.models.fp8_linear import _Product
        how = SimpleNamespace(use_fast_accum=False)
        layer = SimpleNamespace(linear_mm_config=SimpleNamespace(output=how, grad_input=how, grad_weight=how))
        x = (torch.randint(-7, 8, (11, 32)) / 4).bfloat16().requires_grad_()
        weight = (torch.randint(-7, 8, (48, 32)) / 8).bfloat16().requires_grad_({trained})
        layer.weight = weight
        upstream = (torch.randint(-3, 4, (11, 48)) / 4).bfloat16()
        out = _Product.apply(x, weight, layer)
        out.backward(upstream)
        near = lambda ours, exact: torch.allclose(ours.double(), exact, rtol=2**-8, atol=0)  # one rounding, to bf16
        with torch.no_grad():
            assert near(out, x.double() @ weight.double().T)
            assert near(x.grad, upstream.double() @ weight.double())
            assert near(weight.grad, upstream.double().T @ x.double()) if {trained} else weight.grad is None
    """)
