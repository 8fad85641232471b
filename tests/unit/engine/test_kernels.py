"""The Triton kernels against plain torch, under Triton's interpreter if there is no GPU.

The interpreter must be enabled before Triton is imported, so each check runs in a separate process.
"""

from __future__ import annotations

import pytest

from support.interpreter import run_interpreted as run

pytest.importorskip("triton", reason="Triton is installed on Linux only")


@pytest.mark.parametrize(
    ("window", "softcap", "cut", "dim"),
    [
        (None, None, "1", 32),
        (40, None, "4, 32", 32),
        (None, 20.0, "2, 64", 32),
        (None, None, "16, 64", 32),
        (150, None, "8, 64", 32),
        (None, None, "1, 512, 16, 1, 3", 32),
        (40, 20.0, "4, 64, 16, 1, 3", 32),
        (None, None, "1", 24),
        (40, 20.0, "4, 64", 80),
        (None, None, "2, 64", 12),
    ],
)
def test_decode_attention(window: int | None, softcap: float | None, cut: str, dim: int) -> None:
    """fp32 and fp16 against float64. Keys and values of the new token are written to the cache, and nothing else
    changes.

    Rows of one span, rows of several spans, and rows whose splits have more than one span each.
    """
    run(f"""
        from shoal.engine.kernels.attention import Launch, decode_attention
        rows, heads, kv_heads, length, dim = 5, 6, 2, 256, {dim}
        positions = torch.tensor([0, 5, 64, 100, 200])
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.float16, 1e-3)):
            qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
            query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
            keys, values = (torch.randn(8, kv_heads, length, dim).to(dtype) for _ in range(2))
            ours_keys, ours_values = keys.clone(), values.clone()
            shape = Shape(0.2, {window}, {softcap})
            cache = ours_keys, ours_values
            ours = decode_attention((query, key, value), cache, positions, shape, Launch({cut}))
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


@pytest.mark.parametrize("cut", ["1, 512, 16, 1, 3", "4, 32", "3, 64, 16"])
def test_qk_norm_and_rope_hold_in_every_split(cut: str) -> None:
    """For every split of a row, its heads are computed in the same way, and its key is written to the cache once."""
    run(f"""
        from shoal.engine.kernels.attention import HeadForm, Launch, decode_attention
        rows, heads, kv_heads, length, dim = 4, 6, 2, 256, 32
        positions = torch.tensor([0, 31, 100, 200])
        cos, sin = torch.randn(2, length, dim)
        form = HeadForm(cos, sin, torch.rand(dim) + 0.5, torch.rand(dim) + 0.5, 1e-6)
        qkv = torch.randn(rows, heads + 2 * kv_heads, dim)
        parts = qkv.split([heads, kv_heads, kv_heads], 1)
        keys, values = torch.randn(2, 8, kv_heads, length, dim)
        results = []
        for launch in (Launch(), Launch({cut})):
            cache = keys.clone(), values.clone()
            results.append((decode_attention(parts, cache, positions, Shape(0.2, None, None), launch, form), *cache))
        assert (results[0][0] - results[1][0]).abs().max() < 1e-5
        assert torch.equal(results[0][1], results[1][1]) and torch.equal(results[0][2], results[1][2])
        assert not torch.equal(results[0][1], keys)
    """)


def test_unsupported_head_sizes_use_the_modules() -> None:
    """In training, prefill and decoding, with the reason. Unsupported heads are not captured."""
    run("""
        from support.engines import greedy, make_engine
        from support.models import as_decoder, small_model
        from shoal.engine.decode import make_fused
        from shoal.engine.decode import why_no_graphs
        from shoal.models.decoder import LayerShape
        from shoal.models.fused import TURNS_BY_LENGTH, attach
        decoder = as_decoder(small_model("mistral", head_dim=24))
        layers = decoder.verify()
        cache = SlotCache(layers, 8, 64, torch.float32, torch.device("cpu"))
        path = attach(decoder, layers)
        assert path.startswith("model modules: head_dim 24") and decoder.fused is None
        fused, reason = make_fused(decoder, layers, cache)
        assert fused is None and "head_dim 24" in reason
        assert why_no_graphs(decoder, cache) is None, "decode steps of the modules can be captured"
        uneven = SlotCache({0: LayerShape(2, 24, 16)}, 8, 64, torch.float32, torch.device("cpu"))
        assert "head_dim" in why_no_graphs(decoder, uneven)
        assert len(greedy(decoder, [[1, 2, 3]], 4)[0]) == 4
        turning = as_decoder(small_model("llama"))
        assert why_no_graphs(turning, SlotCache(turning.verify(), 8, 64, torch.float32, torch.device("cpu"))) is None
        turning.config.rope_parameters = {**turning.config.rope_parameters, "rope_type": "dynamic"}
        assert why_no_graphs(turning, cache) == TURNS_BY_LENGTH
    """)


def test_prompts_are_copied_into_their_slots() -> None:
    """Keys and values of other widths, strided and contiguous; one prompt in two slots, one longer than the share of a
    program.
    """
    run("""
        from shoal.engine.kv_cache import PrefillWriter
        from shoal.models import kernels
        from shoal.models.decoder import LayerShape
        layers = {0: LayerShape(3, 24, 16)}
        key, value = torch.randn(50, 3, 24).transpose(0, 1), torch.randn(3, 50, 16)
        where = [torch.tensor(x) for x in ([0, 0, 40, 9], [40, 40, 10, 0], [1, 3, 0, 2])]
        caches = [SlotCache(layers, 4, 64, torch.float32, torch.device("cpu")) for _ in range(2)]
        writers = [PrefillWriter(cache, *where, longest) for cache, longest in zip(caches, (40, 64))]
        writers[1].write(0, key, value)
        kernels.available = lambda cuda: False
        writers[0].write(0, key, value)
        assert torch.equal(caches[0].keys[0], caches[1].keys[0]) and caches[0].keys[0].any()
        assert torch.equal(caches[0].values[0], caches[1].values[0]) and caches[0].values[0].any()
    """)


def test_ids_that_are_never_sampled() -> None:
    """A head padded with ids that are never sampled, more of them than a block contains."""
    run("""
        from shoal.engine.kernels.sampling import draw_tokens
        from shoal.engine.sampler import SamplingState, draw
        logits = torch.randn(6, 13000)
        logits[:, 3000:9000] = float("-inf")
        state = SamplingState.allocate(6, torch.device("cpu"))
        state.temperatures.copy_(torch.tensor([0, 0.3, 0.7, 1, 1, 2]))
        counts = torch.arange(6)
        expected = draw(logits, state, counts, None, False)
        token_ids, logprobs = draw_tokens(logits, state.seeds, counts, state.temperatures)
        assert torch.equal(token_ids, expected.token_ids)
        assert (logprobs - expected.logprobs).abs().max() < 1e-5
    """)


def test_uncapturable_step_runs_eagerly() -> None:
    """In the middle of an answer: no sampled token is lost, and later tokens are unchanged."""
    run("""
        from support.engines import ask, make_engine, run
        from support.models import LEAST, random_prompts, small_decoder
        import shoal.engine.engine
        from shoal.engine.decode_graphs import CaptureError
        shoal.engine.engine.WINDOW = 4
        decoder = small_decoder(**LEAST)
        requests = [ask(str(i), p, seed=i, max_tokens=10) for i, p in enumerate(random_prompts(0, 5, 9, 7))]
        expected = run(make_engine(decoder), requests)
        engine = make_engine(decoder)
        launch, calls = engine._graphs.launch, []
        def fail(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise CaptureError("no shared memory")
            launch(*arguments)
        engine._graphs.launch = fail
        found = run(engine, requests)
        assert engine.path == "eager: no shared memory" and len(calls) == 2
        for name, answer in found.items():
            assert answer.token_ids == expected[name].token_ids
            gaps = [abs(a - b) for a, b in zip(answer.logprobs, expected[name].logprobs)]
            assert max(gaps) < 1e-4
    """)


def test_sampling_is_reproducible() -> None:
    """Greedy and sampled rows, more ids than one block: the same token, and the same log-prob to rounding."""
    run("""
        from shoal.engine.kernels.sampling import draw_tokens
        from shoal.engine.sampler import SamplingState, draw
        rows, width = 24, 9000
        logits = torch.randn(rows, width) * 3
        state = SamplingState.allocate(rows, torch.device("cpu"))
        state.seeds.copy_(torch.arange(rows) * 7919)
        state.temperatures.copy_(torch.linspace(0, 2, rows))
        counts = torch.arange(rows)
        expected = draw(logits, state, counts, None, False)
        token_ids, logprobs = draw_tokens(logits, state.seeds, counts, state.temperatures)
        assert torch.equal(token_ids, expected.token_ids)
        assert (logprobs - expected.logprobs).abs().max() < 1e-5
    """)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "smollm3"])
def test_fused_layers_agree_with_the_modules(architecture: str) -> None:
    """Hidden states and cache after one decode step. The parameters are views now, with unchanged values."""
    run(f"""
        from support.models import small_decoder
        from shoal.engine.decode import FusedDecode, make_fused
        from shoal.engine.decode import KernelDecode
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
            expected = decoder.hidden(tokens[:, None], positions[:, None], KernelDecode(theirs, positions, 512))[:, 0]
            actual = FusedDecode(decoder, layers, ours).hidden(tokens, positions, 1024)
        assert (actual - expected).norm() / expected.norm() < 1e-5
        assert max((theirs.keys[i] - ours.keys[i]).abs().max() for i in layers) < 1e-4
        layer = decoder.body.layers[0].self_attn
        assert layer.q_proj.weight.untyped_storage().data_ptr() == layer.k_proj.weight.untyped_storage().data_ptr()
        FusedDecode(decoder, layers, ours)  # again: nothing moves
        assert torch.equal(layer.q_proj.weight, before["model.layers.0.self_attn.q_proj.weight"])
    """)


def test_window_of_steps_equals_single_steps() -> None:
    """The engine with kernels and several steps per window, against the eager engine: tokens, reasons, log-probs."""
    run("""
        from support.engines import ask, make_engine, run
        from support.models import EOS, LEAST, small_decoder
        import shoal.engine.engine
        shoal.engine.engine.WINDOW = 4
        decoder = small_decoder("qwen3", **LEAST)
        prompts = [[5, 6, 7], [8, 9, 10, 11], [12]]
        requests = [ask(f"{i}", prompts[i % 3], max_tokens=3 + 2 * i, seed=i) for i in range(6)]
        ours = make_engine(decoder, eos_token_ids=(EOS,))
        assert "fused kernels" in ours.path
        kernels = run(ours, requests)
        eager = run(make_engine(decoder, eos_token_ids=(EOS,), graphs=False), requests)
        for name, completion in eager.items():
            assert kernels[name].token_ids == completion.token_ids
            assert kernels[name].finish_reason == completion.finish_reason
            assert [(s.start, s.end) for s in kernels[name].spans] == [(s.start, s.end) for s in completion.spans]
            gap = max(abs(a - b) for a, b in zip(kernels[name].logprobs, completion.logprobs, strict=True))
            assert gap < 1e-4
    """)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_truncated_sampling_and_adapters_in_windows(lora: bool) -> None:
    """top-p, min_tokens and stops beside plain requests, before and after a weight update under the graphs."""
    run(f"""
        from support.engines import ask, make_engine, run
        from support.models import EOS, LEAST, lora_decoder, small_decoder
        import shoal.engine.engine
        shoal.engine.engine.WINDOW = 4
        decoder = lora_decoder("qwen3", overrides=LEAST) if {lora} else small_decoder("qwen3", **LEAST)
        engine = make_engine(decoder, eos_token_ids=(EOS,))
        assert "fused kernels" in engine.path, engine.path
        requests = [
            ask("plain", [5, 6, 7], max_tokens=7, seed=1),
            ask("top-p", [5, 6, 7], max_tokens=9, seed=2, top_p=0.7, min_tokens=4),
            ask("late", [9, 9], max_tokens=10, seed=3, min_tokens=6, stop_token_ids=tuple(range(20, 60))),
            ask("greedy", [8], max_tokens=6, temperature=0.0),
        ]
        for _ in range(2):
            kernels = run(engine, requests)
            eager = run(make_engine(decoder, eos_token_ids=(EOS,), graphs=False, fused=False), requests)
            for name, other in eager.items():
                assert kernels[name].token_ids == other.token_ids, name
                assert kernels[name].finish_reason == other.finish_reason
                kept = [None if c.kept_ids is None else [set(k) for k in c.kept_ids] for c in (kernels[name], other)]
                assert kept[0] == kept[1]
                gap = max(abs(a - b) for a, b in zip(kernels[name].logprobs, other.logprobs, strict=True))
                assert gap < 1e-4
            with torch.no_grad():
                for parameter in decoder.model.parameters():
                    if parameter.requires_grad:
                        parameter.add_(torch.randn_like(parameter) * 0.05)
    """)


def test_products_are_split_as_measured() -> None:
    """Rows from 8 to 1,024, with the fastest splits on an H200. Where the difference is small, the rule decides."""
    run("""
        from shoal.engine.kernels.products import splits_of
        def cuts(depth, width):
            weight = torch.empty(width, depth, device="meta")
            return [splits_of(rows, weight) for rows in (8, 128, 256, 512, 1024)]
        assert cuts(4864, 896) == [4, 4, 4, 2, 1] and cuts(896, 896) == [2, 2, 2, 1, 1]  # down and out, 0.5B
        assert cuts(3072, 1024) == cuts(2048, 1024) == [4, 4, 2, 1, 1]  # 0.6B
        assert cuts(1536, 576) == [4, 4, 4, 2, 1] and cuts(576, 576) == [2, 2, 2, 2, 1]  # SmolLM2-135M
        assert cuts(8960, 1536) == [4, 4, 4, 2, 1] and cuts(18944, 3584) == [2, 2, 1, 1, 1]  # 1.5B and 7B
        assert cuts(64, 64) == cuts(1001, 512) == [1] * 5
    """)


def test_fused_products_with_neighbouring_operations() -> None:
    """SwiGLU after gate and up, a split sum before a norm: rounded like separate operations, also for rows that fill
    no tile.
    """
    run("""
        from shoal.engine.kernels.products import Tile, gated, split_product, sum_norm_
        for rows in (5, 70):
            x, weight = torch.randn(rows, 128).half(), torch.randn(192, 128).half() * 0.1
            gate, up = (x.float() @ weight.float().T).half().chunk(2, -1)
            expected = torch.nn.functional.silu(gate.float()).half() * up
            assert (gated(x, weight, Tile(32, 32, 64)) - expected).abs().max() < 2e-3
            hidden, down = torch.randn(rows, 384).half(), torch.randn(128, 384).half() * 0.1
            parts = split_product(hidden, down, 3)
            assert parts.shape == (3, rows, 128)
            assert (parts.sum(0) - hidden.float() @ down.float().T).abs().max() < 1e-4
            residual, gain = torch.randn(rows, 128).half(), torch.rand(128).half()
            total = parts.sum(0).half() + residual
            wide = total.float()
            normed = gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).half()
            assert (sum_norm_(parts, residual, gain, 1e-6) - normed).abs().max() < 2e-3
            assert torch.equal(residual, total)
    """)
