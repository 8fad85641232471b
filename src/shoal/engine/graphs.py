"""Decode steps as CUDA graphs: embedding to sampled token in one launch, several launches between two looks.

Used by the engine on a GPU where the kernels support the model's heads; everything else decodes eagerly, which is also
what this is tested against. Graphs read weights, cache and sampling parameters in place, so they survive optimizer
steps, adapters and new noise; one is captured for each batch size, when it is first needed.
"""

from __future__ import annotations

import numpy as np
import torch

from shoal.engine.cache import SlotCache
from shoal.engine.fused import FusedDecode
from shoal.engine.kernel_context import KernelDecode
from shoal.engine.sampler import SamplingState, hash_keys
from shoal.models.sampler_view import SamplerView

WINDOW = 8  # decode steps between two looks at what finished
PROGRAMS = 512  # attention programs that fill the device; contexts are split until there are about so many


class DecodeGraphs:
    """`run` decodes rows 0..rows-1 for several steps and returns what each drew."""

    def __init__(
        self, view: SamplerView, cache: SlotCache, sampling: SamplingState, fused: FusedDecode | None = None
    ) -> None:
        self._view = view
        self._fused = fused
        self._cache = cache
        self._sampling = sampling
        slots, device = cache.slots, view.decoder.device
        self._device = device
        self._tokens, self._positions, self._counts = (
            torch.zeros(slots, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._cursor = torch.zeros(1, dtype=torch.int64, device=device)
        self._ids = torch.zeros(WINDOW, slots, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(WINDOW, slots, dtype=torch.float32, device=device)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def run(
        self, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray, steps: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """[rows] newest tokens, where each stands and how many were drawn → ids and log-probs [steps, rows]."""
        rows = len(tokens)
        self._set(tokens, positions, counts)
        if self._device.type == "cuda":
            graph = self._graph(rows)
            self._set(tokens, positions, counts)  # capturing moved them
            for _ in range(steps):
                graph.replay()
        else:  # Triton's interpreter: the same step without a graph
            for _ in range(steps):
                self._step(rows)
        return self._ids[:steps, :rows].cpu().numpy(), self._logprobs[:steps, :rows].cpu().numpy()

    def _set(self, tokens: np.ndarray, positions: np.ndarray, counts: np.ndarray) -> None:
        for buffer, array in ((self._tokens, tokens), (self._positions, positions), (self._counts, counts)):
            buffer[: len(array)].copy_(torch.from_numpy(array), non_blocking=True)
        self._cursor.zero_()

    def _graph(self, rows: int) -> torch.cuda.CUDAGraph:
        key = (rows, self._view.noisy)
        if key not in self._graphs:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step(rows)  # compiles kernels and fills caches, which must not happen while capturing
                self._cursor.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(rows)
            self._graphs[key] = graph
        return self._graphs[key]

    def _step(self, rows: int) -> None:
        from shoal.engine.kernels.sampling import draw_tokens

        decoder = self._view.decoder
        tokens, positions, counts = self._tokens[:rows], self._positions[:rows], self._counts[:rows]
        if self._fused is not None:
            hidden = self._fused.hidden(tokens, positions, self._cache, self._splits(rows))
        else:
            context = KernelDecode(self._cache, positions, self._splits(rows))
            hidden = decoder.hidden(tokens[:, None], positions[:, None], context)[:, 0]
        low, high = hash_keys(self._sampling.seeds[:rows], counts)
        ids, logprobs = draw_tokens(decoder.logits(hidden), low, high, self._sampling.temperatures[:rows])
        self._ids[:, :rows].index_copy_(0, self._cursor, ids[None])
        self._logprobs[:, :rows].index_copy_(0, self._cursor, logprobs[None])
        tokens.copy_(ids)
        # A row that finished inside the window goes on into nothing; it must not leave its slot.
        positions.add_(1).clamp_(max=self._cache.length - 1)
        counts.add_(1)
        self._cursor.add_(1)

    def _splits(self, rows: int) -> int:
        """Splits of the context, a power of two: more for small batches and long caches."""
        heads = next(iter(self._cache.keys.values())).shape[1]
        wanted = min(PROGRAMS // (rows * heads), self._cache.length // 256, 16)
        return 1 << max(0, wanted.bit_length() - 1) if wanted > 1 else 1
