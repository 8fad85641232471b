"""Decode steps as CUDA graphs: embedding to sampled token and done flag in one launch, several steps per host sync.

The engine uses them on a GPU if the kernels support the model's heads, and decodes eagerly otherwise. Graphs read
weights, cache, rows and sampling parameters in place, so they stay valid after optimizer steps and adapter or noise
updates. One graph per batch size and kind of draw is captured on first use. The next window is launched before the
results of the previous one are read, which hides host work behind the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from shoal.engine.decode import FusedDecode, KernelDecode
from shoal.engine.kv_cache import SlotCache
from shoal.engine.sampler import MAX_KEPT, SampledTokens, SamplingState, draw
from shoal.models.graph_cache import CapturedGraph, GraphCache
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import first_line

if TYPE_CHECKING:
    from shoal.engine.kernels.sampling import Rows

WINDOW = 8  # most decode steps between two host syncs
MANY_ROWS = 1024  # from here on windows are half as long: finished rows keep decoding until the next sync
MAX_GRAPHS = 128  # beyond this, a bucket uses the next larger graph that exists
SHORTEST = 512  # keys; buckets of context length are this times a power of two


class CaptureError(RuntimeError):
    """A decode step could not be captured. Windows launched before remain valid."""


@dataclass(frozen=True)
class DecodeBucket:
    """The size of a graph: rows of the batch, and an upper bound on keys per row."""

    rows: int
    longest: int

    @staticmethod
    def covering(rows: int, keys: int, cache_length: int) -> DecodeBucket:
        longest = SHORTEST
        while longest < keys:
            longest *= 2
        return DecodeBucket(rows, min(longest, max(cache_length, SHORTEST)))

    def covers(self, other: DecodeBucket) -> bool:
        return self.rows >= other.rows and self.longest >= other.longest


@dataclass(frozen=True)
class Window:
    """Results of a window, [steps, rows] each; kept ids [steps, rows, MAX_KEPT] if sampling was truncated."""

    ids: np.ndarray
    logprobs: np.ndarray
    kept: np.ndarray | None


@dataclass
class _CopyInFlight:
    """Results of a window that are being copied to the host."""

    tensors: list[Tensor]
    event: torch.cuda.Event | None

    def read(self) -> Window:
        if self.event is not None:
            self.event.synchronize()
        ids, logprobs, *kept = (tensor.numpy() for tensor in self.tensors)
        return Window(ids, logprobs, kept[0] if kept else None)


class DecodeGraphs:
    """`begin` adds sequences, `launch` decodes a window of rows 0..rows-1, `collect` reads the oldest window."""

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
        self._kept: Tensor | None = None  # [WINDOW, slots, MAX_KEPT] int32, allocated on first use
        self._graphs: GraphCache[tuple[DecodeBucket, bool, bool], None] = GraphCache(
            self._device, MAX_GRAPHS, enabled=self._device.type == "cuda"
        )
        self._flights: deque[_CopyInFlight] = deque()

    @property
    def fused(self) -> bool:
        return self._fused is not None

    def begin(self, slots: np.ndarray, positions: np.ndarray, limits: np.ndarray, drawn: SampledTokens) -> None:
        """Add sequences whose first token, at `positions`, is drawn; it is collected as a window of one step."""
        at, where, most = self._upload(np.stack([slots, positions, limits]))
        rows = self.rows
        done = torch.isin(drawn.token_ids, rows.ends) | (most <= 1)
        rows.tokens[at] = drawn.token_ids
        rows.positions[at] = torch.where(done, 0, where)
        rows.limits[at] = most
        rows.counts.index_fill_(0, at, 1)  # `[at] = 1` would synchronise with the device
        rows.done[at] = done.to(rows.done.dtype)
        kept = [] if drawn.kept is None else [drawn.kept[None].to(torch.int32)]
        self._flights.append(self._send([drawn.token_ids[None], drawn.logprobs[None], *kept]))

    def draw(self, logits: Tensor, rows: Tensor, counts: Tensor, narrowed: bool) -> SampledTokens:
        """Draw a token for each row of logits with the sampling parameters of `rows`."""
        return self._draw(logits, self._sampling[rows], counts, narrowed)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        rows = self.rows
        for tensor in (rows.tokens, rows.positions, rows.counts, rows.limits, rows.done):
            tensor[targets] = tensor[sources]
        rows.done.index_fill_(0, sources, 1)
        rows.positions.index_fill_(0, sources, 0)

    def clear(self) -> None:
        """Mark every row as done and drop windows in flight."""
        self._flights.clear()
        self.rows.done.fill_(1)
        self.rows.positions.zero_()

    def follow_weights(self) -> None:
        """Refresh the adapter copies that graphs read; all other weights are read in place."""
        if self._fused is not None:
            self._fused.copy_adapters()

    def launch(self, extent: DecodeBucket, steps: int, narrowed: bool) -> None:
        rows = extent.rows
        self.rows.cursors.zero_()  # also before a capture, whose warm-up runs a step that must stay within the window
        graph = self._graph(extent, narrowed) if self._graphs.enabled else None
        for _ in range(steps):
            if graph is not None:
                graph.replay()
            else:  # Triton interpreter: the same step without a graph
                self._step(extent, narrowed)
        results = [self.rows.ids[:steps, :rows], self.rows.logprobs[:steps, :rows]]
        if narrowed and self._kept is not None:
            results.append(self._kept[:steps, :rows])
        self._flights.append(self._send(results))

    def collect(self) -> Window:
        return self._flights.popleft().read()

    def _send(self, results: list[Tensor]) -> _CopyInFlight:
        """Start copies to the host. The next window overwrites the originals only after them, in stream order."""
        if self._device.type != "cuda":
            return _CopyInFlight([tensor.clone() for tensor in results], None)
        hosts = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in results]
        for host, tensor in zip(hosts, results, strict=True):
            host.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return _CopyInFlight(hosts, event)

    def _upload(self, array: np.ndarray) -> Tensor:
        host = torch.from_numpy(array.astype(np.int64))
        return (host.pin_memory() if self._device.type == "cuda" else host).to(self._device, non_blocking=True)

    def _graph(self, extent: DecodeBucket, narrowed: bool) -> CapturedGraph[None]:
        """Capture the largest graph first: all share a memory pool, and smaller graphs reuse the blocks of larger ones,
        but not the reverse."""
        kind = narrowed, self._view.noisy
        largest = DecodeBucket.covering(self._cache.slots, self._cache.length, self._cache.length)
        for wanted in (largest, extent):
            if (wanted, *kind) not in self._graphs and (wanted is largest or not self._graphs.full):
                self._graphs[wanted, *kind] = self._captured(wanted, narrowed)
        there = [e for e, *of in self._graphs if tuple(of) == kind and e.covers(extent)]
        return self._graphs[min(there, key=lambda e: (e.rows, e.longest)), *kind]

    def _captured(self, extent: DecodeBucket, narrowed: bool) -> CapturedGraph[None]:
        try:
            return self._capture(extent, narrowed)
        except Exception as error:  # unsupported kernel, a device sync in the model, out of memory
            raise CaptureError(f"a decode step could not be captured ({first_line(error)})") from error

    def _capture(self, extent: DecodeBucket, narrowed: bool) -> CapturedGraph[None]:
        saved = [t.clone() for t in self._state()]
        graph = self._graphs.capture(lambda: self._step(extent, narrowed))
        self.rows.cursors.zero_()
        for tensor, value in zip(self._state(), saved, strict=True):
            tensor.copy_(value)  # undo the warm-up step
        return graph

    def _state(self) -> tuple[Tensor, ...]:
        rows = self.rows
        return rows.tokens, rows.positions, rows.counts, rows.done

    def _step(self, extent: DecodeBucket, narrowed: bool) -> None:
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
    def _draw(logits: Tensor, sampling: SamplingState, counts: Tensor, narrowed: bool) -> SampledTokens:
        from shoal.engine.kernels.sampling import draw_tokens

        if narrowed:
            return draw(logits, sampling, counts, sampling.banned(counts, logits.shape[1]), truncated=True)
        return SampledTokens(*draw_tokens(logits, sampling.seeds, counts, sampling.temperatures), kept=None)

    def _keep(self, rows: int, kept: Tensor) -> None:
        if self._kept is None:
            shape = (WINDOW, self._cache.slots, MAX_KEPT)
            self._kept = torch.full(shape, -1, dtype=torch.int32, device=self._device)
        at = self.rows.cursors[:1]
        self._kept[:, :rows, : kept.shape[1]].index_copy_(0, at, kept[None].to(torch.int32))
