"""The same parity tests on a CUDA device: fp32 against the CPU, bf16 within its rounding, packed attention in both
directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.core.types import Rollout
from shoal.models import fused
from shoal.models.attention import Packed, Shape
from shoal.models.decoder import Decoder
from shoal.models.logprobs import AllowedTokens, Head, token_logprobs
from support.engines import ask, make_engine, run
from support.models import ARCHITECTURES, EOS, VOCABULARY, WINDOW, as_decoder, lora_decoder, random_prompts, small_model
from support.training import (
    as_rollout,
    by_rollout,
    gradients,
    grpo,
    make_policy,
    one_turn,
    pack,
    random_samples,
    rows_of,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("whole_fp32")]

CUDA = torch.device("cuda")
SHAPES = ((3, 40), (90, 20), (1, 70), (12, 1), (30, 64))
GRAPHS = pytest.mark.parametrize("graphs", (False, True), ids=("eager", "graphs"))


def on_gpu(name: str, dtype: torch.dtype = torch.float32, **how: Any) -> Decoder:
    """As in a run: with fused kernels if the family supports them."""
    decoder = as_decoder(small_model(name, dtype=dtype, **how).to(CUDA))
    fused.attach(decoder, decoder.verify())
    return decoder


def lora_on_gpu(dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = Decoder(lora_decoder(dtype=dtype).model.to(CUDA))
    fused.attach(decoder, decoder.verify())
    return decoder


def sample(decoder: Decoder, graphs: bool, **sampling: Any) -> list[Rollout]:
    """Four groups of four; two prompts are longer than every sliding window."""
    prompts = random_prompts(5, 6, 20, 50, 90)
    requests = [
        ask(f"{g}/{i}", prompt, seed=10 * g + i, max_tokens=40, **sampling)
        for g, prompt in enumerate(prompts)
        for i in range(4)
    ]
    answers = run(make_engine(decoder, slots=16, context_tokens=192, eos_token_ids=(EOS,), graphs=graphs), requests)
    temperature = sampling.get("temperature", 1.0)
    return [
        as_rollout(int(name[2:]), one_turn(prompts[int(name[0])], answer, temperature), 1.0, group=int(name[0]))
        for name, answer in sorted(answers.items())
    ]


def texts(decoder: Decoder, **settings: Any) -> list[list[int]]:
    prompts = random_prompts(1, 4, WINDOW, 19, 40, 70)
    requests = [ask(str(i), prompt, temperature=0.0, max_tokens=32) for i, prompt in enumerate(prompts)]
    answers = run(make_engine(decoder, **settings), requests)
    return [answers[str(i)].token_ids for i in range(len(prompts))]


@GRAPHS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_text_in_fp32_is_the_cpu_s(architecture: str, graphs: bool) -> None:
    """The text on the CPU equals `generate`: tests/parity/test_greedy.py, with the same models and prompts."""
    expected = texts(as_decoder(small_model(architecture, wild=True)))
    assert texts(on_gpu(architecture, wild=True), graphs=graphs) == expected


@GRAPHS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_fp32_logprobs_of_sampler_trainer_and_cpu(architecture: str, graphs: bool) -> None:
    decoder = on_gpu(architecture)
    rows = rows_of(sample(decoder, graphs, temperature=0.8), 300)
    ours = make_policy(decoder).logprobs(rows).read()[1]
    theirs = make_policy(as_decoder(small_model(architecture))).logprobs(rows).read()[1]
    for row, mine, other in zip(rows, ours, theirs, strict=True):
        assert np.abs(mine - row.sampler_logprobs)[row.loss_mask].max() < 1e-5
        assert np.abs(mine - other).max() < 2e-5


@GRAPHS
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bf16_mismatch(architecture: str, graphs: bool) -> None:
    """With equal weights, sampler and trainer differ by rounding only."""
    decoder = on_gpu(architecture, torch.bfloat16)
    rows = rows_of(sample(decoder, graphs))
    metrics, _ = make_policy(decoder).forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    assert count > 300 and 0 <= total / count < 1e-3


def test_bf16_mismatch_under_lora_and_truncation() -> None:
    decoder = lora_on_gpu(torch.bfloat16)
    rows = rows_of(sample(decoder, True, top_p=0.9, temperature=0.7))
    metrics, _ = make_policy(decoder).forward_backward(rows, grpo()).read()
    total, count = metrics["mismatch/k3"]
    assert count > 300 and 0 <= total / count < 1e-3


@pytest.mark.parametrize("window", (None, 3, WINDOW, 1000))
@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_packed_attention_in_bf16_forward_and_backward(kv_heads: int, window: int | None) -> None:
    """The variable-length kernel against padded rectangles in fp32 with the same numbers."""
    starts = np.array([0, 5, 6, 70, 200, 213])
    generator = torch.Generator().manual_seed(0)
    made = [
        torch.randn(1, heads, 213, 32, generator=generator).to(CUDA, torch.bfloat16)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, 213, 4, 32, generator=generator).to(CUDA)
    shape = Shape(32**-0.5, window, None)

    def both(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = (x.detach().to(dtype).requires_grad_() for x in made)
        out = Packed(starts, CUDA).attend(0, query, key, value, shape)
        out.backward(upstream.to(dtype))
        return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None)]

    for exact, fast in zip(both(torch.float32), both(torch.bfloat16), strict=True):
        assert exact.shape == fast.shape
        assert (exact - fast.float()).norm() / exact.norm() < 1e-2


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_gradients(architecture: str) -> None:
    """fp32 equals the CPU to rounding. bf16, with another attention kernel, has the same direction."""
    samples = random_samples(2, *SHAPES)
    rows = pack(samples, 130).rows
    found = []
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        decoder = as_decoder(small_model(architecture)) if device == "cpu" else on_gpu(architecture, dtype)
        policy = make_policy(decoder)
        for row in rows:
            policy.forward_backward([row], grpo())
        found.append(torch.cat([g.flatten().float().cpu() for g in gradients(policy).values()]))
    exact, same, rounded = found
    assert (same - exact).norm() / exact.norm() < 1e-4
    assert torch.nn.functional.cosine_similarity(rounded, exact, dim=0) > 0.99


def test_packing_in_bf16() -> None:
    policy = make_policy(on_gpu("mistral", torch.bfloat16))
    samples = random_samples(3, *SHAPES)
    together, alone = pack(samples).rows, pack(samples, 111).rows
    first, second = (
        by_rollout(together, policy.logprobs(together).read()[1]),
        by_rollout(alone, policy.logprobs(alone).read()[1]),
    )
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=0, atol=0.05)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_graphs_use_updated_weights(lora: bool) -> None:
    """A graph reads weights in place: after a step it samples with the new weights, like eager decoding."""
    decoder = lora_on_gpu() if lora else on_gpu("qwen3")
    engine = make_engine(decoder, slots=16, context_tokens=192, graphs=True)
    policy = make_policy(decoder)
    requests = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]
    before = run(engine, requests)
    for _ in range(2):
        policy.forward_backward(pack(random_samples(4, *SHAPES)).rows, grpo())
        policy.optim_step()
    after = run(engine, requests)
    fresh = run(make_engine(decoder, slots=16, context_tokens=192, graphs=False), requests)
    for name, answer in after.items():
        assert answer.token_ids == fresh[name].token_ids
        np.testing.assert_allclose(answer.logprobs, fresh[name].logprobs, rtol=0, atol=1e-4)
        assert answer.logprobs != before[name].logprobs


KNOWN = ("llama", "qwen2", "qwen3", "mistral", "smollm3")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize("architecture", KNOWN)
def test_fused_kernels_match_the_modules(architecture: str, dtype: torch.dtype) -> None:
    """Log-probs and gradients of Shoal's kernels are as close to fp32 as those of the Hugging Face modules."""
    rows = pack(random_samples(2, *SHAPES), 130).rows

    def measure(decoder: Decoder) -> tuple[np.ndarray, Tensor]:
        policy = make_policy(decoder)
        logprobs = np.concatenate(policy.logprobs(rows).read()[1])
        for row in rows:
            policy.forward_backward([row], grpo())
        return logprobs, torch.cat([g.flatten().double() for g in gradients(policy).values()])

    exact, exact_gradient = measure(as_decoder(small_model(architecture).to(CUDA)))
    theirs, their_gradient = measure(as_decoder(small_model(architecture, dtype=dtype).to(CUDA)))
    ours, our_gradient = measure(on_gpu(architecture, dtype))
    # Two roundings of the same numbers differ, and both are equally far from the exact value.
    assert np.abs(ours - exact).max() < 2 * np.abs(theirs - exact).max() + 2e-5
    ours_off, theirs_off = ((g - exact_gradient).norm() / exact_gradient.norm() for g in (our_gradient, their_gradient))
    assert ours_off < 3 * theirs_off + 1e-4


@pytest.mark.parametrize("count", (1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 160, 161, 192))
def test_every_edge_of_a_batch_bucket(count: int) -> None:
    decoder = on_gpu("qwen2")
    prompts = random_prompts(11, *(3 + i % 9 for i in range(count)))
    requests = [ask(str(i), prompt, seed=i, max_tokens=4 + i % 14) for i, prompt in enumerate(prompts)]
    settings = {"slots": 192, "context_tokens": 64, "eos_token_ids": (EOS,)}
    ours = run(make_engine(decoder, graphs=True, **settings), requests)
    eager = run(make_engine(decoder, graphs=False, **settings), requests)
    assert {name: a.token_ids for name, a in ours.items()} == {name: a.token_ids for name, a in eager.items()}
    for name, answer in ours.items():
        np.testing.assert_allclose(answer.logprobs, eager[name].logprobs, rtol=0, atol=1e-4)


def test_only_the_window_is_written() -> None:
    """Graphs of other batch sizes are captured between windows while rows end and contexts grow. Memory behind the
    numbers of a window belongs to other data.
    """
    engine = make_engine(on_gpu("qwen2", torch.bfloat16), slots=32, context_tokens=1024, graphs=True)
    rows = engine._graphs.rows  # type: ignore[union-attr]
    behind = {}
    for name in ("ids", "logprobs"):
        window = getattr(rows, name)
        wide = torch.full((2 * len(window), window.shape[1]), -7, dtype=window.dtype, device=CUDA)
        setattr(rows, name, wide[: len(window)])
        behind[name] = wide[len(window) :]
    prompts = random_prompts(21, *(480 + i % 9 for i in range(32)))
    run(engine, [ask(str(i), prompt, seed=i, max_tokens=9 + 3 * i) for i, prompt in enumerate(prompts)])
    assert len(engine._graphs._graphs) > 3  # type: ignore[union-attr]
    for name, tensor in behind.items():
        assert (tensor == -7).all(), name


def test_truncated_sampling_inside_the_graph() -> None:
    """top-p, top-k, min-p and min_tokens beside a plain row: the same tokens, log-probs and kept ids as eagerly."""
    decoder = on_gpu("llama")
    ways = ({}, {"top_p": 0.8}, {"top_k": 5, "min_tokens": 9}, {"min_p": 0.1, "temperature": 1.4}, {"min_tokens": 12})
    requests = [ask(str(i), [5, 6, 7 + i], seed=i, max_tokens=30, **way) for i, way in enumerate(ways)]
    ours = run(make_engine(decoder, eos_token_ids=(EOS,), graphs=True), requests)
    eager = run(make_engine(decoder, eos_token_ids=(EOS,), graphs=False), requests)
    for name, answer in ours.items():
        assert answer.token_ids == eager[name].token_ids
        assert [set(k) for k in answer.kept_ids or []] == [set(k) for k in eager[name].kept_ids or []]
        np.testing.assert_allclose(answer.logprobs, eager[name].logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_truncated_logprobs(dtype: torch.dtype) -> None:
    """Some ids kept, some banned, and all: log-probs and gradients equal float64, without a device sync."""
    tokens, width, vocabulary = 300, 64, 5000
    made = torch.randn(tokens, width, device=CUDA).to(dtype), torch.randn(vocabulary, width, device=CUDA).to(dtype)
    targets = torch.randint(0, vocabulary, (tokens,), device=CUDA)
    ids = [None if t % 3 == 0 else [i, 3, 4999] if t % 3 == 1 else [~((i + 1) % vocabulary)]
           for t, i in enumerate(targets.tolist())]  # fmt: skip
    temperatures = torch.linspace(0.5, 2, tokens, device=CUDA)
    kept = AllowedTokens(ids, CUDA)
    found = []
    for kind in (torch.float64, dtype):
        hidden, weight = (t.detach().to(kind).clone().requires_grad_() for t in made)
        torch.cuda.set_sync_debug_mode("error")
        try:
            head = Head(lambda h, w=weight: h @ w.T, weight)
            scored = token_logprobs(head, hidden, targets, temperatures, vocabulary, kept)
            scored.logprobs.sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found.append((scored.logprobs, scored.entropy, hidden.grad, weight.grad))
    assert "_Tiles" in type(scored.logprobs.grad_fn).__name__
    for exact, ours in zip(*found, strict=True):
        assert (exact - ours).norm() / exact.norm() < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_noise_inside_the_graph(lora: bool) -> None:
    """New noise with the same sigma, and no noise: the graph samples like eager decoding."""
    decoder = lora_on_gpu() if lora else on_gpu("qwen3")
    engine = make_engine(decoder, graphs=True)
    requests = [ask(str(i), prompt, seed=i, max_tokens=20) for i, prompt in enumerate(random_prompts(7, 5, 30))]
    seen = []
    for version, sigma in ((1, 0.2), (2, 0.2), (3, 0.0)):
        engine.view.refresh(version, sigma, seed=4)
        fresh = make_engine(decoder, graphs=False)
        fresh.view.refresh(version, sigma, seed=4)
        ours, eager = run(engine, requests), run(fresh, requests)
        for name, answer in ours.items():
            assert answer.token_ids == eager[name].token_ids
            np.testing.assert_allclose(answer.logprobs, eager[name].logprobs, rtol=0, atol=1e-4)
        seen.append(ours["0"].logprobs)
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_sixteen_thousand_tokens_of_context(dtype: torch.dtype) -> None:
    """Split contexts: tokens sampled at the end have the log-probs of the trainer."""
    decoder = on_gpu("llama", dtype)
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(5, VOCABULARY, (16_300,), generator=generator).tolist()
    requests = [ask(str(i), prompt if i else prompt[:9000], seed=i, max_tokens=48) for i in range(3)]
    answers = run(make_engine(decoder, slots=8, context_tokens=16_384, graphs=True), requests)
    rollouts = [
        as_rollout(i, one_turn(request.prompt_ids, answers[str(i)], 1.0), 1.0, group=i)
        for i, request in enumerate(requests)
    ]
    rows = rows_of(rollouts, 16_384)
    for row, mine in zip(rows, make_policy(decoder).logprobs(rows).read()[1], strict=True):
        gap = np.abs(mine - row.sampler_logprobs)[row.loss_mask]
        assert gap.mean() < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("lora", (False, True), ids=("full", "lora"))
def test_repeated_prefill_sizes_use_graphs(lora: bool) -> None:
    """Several rounds of other prompts of similar size, with an optimizer step between: from the second round a graph
    writes the cache, and log-probs equal the trainer's. Groups share their prompt.
    """
    decoder = lora_on_gpu(torch.bfloat16) if lora else on_gpu("qwen3", torch.bfloat16)
    engine = make_engine(decoder, slots=16, context_tokens=192, graphs=True)
    policy = make_policy(decoder)
    for number in range(4):
        prompts = random_prompts(50 + number, 60 + number, 40, 81 - number)
        requests = [ask(f"{g}/{i}", p, seed=g + i, max_tokens=9) for g, p in enumerate(prompts) for i in range(4)]
        answers = run(engine, requests)
        rollouts = [
            as_rollout(i, one_turn(request.prompt_ids, answers[request.request_id], 1.0), 1.0, group=i // 4)
            for i, request in enumerate(requests)
        ]
        metrics, _ = policy.forward_backward(rows_of(rollouts), grpo()).read()
        total, count = metrics["mismatch/k3"]
        assert count == 12 * 9 and 0 <= total / count < 1e-3
        policy.optim_step()
    assert len(engine._prompts._graphs) == 1


def test_long_rows_beside_short_ones() -> None:
    """Rows of one span, of several, and of more spans than splits: each equals the trainer."""
    decoder = on_gpu("qwen2", torch.bfloat16)
    lengths = (3, 250, 511, 513, 700, 1300, 2900, 5)
    requests = [ask(str(i), p, seed=i, max_tokens=40) for i, p in enumerate(random_prompts(9, *lengths))]
    answers = run(make_engine(decoder, slots=8, context_tokens=3072, graphs=True), requests)
    turns = [one_turn(request.prompt_ids, answers[request.request_id], 1.0) for request in requests]
    rows = rows_of([as_rollout(i, turn, 1.0, group=i) for i, turn in enumerate(turns)], 3072)
    for row, mine in zip(rows, make_policy(decoder).logprobs(rows).read()[1], strict=True):
        assert np.abs(mine - row.sampler_logprobs)[row.loss_mask].mean() < 0.02


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
def test_model_with_split_products(dtype: torch.dtype) -> None:
    """Wide enough to split both products at the end of a layer's halves: equal to eager decoding in fp32, to the
    trainer in bf16.
    """
    from shoal.engine.kernels.products import splits_of

    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}
    decoder = on_gpu("qwen3", dtype, num_key_value_heads=2, **wide)
    layer: Any = decoder.body.layers[0]  # type: ignore[union-attr]
    assert splits_of(8, layer.self_attn.o_proj.weight) == 2 and splits_of(8, layer.mlp.down_proj.weight) == 4
    engine, eager = (make_engine(decoder, slots=16, context_tokens=192, graphs=graphs) for graphs in (True, False))
    assert "fused kernels" in engine.path, engine.path
    requests = [ask(f"{i}", prompt, seed=i, max_tokens=24) for i, prompt in enumerate(random_prompts(7, 5, 60))]
    answers = run(engine, requests)
    if dtype == torch.float32:
        for name, other in run(eager, requests).items():
            assert answers[name].token_ids == other.token_ids
            np.testing.assert_allclose(answers[name].logprobs, other.logprobs, rtol=0, atol=1e-4)
    turns = [one_turn(request.prompt_ids, answers[request.request_id], 1.0) for request in requests]
    rows = rows_of([as_rollout(i, turn, 1.0, group=i) for i, turn in enumerate(turns)], 3072)
    for row, mine in zip(rows, make_policy(decoder).logprobs(rows).read()[1], strict=True):
        gap = np.abs(mine - row.sampler_logprobs)[row.loss_mask].mean()
        assert gap < (1e-4 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("rows", (1, 8, 16, 17, 33, 64, 65, 128, 256, 512))
def test_products_of_decode_steps(rows: int) -> None:
    """The shape of a 0.5B model in bf16: as close to float64 as torch's products."""
    from shoal.engine.kernels import products

    generator = torch.Generator(CUDA).manual_seed(0)

    def numbers(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=CUDA).bfloat16()

    x, weight, down, residual = (
        numbers(rows, 896),
        numbers(9728, 896) * 0.03,
        numbers(896, 4864) * 0.03,
        numbers(rows, 896),
    )
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    exact = torch.nn.functional.silu(gate) * up
    plain = torch.nn.functional.silu((x @ weight[:4864].T).float()).bfloat16() * (x @ weight[4864:].T)
    tile = products.gated_tile(rows, weight)
    assert (tile is None) == (rows > 64)
    if tile is not None:
        ours = products.gated(x, weight, tile)
        assert (ours - exact).norm() < 1.2 * (plain - exact).norm()
    hidden = numbers(rows, 4864)
    parts = products.split_product(hidden, down, products.splits_of(rows, down))
    assert parts.shape == (4 if rows <= 256 else 2, rows, 896)
    whole = hidden.double() @ down.double().T
    assert (parts.double().sum(0) - whole).norm() / whole.norm() < 1e-5
    before = residual.double()
    normed = products.sum_norm_(parts, residual, torch.ones(896, device=CUDA, dtype=torch.bfloat16), 1e-6)
    total = before + whole
    expected = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6)
    assert (residual - total).norm() / total.norm() < 5e-3 and (normed - expected).norm() / expected.norm() < 1e-2
