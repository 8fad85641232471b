"""Decode steps as CUDA graphs: embedding to sampled token and done flag in one launch, several launches between looks.

Used by the engine on a GPU where the kernels support the model's heads; everything else decodes eagerly, which is also
what this is tested against. Graphs read weights, cache, rows and sampling parameters in place, so they survive
optimizer steps, adapters and new noise. One is captured for each batch size and kind of draw, when first needed. A
window is launched before the last one's results are looked at: the host's work is hidden behind the device's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.engine.cache import SlotCache
from shoal.engine.fused import FusedDecode
from shoal.engine.kernel_context import KernelDecode
from shoal.engine.sampler import MAX_KEPT, Drawn, SamplingState, draw
from shoal.models.capturing import capture
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import first_line

if TYPE_CHECKING:
    from shoal.engine.kernels.sampling import Rows

WINDOW = 8  # decode steps between two looks at what finished, at most
MANY_ROWS = 1024  # whose steps take so long that the host looks twice as often: what finished decodes on until then
MAX_GRAPHS = 128  # a size beyond them takes the next larger one that there is
SHORTEST = 512  # keys; contexts up to here, up to twice this, four times … have graphs of their own


class CaptureError(RuntimeError):
    """No graph of a decode step can be had; what was launched before is not touched by it."""


@dataclass(frozen=True)
class Extent:
    """What a graph is captured for: rows of the batch, and keys that no row exceeds."""

    rows: int
    longest: int

    @staticmethod
    def covering(rows: int, keys: int, cache_length: int) -> Extent:
        longest = SHORTEST
        while longest < keys:
            longest *= 2
        return Extent(rows, min(longest, max(cache_length, SHORTEST)))

    def covers(self, other: Extent) -> bool:
        return self.rows >= other.rows and self.longest >= other.longest


@dataclass(frozen=True)
class Window:
    """What a window drew, [steps, rows] each; kept ids [steps, rows, MAX_KEPT] where draws were narrowed."""

    ids: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray | None


@dataclass
class _Flight:
    """A window on its way to the host."""

    tensors: list[Tensor]
    event: torch.cuda.Event | None

    def read(self) -> Window:
        if self.event is not None:
            self.event.synchronize()
        ids, logprobs, *kept = (tensor.numpy() for tensor in self.tensors)
        return Window(ids, logprobs, kept[0] if kept else None)


class DecodeGraphs:
    """`begin` puts sequences into rows, `launch` decodes rows 0..rows-1 for a window, `collect` reads the oldest."""

    def __init__(
        self,
        view: SamplerView,
        cache: SlotCache,
        sampling: SamplingState,
        end_ids: Sequence[int],
        fused: FusedDecode | None,
    ) -> None:
        from shoal.engine.kernels.sampling import Rows

        self._view = view
        self._fused = fused
        self._cache = cache
        self._sampling = sampling
        self._device = view.decoder.device
        self.rows: Rows = Rows.allocate(cache.slots, WINDOW, list(end_ids), self._device)
        self._kept: Tensor | None = None  # [WINDOW, slots, MAX_KEPT] int32, made when first needed
        self._graphs: dict[tuple[Extent, bool, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        self._flights: deque[_Flight] = deque()

    @property
    def fused(self) -> bool:
        return self._fused is not None

    def begin(self, slots: np.ndarray, positions: np.ndarray, limits: np.ndarray, drawn: Drawn) -> None:
        """New sequences, whose first token is drawn and stands at `positions`; it is collected as a window of one."""
        at, where, most = self._upload(np.stack([slots, positions, limits]))
        rows = self.rows
        done = torch.isin(drawn.token_ids, rows.ends) | (most <= 1)
        rows.tokens[at] = drawn.token_ids
        rows.positions[at] = torch.where(done, 0, where)
        rows.limits[at] = most
        rows.counts.index_fill_(0, at, 1)  # `[at] = 1` would copy the number over, and wait for the device
        rows.done[at] = done.to(rows.done.dtype)
        kept = [] if drawn.kept is None else [drawn.kept[None].to(torch.int32)]
        self._flights.append(self._send([drawn.token_ids[None], drawn.logprobs[None], *kept]))

    def draw(self, logits: Tensor, rows: Tensor, counts: Tensor, narrowed: bool) -> Drawn:
        """A token for each row of logits with the sampling parameters of `rows`."""
        return self._draw(logits, self._sampling[rows], counts, narrowed)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        rows = self.rows
        for tensor in (rows.tokens, rows.positions, rows.counts, rows.limits, rows.done):
            tensor[targets] = tensor[sources]
        rows.done.index_fill_(0, sources, 1)
        rows.positions.index_fill_(0, sources, 0)

    def clear(self) -> None:
        """Every row is done; windows in flight are forgotten."""
        self._flights.clear()
        self.rows.done.fill_(1)
        self.rows.positions.zero_()

    def follow_weights(self) -> None:
        """What graphs hold a copy of, which is adapters alone, is copied again."""
        if self._fused is not None:
            self._fused.copy_adapters()

    def launch(self, extent: Extent, steps: int, narrowed: bool) -> None:
        rows = extent.rows
        self.rows.cursors.zero_()  # before a graph is captured too, which takes a step: beyond the window is not ours
        graph = self._graph(extent, narrowed) if self._device.type == "cuda" else None
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:  # Triton's interpreter: the same step without a graph
                self._step(extent, narrowed)
        results = [self.rows.ids[:steps, :rows], self.rows.logprobs[:steps, :rows]]
        if narrowed and self._kept is not None:
            results.append(self._kept[:steps, :rows])
        self._flights.append(self._send(results))

    def collect(self) -> Window:
        return self._flights.popleft().read()

    def _send(self, results: list[Tensor]) -> _Flight:
        """Start copies to the host; the next window may overwrite the originals, in stream order, after them."""
        if self._device.type != "cuda":
            return _Flight([tensor.clone() for tensor in results], None)
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in results]
        for host, tensor in zip(hosts, results, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _Flight(hosts, event)

    def _upload(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array.astype(np.int64))
        return (host.pin_memory() if self._device.type == "cuda" else host).to(self._device, non_blocking=True)

    def _graph(self, extent: Extent, narrowed: bool) -> torch.cuda.CUDAGraph:
        """The largest is captured before all others: they share a pool of memory, in which a step finds room that a
        larger one had, and none that smaller ones had."""
        kind = narrowed, self._view.noisy
        largest = Extent.covering(self._cache.slots, self._cache.length, self._cache.length)
        for wanted in (largest, extent):
            if (wanted, *kind) not in self._graphs and (wanted is largest or len(self._graphs) < MAX_GRAPHS):
                self._graphs[wanted, *kind] = self._captured(wanted, narrowed)
        there = [e for e, *of in self._graphs if tuple(of) == kind and e.covers(extent)]
        return self._graphs[min(there, key=lambda e: (e.rows, e.longest)), *kind]

    def _captured(self, extent: Extent, narrowed: bool) -> torch.cuda.CUDAGraph:
        try:
            return self._capture(extent, narrowed)
        except Exception as error:  # a kernel the device cannot take, a model that waits for it, too little memory
            raise CaptureError(f"a decode step could not be captured ({first_line(error)})") from error

    def _capture(self, extent: Extent, narrowed: bool) -> torch.cuda.CUDAGraph:
        saved = [t.clone() for t in self._state()]

        def step() -> None:
            self._step(extent, narrowed)

        step()
        self.rows.cursors.zero_()
        graph, _ = capture(step, self._pool)
        for tensor, value in zip(self._state(), saved, strict=True):
            tensor.copy_(value)  # the warm-up moved the rows on
        return graph

    def _state(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return rows.tokens, rows.positions, rows.counts, rows.done

    def _step(self, extent: Extent, narrowed: bool) -> None:
        from shoal.engine.kernels.sampling import advance

        decoder, state, rows = self._view.decoder, self.rows, extent.rows
        tokens, positions, counts = state.tokens[:rows], state.positions[:rows], state.counts[:rows]
        if self._fused is not None:
            hidden = self._fused.hidden(tokens, positions, extent.longest)
        else:
            context = KernelDecode(self._cache, positions, extent.longest)
            hidden = decoder.hidden(tokens[:, None], positions[:, None], context)[:, 0]
        drawn = self._draw(decoder.logits(hidden), self._sampling[slice(rows)], counts, narrowed)
        if drawn.kept is not None:
            self._keep(rows, drawn.kept)
        advance(state, rows, drawn.token_ids, drawn.logprobs)

    @staticmethod
    def _draw(logits: Tensor, sampling: SamplingState, counts: Tensor, narrowed: bool) -> Drawn:
        from shoal.engine.kernels.sampling import draw_tokens

        if narrowed:
            return draw(logits, sampling, counts, sampling.banned(counts, logits.shape[1]), truncated=True)
        return Drawn(*draw_tokens(logits, sampling.seeds, counts, sampling.temperatures), kept=None)

    def _keep(self, rows: int, kept: Tensor) -> None:
        if self._kept is None:
            shape = (WINDOW, self._cache.slots, MAX_KEPT)
            self._kept = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        at = self.rows.cursors[:1]
        self._kept[:, :rows, : kept.shape[1]].index_copy_(0, at, kept[None].to(torch.int32))
