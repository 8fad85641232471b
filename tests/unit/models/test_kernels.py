"""The Triton kernels of training against plain torch in float64, forward and backward, under Triton's interpreter.

The interpreter must be enabled before Triton is imported, so each check runs in a separate process.
"""

from __future__ import annotations

import pytest

from support.interpreter import run_interpreted

pytest.importorskip("triton", reason="Triton is installed on Linux only")


def test_norm_forward_and_backward() -> None:
    """With and without the residual sum; gradients of input, residual and weight; more rows than programs."""
    run_interpreted("""
        from shoal.models.kernels import elementwise as kernels
        kernels.BACKWARD_PROGRAMS = 3
        from shoal.models.kernels.elementwise import add_norm, norm
        for rows, width in ((1, 48), (7, 100), (10, 64)):
            made = [torch.randn(rows, width) for _ in range(2)] + [torch.randn(width)]
            upstream = torch.randn(rows, width), torch.randn(rows, width)
            def reference(x, residual, weight):
                total = x + residual
                return total, total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
            found = []
            for dtype, function in ((torch.float64, reference), (torch.float32, lambda *a: add_norm(*a, 1e-5))):
                inputs = [t.detach().to(dtype).clone().requires_grad_() for t in made]
                total, out = function(*inputs)
                (total * upstream[0].to(dtype) + out * upstream[1].to(dtype)).sum().backward()
                found.append([total, out, *(t.grad for t in inputs)])
            for exact, ours in zip(*found):
                assert (exact - ours).norm() / exact.norm() < 1e-6
            x, weight = made[0].detach().clone().requires_grad_(), made[2]
            out = norm(x, weight, 1e-5)
            out.backward(upstream[1])
            exact_x = made[0].detach().double().requires_grad_()
            exact = reference(exact_x, torch.zeros(()), weight.double())[1]
            exact.backward(upstream[1].double())
            assert (out - exact).norm() / exact.norm() < 1e-6
            assert (x.grad - exact_x.grad).norm() / exact_x.grad.norm() < 1e-6
    """)


@pytest.mark.parametrize("normed", (False, True))
def test_rotation_forward_and_backward(normed: bool) -> None:
    """Head sizes that are not powers of two, and rows that are views of a wider product."""
    run_interpreted(f"""
        from shoal.models.kernels import elementwise
        elementwise.BACKWARD_PROGRAMS = 2
        tokens, heads, dim = 5, 3, 16
        wide = torch.randn(tokens, (heads + 2) * dim)
        angles = torch.randn(tokens, dim // 2)
        cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
        weight = torch.randn(dim)
        upstream = torch.randn(tokens, heads, dim)
        def reference(x, weight):
            if {normed}:
                x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
            turned = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
            return x * cos[:, None] + turned * sin[:, None]
        def ours(x, weight):
            return elementwise.rotate_heads(x, cos, sin, weight if {normed} else None, 1e-6)
        found = []
        for dtype, function in ((torch.float64, reference), (torch.float32, ours)):
            source, gain = (t.detach().to(dtype).clone().requires_grad_() for t in (wide, weight))
            out = function(source.view(tokens, -1, dim)[:, 1 : 1 + heads], gain)
            out.backward(upstream.to(dtype))
            found.append([out, source.grad] + ([gain.grad] if {normed} else []))
        for exact, result in zip(*found):
            assert (exact - result).norm() / exact.norm() < 1e-6
    """)


def test_gradients_of_prefix_copies_are_summed() -> None:
    """Tokens with none, one and many copies. Sums are in fp32, so a thousand ones are a thousand."""
    run_interpreted("""
        import numpy as np
        from shoal.models.attention import gather
        from shoal.models.kernels.logprobs import sum_copies
        keys = np.concatenate([[7] * 1000, np.random.default_rng(0).integers(0, 20, 60), [4, 4]])
        plan = {name: torch.from_numpy(array) for name, array in gather(keys, 23).items()}
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(len(keys), 3, 5).to(dtype)
            exact = torch.zeros(23, 3, 5, dtype=torch.float64).index_add_(0, plan["keys"].long(), values.double())
            ours = sum_copies(values, plan["copies"], plan["copy_starts"])
            assert ours.dtype == dtype and (ours - exact).abs().max() < (1e-4 if dtype == torch.float32 else 0.2)
            assert not ours[20:].any()
        ones = sum_copies(torch.ones(len(keys), 2).bfloat16(), plan["copies"], plan["copy_starts"])
        assert ones[7, 0] >= 1000
    """)


def test_swiglu_forward_and_backward() -> None:
    run_interpreted("""
        from shoal.models.kernels.elementwise import swiglu
        both = torch.randn(4, 2 * 1030)
        upstream = torch.randn(4, 1030)
        found = []
        for dtype, function in ((torch.float64, lambda g, u: torch.nn.functional.silu(g) * u), (torch.float32, swiglu)):
            source = both.detach().to(dtype).clone().requires_grad_()
            out = function(*source.chunk(2, -1))
            out.backward(upstream.to(dtype))
            found.append((out, source.grad))
        for exact, ours in zip(*found):
            assert (exact - ours).norm() / exact.norm() < 1e-6
    """)


@pytest.mark.parametrize("narrowed", (False, True), ids=("all ids", "some ids"))
@pytest.mark.parametrize("tile", (1 << 29, 3 * 5000))
def test_log_probs_and_entropy(tile: int, narrowed: bool) -> None:
    """In one tile and in several: values and gradients of the log-probs against float64."""
    run_interpreted(f"""
        from shoal.models import logprobs
        from shoal.models.logprobs import AllowedTokens
        from shoal.models.logprobs import Head, token_logprobs
        logprobs.KERNEL_TILE_NUMBERS = {tile}
        tokens, width, vocabulary = 8, 12, 5000
        made = torch.randn(tokens, width), torch.randn(vocabulary, width)
        targets = torch.randint(0, vocabulary, (tokens,))
        temperatures = torch.linspace(0.5, 2, tokens)
        kept = None
        if {narrowed}:
            some = [[int(target), 3, 4999] for target in targets]
            lists = [None, some[1], [~7, ~4998], some[3], some[4], None, [~0], some[7]]
            kept = AllowedTokens(lists, torch.device("cpu"))
        found = []
        for dtype in (torch.float64, torch.float32):
            hidden, weight = (t.detach().to(dtype).clone().requires_grad_() for t in made)
            head = Head(lambda h: h @ weight.T, weight)
            scored = token_logprobs(head, hidden, targets, temperatures, vocabulary, kept)
            (scored.logprobs * torch.arange(1, tokens + 1)).sum().backward()
            found.append((scored.logprobs, scored.entropy, hidden.grad, weight.grad))
        assert "_Tiles" in type(scored.logprobs.grad_fn).__name__
        for exact, ours in zip(*found):
            assert (exact - ours).norm() / exact.norm() < 1e-5
    """)


@pytest.mark.parametrize("architecture", ("llama", "qwen2", "qwen3", "mistral", "smollm3"))
def test_fused_body_trains_as_the_modules_do(architecture: str) -> None:
    """Log-probs and every gradient of a packed row, with and without activation checkpointing. A wrong layer is
    detected.
    """
    run_interpreted(f"""
        from shoal.models import fused
        from support.models import small_decoder
        from support.training import gradients, grpo, make_policy, pack, random_samples
        rows = pack(random_samples(2, (3, 9), (20, 6), (1, 5))).rows
        found = []
        for way in ("modules", "fused", "recompute"):
            decoder = small_decoder("{architecture}")
            layers = decoder.verify()
            if way != "modules":
                said = fused.attach(decoder, layers)
                assert decoder.fused is not None, said
            decoder.recompute(way == "recompute")
            policy = make_policy(decoder)
            policy.forward_backward(rows, grpo())
            found.append(gradients(policy))
        for other in found[1:]:
            for name, exact in found[0].items():
                assert (other[name] - exact).norm() <= 1e-4 * exact.norm() + 1e-7, name
        decoder = small_decoder("{architecture}")
        layers = decoder.verify()
        broken = decoder.body.layers[1].self_attn
        broken.v_proj.forward = lambda x, f=broken.v_proj.forward: f(x) * (1.01 if x.ndim == 2 else 1.0)
        assert "differs" in fused.attach(decoder, layers) and decoder.fused is None
    """)
