"""Prefill: each distinct prompt runs once, and its keys and values are written to every slot that starts with it.

Small prefills are bound by launch overhead. So a bucket of sizes that is seen a second time is captured as a CUDA
graph, on inputs padded to the bucket.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from shoal.engine.kv_cache import PrefillWriter, SlotCache
from shoal.models.attention import ROW_MULTIPLE, Packed, round_up, upload
from shoal.models.graph_cache import CapturedGraph, GraphCache, pad, power_of_two
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import first_line

if TYPE_CHECKING:
    from shoal.engine.scheduler import Sequence as Running

log = logging.getLogger(__name__)
GRAPH_TOKENS = 16_384  # larger prefills are not launch-bound
MAX_GRAPHS = 32  # each keeps its inputs and final states; intermediate tensors share one pool
# Limit on the sum of distinct captured sizes. A graph reuses the pool's blocks of larger graphs, but not of smaller
# ones, so this bounds the pool to the largest prefill, which the memory plan accounts for.
POOL_TOKENS = 32_768
LEAST_TOKENS, LEAST_SEGMENTS, LEAST_LENGTH = 256, 8, 128
MULTIPLE = 1024  # large sizes are rounded up to this, to limit padding


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts end to end, and the slots that each is written to."""

    arrays: Mapping[str, np.ndarray]  # ids, positions [T]; starts [S+1]; per sequence: first, lengths, slots [N]
    last: np.ndarray  # [sequences], index of the last token of each prompt

    @staticmethod
    def of(sequences: Sequence[Running]) -> Prompts:
        prompts: list[list[int]] = []
        of_sequence: list[int] = []
        for sequence in sequences:
            if not prompts or sequence.request.prompt_ids != prompts[-1]:
                prompts.append(sequence.request.prompt_ids)
            of_sequence.append(len(prompts) - 1)
        lengths = np.array([len(p) for p in prompts])
        starts = np.concatenate([[0], np.cumsum(lengths)])
        arrays = {
            "ids": np.concatenate([np.asarray(p, dtype=np.int64) for p in prompts]),
            "positions": np.arange(starts[-1]) - np.repeat(starts[:-1], lengths),
            "starts": starts,
            "first": starts[of_sequence],
            "lengths": lengths[of_sequence],
            "slots": np.array([s.slot for s in sequences]),
        }
        return Prompts(arrays, starts[1:][of_sequence] - 1)

    @property
    def longest(self) -> int:
        return int(np.diff(self.arrays["starts"]).max())

    def padded(self, extent: PrefillBucket) -> dict[str, np.ndarray]:
        """Arrays padded to the bucket: with tokens outside of any prompt, empty prompts and empty sequences."""
        sizes = {"ids": extent.tokens, "positions": extent.tokens, "starts": extent.prompts + 1}
        arrays = {
            name: pad(array, sizes.get(name, extent.sequences), array[-1] if name == "starts" else 0)
            for name, array in self.arrays.items()
        }
        arrays["starts"] = arrays["starts"].astype(np.int32)
        return arrays


@dataclass(frozen=True)
class PrefillBucket:
    """The sizes of a graph: powers of two; above eight times `MULTIPLE`, tokens are rounded up to a multiple of it."""

    tokens: int
    prompts: int
    sequences: int
    longest: int

    @staticmethod
    def covering(prompts: Prompts) -> PrefillBucket:
        arrays = prompts.arrays
        tokens = len(arrays["ids"])
        return PrefillBucket(
            round_up(tokens, MULTIPLE) if tokens > 8 * MULTIPLE else power_of_two(tokens, LEAST_TOKENS),
            power_of_two(len(arrays["starts"]) - 1, LEAST_SEGMENTS),
            power_of_two(len(arrays["slots"]), LEAST_SEGMENTS),
            power_of_two(prompts.longest, LEAST_LENGTH),
        )


class Prefill:
    """`graphs`: whether the model's forward may be captured."""

    def __init__(self, view: SamplerView, cache: SlotCache, graphs: bool) -> None:
        self._view = view
        self._cache = cache
        self._device = view.decoder.device
        self._met: set[tuple[PrefillBucket, bool]] = set()
        # Graphs run one at a time and their results are read before the next, so they share a pool.
        may_capture = graphs and self._device.type == "cuda" and view.decoder.dtype.itemsize == 2
        self._graphs: GraphCache[tuple[PrefillBucket, bool], Tensor] = GraphCache(self._device, MAX_GRAPHS, may_capture)

    def run(self, sequences: Sequence[Running]) -> Tensor:
        """The hidden state of each prompt's last token, [sequences, hidden], padded with unused rows."""
        prompts = Prompts.of(sequences)
        rows = round_up(len(sequences), ROW_MULTIPLE)  # repeat rows, so that the head's product is padded too
        last = upload({"last": np.resize(prompts.last, rows)}, self._device)["last"]
        extent = PrefillBucket.covering(prompts)
        key = (extent, self._view.noisy)
        if not self._graphs.enabled or extent.tokens > GRAPH_TOKENS or key not in self._met:
            self._met.add(key)  # captured at the second use
            return self._eager(prompts)[last]
        if key not in self._graphs:
            if self._graphs.full or self._pool_tokens(extent) > POOL_TOKENS:
                return self._eager(prompts)[last]
            try:
                self._graphs[key] = self._capture(prompts, extent)
            except Exception as error:
                self._stop_capturing(error)
                return self._eager(prompts)[last]
        return self._graphs[key].replay(upload(prompts.padded(extent), self._device))[last]

    def _pool_tokens(self, more: PrefillBucket) -> int:
        return sum({more.tokens, *(extent.tokens for extent, _ in self._graphs)})

    def _stop_capturing(self, error: Exception) -> None:
        """Out of memory, or a kernel that cannot be captured: free all graphs and run every prefill eagerly."""
        log.warning("CUDA graphs for prefill are disabled: %s", first_line(error))
        self._graphs.clear()
        self._graphs.enabled = False

    def _eager(self, prompts: Prompts) -> Tensor:
        arrays = dict(prompts.arrays)
        tokens = len(arrays["ids"])
        padding = round_up(tokens, ROW_MULTIPLE) - tokens
        if padding:  # an extra segment of token 0, whose result is unused
            for name, more in (
                ("ids", np.zeros(padding)),
                ("positions", np.arange(padding)),
                ("starts", [tokens + padding]),
            ):
                arrays[name] = np.append(arrays[name], more).astype(np.int64)
        there = upload(arrays, self._device)
        return self._forward(there, Packed(arrays["starts"], self._device, self._writer(there, prompts.longest)))

    def _writer(self, there: Mapping[str, Tensor], longest: int) -> PrefillWriter:
        return PrefillWriter(self._cache, there["first"], there["lengths"], there["slots"], longest)

    def _forward(self, there: Mapping[str, Tensor], context: Packed) -> Tensor:
        return self._view.decoder.hidden(there["ids"][None], there["positions"][None], context)[0]

    def _capture(self, prompts: Prompts, extent: PrefillBucket) -> CapturedGraph[Tensor]:
        inputs = {name: tensor.clone() for name, tensor in upload(prompts.padded(extent), self._device).items()}
        writer = self._writer(inputs, extent.longest)
        context = Packed.planned({"starts": inputs["starts"]}, (extent.longest, extent.longest), writer)
        return self._graphs.capture(lambda: self._forward(inputs, context), inputs)
