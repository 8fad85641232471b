"""The memory plan: requested sizes, available memory, the order of reductions, and refusals that suggest settings."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from shoal.build import memory_probe as measuring
from shoal.build.memory_plan import (
    CPU_SHARE,
    GOOD_MICRO_BATCH,
    POOL,
    RESERVE,
    UNAFFORDABLE,
    Cost,
    MemoryMeasurement,
    MemoryRequest,
    Sampling,
    cache_only,
    decide,
    gathered_bytes,
)
from shoal.core.errors import HardwareError
from shoal.trainer.pass_graphs import GRAPH_TOKENS
from support.models import as_decoder, layer_shapes, small_decoder
from support.training import make_policy

DECODER = small_decoder()
LAYERS = layer_shapes(DECODER)
# Two layers of two heads, keys and values of 32 fp32 numbers; contexts are padded to 64.
BYTES_PER_SLOT = 2 * 2 * (32 + 32) * 4 * 128
ASKED = MemoryRequest(
    row_tokens=2048, step_tokens=1 << 20, rows_per_micro_batch=None, recompute=None, slots=64, context_tokens=128,
    utilization=None,
)  # fmt: skip
# A device with 1,000 bytes per thousandth, so that the memory for cache and training is easy to compute.
TOTAL = 1_000_000
ROOM = int(TOTAL * (1 - RESERVE)) - 300_000
MEASURED = MemoryMeasurement(
    TOTAL, held=200_000, optimizer=100_000, slot=1000, costs={False: Cost(0, 30), True: Cost(0, 10)}
)


def limit_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    sizes = {"SC_AVPHYS_PAGES": free_bytes // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)


@pytest.mark.parametrize(("wanted", "slots"), ((1, 8), (8, 8), (9, 16), (64, 64)))
def test_slots_are_rounded_up(wanted: int, slots: int) -> None:
    assert cache_only(DECODER, LAYERS, replace(ASKED, slots=wanted)).slots == slots


def test_copy_of_a_checkpoint_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, int(30 * BYTES_PER_SLOT / CPU_SHARE))
    copied = int(14 * BYTES_PER_SLOT / CPU_SHARE)
    assert cache_only(DECODER, LAYERS, replace(ASKED, host_copy=copied)).slots == 16


def test_slots_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, int(30 * BYTES_PER_SLOT / CPU_SHARE))
    assert cache_only(DECODER, LAYERS, ASKED).slots == 24
    assert cache_only(DECODER, LAYERS, replace(ASKED, context_tokens=120)).slots == 24, "contexts are whole blocks"
    assert cache_only(DECODER, LAYERS, replace(ASKED, utilization=0.5)).slots == 56


def test_too_little_memory_names_a_setting_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_memory(monkeypatch, int(7 * BYTES_PER_SLOT / CPU_SHARE))
    with pytest.raises(HardwareError, match=r"8 sequences of 128 tokens .* lower orch.seq_len"):
        cache_only(DECODER, LAYERS, ASKED)


def test_plan_fits_the_cache_then_the_largest_micro_batch() -> None:
    plan = decide(MEASURED, ASKED)
    assert (plan.slots, plan.recompute) == (64, False)
    assert plan.micro_batch_tokens == (ROOM - 64_000) // 30
    roomy = replace(MEASURED, costs={False: Cost(0, 1), True: Cost(0, 1)})
    assert decide(roomy, ASKED).micro_batch_tokens == GOOD_MICRO_BATCH
    assert decide(roomy, replace(ASKED, step_tokens=5000)).micro_batch_tokens == 5000


def test_activation_checkpointing_only_for_rows_that_do_not_fit() -> None:
    dear = replace(MEASURED, costs={False: Cost(0, 400), True: Cost(0, 40)})
    plan = decide(dear, ASKED)
    assert plan.recompute and plan.slots == 64 and plan.micro_batch_tokens == (ROOM - 64_000) // 40
    with pytest.raises(HardwareError, match=r"try train.recompute=true"):
        decide(dear, replace(ASKED, recompute=False))


def test_cache_shrinks_so_that_one_row_fits() -> None:
    plan = decide(MEASURED, replace(ASKED, slots=600, recompute=False))
    assert plan.slots == 296  # half of 600 in full blocks, so that 2,048 tokens at 30 bytes fit
    assert plan.micro_batch_tokens >= 2048


def test_extra_slots_require_a_full_micro_batch() -> None:
    """The default follows the rollouts of a step, but never shrinks the micro-batch or enables activation
    checkpointing.
    """
    roomy = replace(MEASURED, slot=100, costs={False: Cost(0, 6), True: Cost(0, 6)})
    asked = replace(ASKED, slots=1024, sure_slots=256)
    assert decide(roomy, asked).slots == 1024
    full = min(GOOD_MICRO_BATCH, ASKED.step_tokens)
    tight = replace(roomy, slot=(ROOM - 6 * full) // 600)
    plan = decide(tight, asked)
    assert 256 < plan.slots <= 600 and (plan.micro_batch_tokens, plan.recompute) == (full, False)
    assert decide(tight, replace(asked, slots=600)).slots == 600
    assert decide(tight, replace(asked, slots=720)).slots == 360
    tighter = replace(roomy, slot=(ROOM - 6 * full) // 200)
    plan = decide(tighter, asked)
    assert plan.slots == 256 and plan.micro_batch_tokens < full, "sure slots come before the micro-batch, as before"
    assert decide(tighter, replace(asked, slots=300)).slots == 256
    assert decide(tight, replace(asked, slots=720, sure_slots=None)).slots == 720, "user settings are respected"


def test_user_settings_are_respected() -> None:
    assert decide(MEASURED, replace(ASKED, utilization=0.02)).slots == 16
    sampling = replace(MEASURED, sampling=Sampling(prefill=20_000, decode=Cost(0, 600)))
    assert decide(sampling, replace(ASKED, utilization=0.046)).slots == 16, "prefills and decode steps are in the share"
    assert decide(sampling, replace(ASKED, utilization=0.097)).slots == 48
    assert decide(MEASURED, replace(ASKED, rows_per_micro_batch=3)).micro_batch_tokens == 3 * 2048
    assert decide(MEASURED, replace(ASKED, recompute=True)).recompute


def test_memory_table_sums_to_the_device() -> None:
    plan = decide(MEASURED, ASKED)
    assert sum(size for _, size in plan.lines) == pytest.approx(300_000 + 64_000 + 30 * plan.micro_batch_tokens)
    assert sum(size for _, size in plan.lines) <= TOTAL * (1 - RESERVE)
    assert [name for name, _ in plan.table()][-1] == "free"


def test_captured_passes_have_a_separate_memory_share() -> None:
    """As large as the largest pass if a micro-batch keeps three quarters; then smaller ones; then none."""
    roomy = replace(MEASURED, costs={False: Cost(0, 6), True: Cost(0, 6)})
    asked = replace(ASKED, captures=True)
    plan = decide(roomy, asked)
    assert (plan.micro_batch_tokens, plan.graphs.limit_bytes) == (GOOD_MICRO_BATCH, POOL * 6 * GRAPH_TOKENS)
    assert plan.lines[-1] == ("CUDA graphs of training passes", POOL * 6 * GRAPH_TOKENS)
    assert sum(size for _, size in plan.lines) <= TOTAL * (1 - RESERVE)
    plan = decide(MEASURED, asked)
    most = (ROOM - 64_000) // 30  # 19,200 tokens: 3,072 and a quarter is less than a quarter of them, 4,096 is more
    assert (plan.micro_batch_tokens, plan.graphs.limit_bytes) == (most - 3840, 30 * 3840)
    plan = decide(MEASURED, replace(asked, row_tokens=most))
    assert (plan.micro_batch_tokens, plan.graphs.limit_bytes) == (most, 0) and len(plan.lines) == 4
    assert not plan.graphs.fits(1, 0)
    assert decide(MEASURED, replace(asked, recompute=True)).graphs.limit_bytes == 0
    small = decide(roomy, replace(asked, step_tokens=3000)).graphs
    assert small.limit_bytes == 23_040, "no pass is larger than a micro-batch"
    assert small.fits(3072, 0) and not small.fits(3073, 0)
    assert small.fits(256, 0, pool_bytes=23_039) and not small.fits(256, 0, pool_bytes=23_040), (
        "the pool is as large as planned"
    )


def test_captured_passes_count_gathered_keys() -> None:
    """The plan reserves four per token. A pass of fewer tokens may gather more."""
    roomy = replace(MEASURED, costs={False: Cost(0, 10), True: Cost(0, 10)}, key_bytes=2)
    room = decide(roomy, replace(ASKED, captures=True, step_tokens=2048)).graphs
    assert room.limit_bytes == POOL * (10 + 4 * 2) * 3072  # one token above 2,048 is padded to 3,072
    assert room.fits(3072, 4 * 3072) and not room.fits(3072, 4 * 3072 + 1)
    assert room.fits(1024, 22_528) and not room.fits(1024, 22_529)
    assert decide(roomy, ASKED).keys_for_token == 5 and decide(MEASURED, ASKED).keys_for_token == 1


def test_gathered_keys_count_their_gradients() -> None:
    """Two layers of two key heads, 32 fp32 numbers per key and value. The backward of one layer has those of four
    heads.
    """
    assert DECODER.config.num_attention_heads == 4
    assert gathered_bytes(LAYERS, DECODER) == 4 * (2 * 2 * (32 + 32) + 4 * (32 + 32))


def test_refusal_names_settings_that_fit() -> None:
    tight = replace(MEASURED, costs={False: Cost(0, 900), True: Cost(0, 800)})
    with pytest.raises(HardwareError, match=r"does not fit.*train.sequence_len=768"):
        decide(tight, replace(ASKED, slots=8))
    heavy = replace(MEASURED, held=600_000, optimizer=500_000)
    with pytest.raises(HardwareError, match=r"train.lora=true.*a smaller model"):
        decide(heavy, ASKED)
    adapters = replace(MEASURED, held=930_000, optimizer=1000)
    ways = {
        "trained": "a lower train.sequence_len with an equal orch.seq_len, train.lora=true (or a quantised base)",
        "frozen": "a lower train.sequence_len with an equal orch.seq_len, a quantised base (train.qlora_bnb=true needs",
        "stored": "a lower train.sequence_len with an equal orch.seq_len, a smaller model",
    }
    for base, way in ways.items():
        with pytest.raises(HardwareError, match=re.escape(f"try {way}")):
            decide(adapters, replace(ASKED, base=base))  # type: ignore[arg-type]
    with pytest.raises(HardwareError, match=r"more than available for one row, .* for a KV cache of 8 sequences"):
        decide(replace(MEASURED, costs={False: UNAFFORDABLE, True: UNAFFORDABLE}), ASKED)


def test_share_too_small_for_a_block_of_sequences_is_refused() -> None:
    with pytest.raises(HardwareError, match=r"more than infer.gpu_memory_utilization=0.001 allows; lower orch.seq_len"):
        decide(MEASURED, replace(ASKED, utilization=0.001))
    wanted = r"GiB, prefills and decode steps .* GiB, more than infer.gpu_memory_utilization=0.05 allows; raise infer"
    with pytest.raises(HardwareError, match=wanted):  # a shorter sequence would not help: prefills alone need more
        decide(replace(MEASURED, sampling=Sampling(50_000)), replace(ASKED, utilization=0.05))


def test_training_starts_with_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are measured if they fit, which gives a better estimate per token."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (TOTAL - 70_000, TOTAL))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 20_000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    affordable = [0]  # rows

    taken: list[int] = []

    def dry_run(rows: int) -> None:
        if rows > affordable[0]:
            raise torch.OutOfMemoryError("no memory")
        taken.append(rows)

    def peak(_: object, work: Callable[[], None]) -> int:
        taken.clear()
        work()
        return 100_000 + 200_000 * taken[0] if taken else 5000

    monkeypatch.setattr(measuring, "_peak", peak)
    costs = []
    for affordable[0] in (2, 1, 0):
        measured = measuring.measure(DECODER, LAYERS, ASKED, 0, dry_run)
        assert not measured.costs, "nothing is measured before it is needed"
        costs.append(measured.costs[False])
        assert list(measured.costs) == [False]
        assert (measured.total, measured.held, measured.elsewhere) == (TOTAL, 1000, 50_000)
        assert measured.sampling == Sampling(5000, Cost(5000.0, 0.0)), (
            "memory shared by all rows is not counted for each row"
        )
    whole, one, none = costs
    assert whole.fixed == pytest.approx(100_000) and whole.at(2048) == pytest.approx(300_000)
    assert one.at(2048) == pytest.approx(300_000) and one.tokens_in(300_001) == 2048
    assert none == UNAFFORDABLE and none.tokens_in(1e12) == 0


def test_dry_passes_match_the_engine() -> None:
    """The passes only have to run, with and without truncated sampling. Their memory is measured on the device."""
    measuring.dry_prefill(DECODER, 40, 16)
    for narrowed in (False, True):
        measuring.dry_decode(DECODER, 8, narrowed)


def test_dry_passes_respect_the_position_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 16 positions, and a head that reads fewer numbers than a layer returns."""
    config = OPTConfig(
        vocab_size=64, hidden_size=32, word_embed_proj_dim=16, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=16,
    )  # fmt: skip
    decoder = as_decoder(OPTForCausalLM(config).eval())
    monkeypatch.setattr(measuring, "_peak", lambda _, work: work() or 0)
    asked = replace(ASKED, context_tokens=100, prefill_tokens=50)
    assert measuring._sampling(decoder, asked) == Sampling(0, Cost(0, 0))
    make_policy(decoder).dry_run(40, 2)


def test_memory_per_row_of_a_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes separate the memory per row from the memory that all rows share."""
    rows: list[int] = []
    monkeypatch.setattr(measuring, "dry_prefill", lambda *_: rows.append(0))
    monkeypatch.setattr(measuring, "dry_decode", lambda _, count, narrowed: rows.append(count))
    monkeypatch.setattr(measuring, "_peak", lambda _, work: work() or 1000 + 10 * rows[-1])
    for slots in (8, 64, 5000):
        assert measuring._sampling(DECODER, replace(ASKED, slots=slots)) == Sampling(1000, Cost(1000.0, 10.0))
        assert rows[-1] == min(slots, measuring.DECODED_ROWS)


def test_sampling_counts_beside_training() -> None:
    """Its graphs stay allocated. The cache shrinks by the memory that sampling of so many rows needs."""
    small = replace(ASKED, step_tokens=2048)
    plan = decide(replace(MEASURED, sampling=Sampling(decode=Cost(0, 2000))), small)
    assert plan.slots == 64 and dict(plan.lines)["prefills and decode steps"] == 64 * 2000
    plan = decide(replace(MEASURED, sampling=Sampling(decode=Cost(0, 20_000))), small)
    assert plan.slots == 24
    assert sum(size for _, size in plan.lines) <= TOTAL * (1 - RESERVE)
    with pytest.raises(
        HardwareError, match=r"more than available for prefills and decode steps.* a lower train.sequence_len"
    ):
        decide(replace(MEASURED, sampling=Sampling(prefill=float("inf"))), small)


@pytest.mark.parametrize("prefill", (0, 100_000, 400_000))
@pytest.mark.parametrize("captures", (False, True))
def test_plans_fit_the_device(prefill: int, captures: bool) -> None:
    plan = decide(replace(MEASURED, sampling=Sampling(prefill)), replace(ASKED, captures=captures))
    assert sum(size for _, size in plan.lines) <= TOTAL * (1 - RESERVE)


def test_memory_of_other_programs_is_reserved() -> None:
    plan = decide(replace(MEASURED, elsewhere=500_000), replace(ASKED, slots=8))
    assert plan.lines[0] == ("other programs and libraries", 500_000)
    assert sum(size for _, size in plan.lines) <= TOTAL * (1 - RESERVE)


def test_without_sampling_there_is_no_cache() -> None:
    plan = decide(MEASURED, replace(ASKED, slots=0))
    assert plan.slots == 0 and not [name for name, _ in plan.lines if "cache" in name]
    assert plan.micro_batch_tokens == ROOM // 30


def test_inference_only_plan_has_cache_and_sampling() -> None:
    alone = replace(ASKED, trains=False)
    measured = replace(
        MEASURED, optimizer=0, costs={False: Cost(0, 0)}, sampling=Sampling(prefill=5_000, decode=Cost(0, 500))
    )
    plan = decide(measured, alone)
    assert plan.slots == 64 and dict(plan.lines)["prefills and decode steps"] == 5_000 + 64 * 500
    assert decide(replace(measured, slot=11_200), alone).slots == 56, "cache, prefills and sampling fit together"
    with pytest.raises(HardwareError) as refused:
        decide(replace(measured, slot=100_000), alone)
    assert "KV cache of 8 sequences" in str(refused.value) and "one row" not in str(refused.value)


def test_trainer_without_sampling_has_no_cache_advice() -> None:
    with pytest.raises(HardwareError) as refused:
        decide(replace(MEASURED, costs={False: UNAFFORDABLE, True: Cost(0, 1000)}), replace(ASKED, slots=0))
    assert "train.sequence_len=512" in str(refused.value)
    assert "orch" not in str(refused.value) and "sequences" not in str(refused.value)
