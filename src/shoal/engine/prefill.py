"""Prompts into the cache: each distinct one runs once, and its keys and values go to every slot that begins with it.

A few prompts join a running batch again and again, and launching their kernels one by one takes the host longer than
the device needs to run them. So a prefill of a size that was met before is a CUDA graph, on inputs padded to that size.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.engine.cache import PrefillWriter, SlotCache
from shoal.models.attention import ROW_MULTIPLE, Packed, round_up
from shoal.models.capturing import capture
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import first_line
from shoal.models.upload import upload

if TYPE_CHECKING:
    from shoal.engine.scheduler import Sequence as Running

log = logging.getLogger(__name__)
GRAPH_TOKENS = 16_384  # of one prefill; larger ones keep the device busy however they are launched
MAX_GRAPHS = 32  # each holds its inputs and the states it ends with; what lies between shares one pool
# Of all captured sizes. One finds room in the pool that a larger one had, and none that smaller ones had, so that all
# may take as much as the largest prefill, which is in the memory plan.
POOL_TOKENS = 32_768
LEAST_TOKENS, LEAST_SEGMENTS, LEAST_LENGTH = 256, 8, 128
MULTIPLE = 1024  # of the tokens of a large one, whose filling takes time


@dataclass(frozen=True)
class Prompts:
    """Distinct prompts end to end, and where each of their tokens goes."""

    arrays: Mapping[str, np.ndarray]  # ids, positions [T]; starts [S+1]; of each sequence first, lengths, slots [N]
    last: np.ndarray  # [sequences], the last token of each one's prompt

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

    def padded(self, extent: Extent) -> dict[str, np.ndarray]:
        """Tokens that belong to no prompt, prompts of no tokens, and sequences that get none."""
        given = self.arrays
        sizes = {"ids": extent.tokens, "positions": extent.tokens, "starts": extent.prompts + 1}
        arrays = {}
        for name, array in given.items():
            fill = array[-1] if name == "starts" else 0
            full = np.full(sizes.get(name, extent.sequences), fill, dtype=np.int64)
            full[: len(array)] = array
            arrays[name] = full
        arrays["starts"] = arrays["starts"].astype(np.int32)
        return arrays


@dataclass(frozen=True)
class Extent:
    """Sizes a graph is captured for: powers of two, and of more tokens than eight times `MULTIPLE` the next one."""

    tokens: int
    prompts: int
    sequences: int
    longest: int

    @staticmethod
    def covering(prompts: Prompts) -> Extent:
        arrays = prompts.arrays
        tokens = len(arrays["ids"])
        return Extent(
            round_up(tokens, MULTIPLE) if tokens > 8 * MULTIPLE else _power(tokens, LEAST_TOKENS),
            _power(len(arrays["starts"]) - 1, LEAST_SEGMENTS),
            _power(len(arrays["slots"]), LEAST_SEGMENTS),
            _power(prompts.longest, LEAST_LENGTH),
        )


def _power(count: int, least: int) -> int:
    return max(least, 1 << (count - 1).bit_length())


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    hidden: Tensor


class Prefill:
    """`graphs` says whether the model's forward may be captured."""

    def __init__(self, view: SamplerView, cache: SlotCache, graphs: bool) -> None:
        self._view = view
        self._cache = cache
        self._device = view.decoder.device
        self._may_capture = graphs and self._device.type == "cuda" and view.decoder.dtype.itemsize == 2
        self._met: set[tuple[Extent, bool]] = set()
        self._graphs: dict[tuple[Extent, bool], _Captured] = {}
        # They run one after another and their states are read before the next, so they may share what lies between.
        self._pool = torch.cuda.graph_pool_handle() if self._may_capture else None

    def run(self, sequences: Sequence[Running]) -> Tensor:
        """The state after each one's prompt, [sequences, hidden], padded with rows that nobody reads."""
        prompts = Prompts.of(sequences)
        rows = round_up(len(sequences), ROW_MULTIPLE)  # repeated rows: the head is a matrix product too
        last = upload({"last": np.resize(prompts.last, rows)}, self._device)["last"]
        extent = Extent.covering(prompts)
        key = (extent, self._view.noisy)
        if not self._may_capture or extent.tokens > GRAPH_TOKENS or key not in self._met:
            self._met.add(key)  # captured if it comes again
            return self._eager(prompts)[last]
        if key not in self._graphs:
            if len(self._graphs) >= MAX_GRAPHS or self._pool_tokens(extent) > POOL_TOKENS:
                return self._eager(prompts)[last]
            try:
                self._graphs[key] = self._capture(prompts, extent)
            except Exception as error:
                self._stop_capturing(error)
                return self._eager(prompts)[last]
        captured = self._graphs[key]
        for name, tensor in upload(prompts.padded(extent), self._device).items():
            captured.inputs[name].copy_(tensor)
        captured.graph.replay()
        return captured.hidden[last]

    def _pool_tokens(self, more: Extent) -> int:
        return sum({more.tokens, *(extent.tokens for extent, _ in self._graphs)})

    def _stop_capturing(self, error: Exception) -> None:
        """Memory is scarce, or a kernel cannot be captured: what graphs hold is given back, and prompts are computed
        launch by launch."""
        log.warning("prefills are not captured any more: %s", first_line(error))
        self._graphs.clear()
        self._may_capture = False

    def _eager(self, prompts: Prompts) -> Tensor:
        arrays = dict(prompts.arrays)
        tokens = len(arrays["ids"])
        padding = round_up(tokens, ROW_MULTIPLE) - tokens
        if padding:  # one more segment, of token 0, that nobody reads
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

    def _capture(self, prompts: Prompts, extent: Extent) -> _Captured:
        inputs = {name: tensor.clone() for name, tensor in upload(prompts.padded(extent), self._device).items()}
        writer = self._writer(inputs, extent.longest)
        context = Packed.planned({"starts": inputs["starts"]}, (extent.longest, extent.longest), writer)

        def forward() -> Tensor:
            return self._forward(inputs, context)

        forward()
        graph, hidden = capture(forward, self._pool)
        return _Captured(graph, inputs, hidden)
