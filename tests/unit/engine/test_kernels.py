"""The Triton kernels against plain torch, under Triton's interpreter where there is no GPU.

The interpreter must be asked for before Triton is imported, so each check runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("triton", reason="Triton is installed on Linux only")


def run(code: str) -> None:
    prelude = """
        import copy, torch
        from shoal.engine.cache import SlotCache
        from shoal.models.attention import Shape, dense_attention
        torch.manual_seed(0)
    """
    script = textwrap.dedent(prelude) + textwrap.dedent(code)
    path = os.pathsep.join(["tests", os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(("window", "softcap", "splits"), [(None, None, 1), (40, None, 4), (None, 20.0, 2)])
def test_decode_attention(window: int | None, softcap: float | None, splits: int) -> None:
    """fp32 and fp16 against float64; keys and values of the new token land in the cache and nothing else moves."""
    run(f"""
        from shoal.engine.kernels.attention import decode_attention
        rows, heads, kv_heads, length, dim = 5, 6, 2, 256, 32
        positions = torch.tensor([0, 5, 64, 100, 200])
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
            qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
            query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            keys, values = (torch.randn(8, kv_heads, length, dim).to(dtype) for _ in range(2))
            ours_keys, ours_values = keys.clone(), values.clone()
            ours = decode_attention(
                query, key, value, ours_keys, ours_values, positions, 0.2, {window}, {softcap}, {splits}
            )
            keys[torch.arange(rows), :, positions] = key
            values[torch.arange(rows), :, positions] = value
            assert torch.equal(ours_keys, keys) and torch.equal(ours_values, values)
            at = torch.arange(length)[None]
            allowed = at <= positions[:, None]
            if {window} is not None:
                allowed &= at > positions[:, None] - {window}
            folded = query.reshape(rows, kv_heads, heads // kv_heads, dim).double()
            wide = keys[:rows].double(), values[:rows].double()
            exact = dense_attention(folded, *wide, allowed[:, None, None], Shape(0.2, None, {softcap}))
            exact = exact.reshape(rows, heads, dim)
            assert (ours.double() - exact).norm() / exact.norm() < tolerance, dtype
    """)


def test_sampling_draws_the_same_tokens() -> None:
    """Greedy and sampled rows, more ids than one block: the same token, the same log-prob but for rounding."""
    run("""
        from shoal.engine.kernels.sampling import draw_tokens
        from shoal.engine.sampler import SamplingState, draw, hash_keys
        rows, width = 24, 9000
        logits = torch.randn(rows, width) * 3
        state = SamplingState.allocate(rows, torch.device("cpu"))
        state.seeds.copy_(torch.arange(rows) * 7919)
        state.temperatures.copy_(torch.linspace(0, 2, rows))
        counts = torch.arange(rows)
        expected = draw(logits, state, counts, None, False)
        token_ids, logprobs = draw_tokens(logits, *hash_keys(state.seeds, counts), state.temperatures)
        assert torch.equal(token_ids, expected.token_ids)
        assert (logprobs - expected.logprobs).abs().max() < 1e-5
    """)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_fused_layers_agree_with_the_modules(architecture: str) -> None:
    """Hidden states and cache after one decode step; the parameters are views now, and still themselves."""
    run(f"""
        from support.models import small_decoder
        from shoal.engine.fused import FusedDecode, make_fused
        from shoal.engine.kernel_context import KernelDecode
        decoder = small_decoder("{architecture}")
        layers = decoder.verify()
        before = {{name: p.clone() for name, p in decoder.model.named_parameters()}}
        theirs = SlotCache(layers, 8, 64, torch.float32, torch.device("cpu"))
        fused, why = make_fused(decoder, layers, theirs)
        assert fused is not None, why
        assert all(torch.equal(before[name], p) for name, p in decoder.model.named_parameters())
        for tensor in (*theirs.keys.values(), *theirs.values.values()):
            tensor.normal_()
        ours = copy.deepcopy(theirs)
        tokens = torch.randint(0, decoder.vocab_size, (8,))
        positions = torch.tensor([0, 1, 5, 17, 30, 40, 50, 62])
        with torch.no_grad():
            decoder.model.get_input_embeddings().weight.mul_(1.5)  # written in place: both see it
            expected = decoder.hidden(tokens[:, None], positions[:, None], KernelDecode(theirs, positions))[:, 0]
            actual = fused.hidden(tokens, positions, ours, 2)
        assert (actual - expected).norm() / expected.norm() < 1e-5
        assert max((theirs.keys[i] - ours.keys[i]).abs().max() for i in layers) < 1e-4
        layer = decoder.body.layers[0].self_attn
        assert layer.q_proj.weight.untyped_storage().data_ptr() == layer.k_proj.weight.untyped_storage().data_ptr()
        FusedDecode(decoder, layers)  # again: nothing moves
        assert torch.equal(layer.q_proj.weight, before["model.layers.0.self_attn.q_proj.weight"])
    """)


def test_a_window_of_steps_equals_single_steps() -> None:
    """The engine with kernels, several steps between two looks, against the eager one: tokens, reasons, log-probs."""
    run("""
        from support.engines import ask, make_engine, run
        from support.models import EOS, small_decoder
        decoder = small_decoder("qwen3")
        prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
        requests = [ask(f"{i}", prompts[i % 3], max_tokens=5 + 3 * i, seed=i) for i in range(6)]
        ours = make_engine(decoder, eos_token_ids=(EOS,))
        assert "fused" in ours.path
        kernels = run(ours, requests)
        eager = run(make_engine(decoder, eos_token_ids=(EOS,), graphs=False), requests)
        for name, completion in eager.items():
            assert kernels[name].token_ids == completion.token_ids
            assert kernels[name].finish_reason == completion.finish_reason
            assert [(s.start, s.end) for s in kernels[name].spans] == [(s.start, s.end) for s in completion.spans]
            gap = max(abs(a - b) for a, b in zip(kernels[name].logprobs, completion.logprobs, strict=True))
            assert gap < 1e-4
    """)
