"""Training passes over micro-batches as CUDA graphs: small passes are bound by launch overhead.

A bucket of sizes that occurs a few times is captured, on inputs padded to the bucket; the graph is kept if it is
measurably faster. Padding tokens form short segments of their own: their values stay finite and the loss ignores them.
Padding keys belong to segments without queries, so they get no gradient. Weights are read, and gradients are
accumulated, in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from shoal.core.terms import Metrics
from shoal.models.attention import Packed, gather, upload
from shoal.models.graph_cache import CapturedGraph, GraphCache, pad, power_of_two
from shoal.trainer.device_batch import DeviceBatch, HostBatch

log = logging.getLogger(__name__)
Work = Callable[[DeviceBatch], "PassOutput"]
GRAPH_TOKENS = 32_768  # larger passes are not launch-bound
MAX_GRAPHS = 48  # each keeps its inputs and results; intermediate tensors share one pool
TIMED = 3  # eager passes, and replays, timed per bucket before they are compared
WORTH = 0.95  # a graph must take less than this fraction of the eager time
POOL_PASSES = 5000  # passes after which a full pool is replaced, since sizes drift during a run
LEAST_TOKENS, LEAST_SEGMENTS, LEAST_LENGTH = 256, 64, 512
MULTIPLE = 2048


@dataclass(frozen=True)
class PassOutput:
    """Results of a pass, on the device: a pair of numbers per name, then one number per scored token."""

    names: tuple[str, ...]
    values: Tensor  # [2 · names + scored]; in fp64 if there are names, which holds sums and counts exactly

    @staticmethod
    def of(metrics: Metrics, logprobs: Tensor) -> PassOutput:
        pairs = torch.stack([number.detach().double() for pair in metrics.values() for number in pair])
        return PassOutput(tuple(metrics), torch.cat([pairs, logprobs.detach().double()]))


@dataclass(frozen=True)
class GraphBucket:
    """The sizes of a graph; coarse, so that most buckets recur. All tokens may be scored."""

    tokens: int
    keys: int  # a power of two times the tokens; 0 = no shared prefixes
    segments: int
    longest: tuple[int, int]  # upper bounds on queries and keys of one segment

    @staticmethod
    def covering(laid: HostBatch) -> GraphBucket:
        bounds, *lengths = laid.context.bounds
        count = len(laid.arrays["token_ids"])
        tokens = _size(count + 1)
        longest, longest_keys = map(_length, lengths)
        segments = len(bounds["starts"]) - 1 + -(-(tokens - count) // LEAST_LENGTH)
        keys = 0
        if "keys" in bounds:
            least = len(bounds["keys"]) + tokens - count
            keys = tokens * power_of_two(-(-least // tokens))
            segments += -(-(keys - least) // longest_keys)
        segments = power_of_two(max(segments, laid.sequences), LEAST_SEGMENTS)
        return GraphBucket(tokens, keys, segments, (longest, longest_keys))


def _length(count: int) -> int:
    """LEAST_LENGTH times a power of four; coarse, since it is only an upper bound."""
    length = LEAST_LENGTH
    while length < count:
        length *= 4
    return length


def _size(count: int) -> int:
    """The next power of two, or 3/4 of it; large sizes are rounded up to MULTIPLE, to limit padding."""
    if count > MULTIPLE * 4:
        return -(-count // MULTIPLE) * MULTIPLE
    power = power_of_two(count, LEAST_TOKENS)
    return power * 3 // 4 if power > LEAST_TOKENS and count <= power * 3 // 4 else power


def sizes(most_tokens: int) -> list[int]:
    """Bucket sizes of passes with up to `most_tokens` tokens, smallest first; empty if `most_tokens` is 0."""
    found = [_size(1)] if most_tokens else []
    while found and found[-1] < _size(min(most_tokens + 1, GRAPH_TOKENS)):
        found.append(_size(found[-1] + 1))
    return found


def padded(laid: HostBatch, extent: GraphBucket) -> dict[str, np.ndarray]:
    """All inputs of a pass, padded to `extent` with extra segments, and scored tokens outside of the loss mask."""
    bounds, _, _ = laid.context.bounds
    count = len(laid.arrays["token_ids"])
    own = np.arange(count, extent.tokens)
    anywhere = np.arange(extent.tokens)  # distinct indices: index_add into one place would be serialised
    fills = {"position_ids": (anywhere - count) % LEAST_LENGTH, "before": anywhere, "temperatures": 1}
    arrays = {name: pad(array, extent.tokens, fills.get(name, 0)) for name, array in laid.arrays.items()}
    pieces = _pieces(len(own), LEAST_LENGTH)
    arrays["starts"] = _continued(bounds["starts"], pieces, extent.segments)
    if extent.keys:
        known = bounds["keys"]
        spare = extent.keys - len(known) - len(own)
        arrays |= gather(np.concatenate([known, own, np.resize(anywhere, spare)]), extent.tokens)
        pieces += _pieces(spare, extent.longest[1])
        arrays["key_starts"] = _continued(bounds["key_starts"], pieces, extent.segments)
    return arrays


def _pieces(count: int, most: int) -> list[int]:
    return [most] * (count // most) + [count % most] * (count % most > 0)


def _continued(starts: np.ndarray, lengths: Sequence[int], segments: int) -> np.ndarray:
    """Segment starts [segments + 1], continued by segments of these lengths, then by empty segments."""
    ends = starts[-1] + np.cumsum([*lengths, *[0] * (segments + 1 - len(starts) - len(lengths))])
    return np.concatenate([starts, ends]).astype(np.int32)


def micro_batch(found: Mapping[str, Tensor], extent: GraphBucket) -> DeviceBatch:
    plan = {name: found[name] for name in ("starts", "key_starts", "keys", "copies", "copy_starts") if name in found}
    return DeviceBatch.made_of(found, Packed.planned(plan, extent.longest), extent.segments)


_Key = tuple[Hashable, GraphBucket, frozenset[str]]  # kind of pass, sizes, names of the inputs


class Span(AbstractContextManager[None]):
    """Device time of a block, including waits for the host. Synchronises only when `ms` is read."""

    def __init__(self) -> None:
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __enter__(self) -> None:
        self._start.record()

    def __exit__(self, *_: object) -> None:
        self._end.record()

    @property
    def ms(self) -> float:
        self._end.synchronize()
        return self._start.elapsed_time(self._end)


@dataclass
class _BucketState:
    """State of one bucket: timings of the first eager passes and of the first replays."""

    plain: list[Span] = field(default_factory=list)
    replays: list[Span] = field(default_factory=list)
    judged: bool = False
    refused: bool = False

    @property
    def is_slower(self) -> bool:
        """Compares the fastest runs, since others may include kernel compilation or waits."""
        return min(span.ms for span in self.replays) > WORTH * min(span.ms for span in self.plain)


class PassGraphs:
    """`fits(tokens, keys, pool_bytes)`: whether the memory plan has room for another graph of this size, with a pool
    of `pool_bytes`."""

    def __init__(self, device: torch.device, span: Callable[[], Span] = Span) -> None:
        self.fits: Callable[[int, int, int], bool] = lambda tokens, keys, pool_bytes: True
        self._device = device
        self._span = span
        self._sizes: dict[_Key, _BucketState] = {}
        self._graphs: GraphCache[_Key, PassOutput] = GraphCache(device, MAX_GRAPHS)
        self._passes = self._begun = 0  # passes so far, and when the pool was started

    @property
    def captured(self) -> list[_Key]:
        """Kind, bucket and input names of each captured graph."""
        return list(self._graphs)

    def run(self, kind: Hashable, laid: HostBatch, work: Work, plainly: Callable[[], PassOutput]) -> PassOutput:
        """Run `work` on the rows as a graph, or run `plainly`, which does the same eagerly."""
        if laid.kept is not None or len(laid.arrays["token_ids"]) >= GRAPH_TOKENS:
            return plainly()
        extent = GraphBucket.covering(laid)
        key = (kind, extent, frozenset(laid.arrays))
        size = self._sizes.setdefault(key, _BucketState())
        self._passes += 1
        graph = self._graph_of(key, size, laid, work)
        if graph is None:
            with self._timed(size.plain):
                return plainly()
        with self._timed(size.replays):
            passed = graph.replay(upload(padded(laid, extent), self._device))
            # The next replay overwrites the results of this one.
            return PassOutput(passed.names, passed.values.clone())

    @contextmanager
    def _timed(self, spans: list[Span]) -> Iterator[None]:
        """Time the block if fewer than TIMED spans were recorded; blocks that raise are not counted."""
        span = self._span() if len(spans) < TIMED else None
        with span or nullcontext():
            yield
        if span is not None:
            spans.append(span)

    def _graph_of(self, key: _Key, size: _BucketState, laid: HostBatch, work: Work) -> CapturedGraph[PassOutput] | None:
        """The graph of this bucket; None if it is not captured yet, cannot be captured, or is slower than eager."""
        if len(size.plain) < TIMED or size.refused:
            return None
        _, extent, _ = key
        if key not in self._graphs:
            if self._has_room(extent):
                try:
                    self._graphs[key] = self._capture(padded(laid, extent), extent, work)
                except RuntimeError as error:
                    self._give_up(size, extent, error)
        elif len(size.replays) == TIMED and not size.judged:
            size.judged = True
            if size.is_slower:
                del self._graphs[key]
                size.refused = True
                if not self._graphs:
                    self._begin_pool()
        return self._graphs.get(key)

    def _has_room(self, extent: GraphBucket) -> bool:
        """Whether limits allow another graph. A full pool is replaced after a while, since sizes drift during a run."""
        if not self._graphs.enabled:
            return False
        if not self._graphs.full and self.fits(extent.tokens, extent.keys, self._graphs.pool_bytes):
            return True
        if self._passes - self._begun < POOL_PASSES or not self.fits(extent.tokens, extent.keys, 0):
            return False
        self._begin_pool()
        return True

    def _begin_pool(self) -> None:
        self._graphs.reset()
        self._begun = self._passes

    def _give_up(self, size: _BucketState, extent: GraphBucket, error: RuntimeError) -> None:
        """Out of memory: give up this bucket. Other errors: the model cannot be captured, so give up all buckets."""
        size.refused = True
        what = f"no CUDA graph for training passes of {extent.tokens} tokens"
        if isinstance(error, torch.OutOfMemoryError):
            self._begin_pool()  # frees the memory of the failed capture
        else:  # the failed capture may have left partial state
            self._graphs.enabled = False
            what = "no CUDA graphs for training passes"
        log.warning("%s: %s", what, str(error).partition("\n")[0])

    def _capture(self, arrays: dict[str, np.ndarray], extent: GraphBucket, work: Work) -> CapturedGraph[PassOutput]:
        inputs = {name: tensor.clone() for name, tensor in upload(arrays, self._device).items()}
        micro = micro_batch(inputs, extent)
        inputs["weights"].zero_()  # the warm-up must not change the gradient
        return self._graphs.capture(lambda: work(micro), inputs)
