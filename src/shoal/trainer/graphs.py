"""Passes over micro-batches as CUDA graphs: a small one takes the host longer to launch than the device to run.

A pass of a size that was met a few times is captured, on inputs padded to that size, and stays so where the clock shows
that it pays. Tokens that fill up are short segments of their own, so every number is one, and no loss asks for them.
Keys that fill up belong to segments without a query, which no gradient reaches. Weights are read, and gradients are
added, in place.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.algorithms.inputs import Metrics
from shoal.models.attention import Packed
from shoal.models.capturing import capture
from shoal.models.gathered import gather
from shoal.models.upload import upload
from shoal.trainer.micro_batch import Laid, MicroBatch

log = logging.getLogger(__name__)
Work = Callable[[MicroBatch], "Passed"]
GRAPH_TOKENS = 32_768  # of one pass, filled up; larger ones keep the device busy however they are launched
MAX_GRAPHS = 48  # each holds its inputs and results; what lies between is in one pool
TIMED = 3  # passes of a size either way, before they are compared
WORTH = 0.95  # of the time launch by launch, which a graph must stay under
POOL_PASSES = 5000  # of one pool that is full, before it is begun anew with the sizes that still come
LEAST_TOKENS, LEAST_SEGMENTS, LEAST_LENGTH = 256, 64, 512
MULTIPLE = 2048


@dataclass(frozen=True)
class Passed:
    """What a pass gives, still on the device: a pair of numbers a name, then one a scored token."""

    names: tuple[str, ...]
    values: Tensor  # [2 · names + scored]; with names in fp64, which sums, counts and log-probs fit into as they are

    @staticmethod
    def of(metrics: Metrics, logprobs: Tensor) -> Passed:
        pairs = torch.stack([number.detach().double() for pair in metrics.values() for number in pair])
        return Passed(tuple(metrics), torch.cat([pairs, logprobs.detach().double()]))


@dataclass(frozen=True)
class Extent:
    """Sizes a graph is captured for, few of them, so that most are met again. All tokens may be scored."""

    tokens: int
    keys: int  # a power of two times the tokens; 0 = no segment continues another
    segments: int
    longest: tuple[int, int]  # queries and keys of one segment

    @staticmethod
    def covering(laid: Laid) -> Extent:
        bounds, *lengths = laid.context.bounds
        count = len(laid.arrays["token_ids"])
        tokens = _size(count + 1)
        longest, longest_keys = map(_length, lengths)
        segments = len(bounds["starts"]) - 1 + -(-(tokens - count) // LEAST_LENGTH)
        keys = 0
        if "keys" in bounds:
            least = len(bounds["keys"]) + tokens - count
            keys = tokens * _power(-(-least // tokens))
            segments += -(-(keys - least) // longest_keys)
        return Extent(tokens, keys, _power(max(segments, laid.sequences), LEAST_SEGMENTS), (longest, longest_keys))


def _power(count: int, least: int = 1) -> int:
    return max(least, 1 << max(count - 1, 0).bit_length())


def _length(count: int) -> int:
    """A power of four: what is only a bound may be a wide one."""
    length = LEAST_LENGTH
    while length < count:
        length *= 4
    return length


def _size(count: int) -> int:
    """The next power of two, or three quarters of it; of large ones, whose filling takes time, the next multiple."""
    if count > MULTIPLE * 4:
        return -(-count // MULTIPLE) * MULTIPLE
    power = _power(count, LEAST_TOKENS)
    return power * 3 // 4 if power > LEAST_TOKENS and count <= power * 3 // 4 else power


def sizes(most_tokens: int) -> list[int]:
    """Tokens that passes of up to so many are filled up to, the smallest first; none if nothing is captured."""
    found = [_size(1)] if most_tokens else []
    while found and found[-1] < _size(min(most_tokens + 1, GRAPH_TOKENS)):
        found.append(_size(found[-1] + 1))
    return found


def padded(laid: Laid, extent: Extent) -> dict[str, np.ndarray]:
    """All that a pass reads, in the sizes of `extent`: more segments of tokens, and scored ones under no mask."""
    bounds, _, _ = laid.context.bounds
    count = len(laid.arrays["token_ids"])
    own = np.arange(count, extent.tokens)
    anywhere = np.arange(extent.tokens)  # what is added to one place, if only zeros, is added one by one
    fills = {"position_ids": (anywhere - count) % LEAST_LENGTH, "before": anywhere, "temperatures": 1}
    arrays: dict[str, np.ndarray] = {}
    for name, given in laid.arrays.items():
        full = np.zeros(extent.tokens, given.dtype)
        full[:] = fills.get(name, 0)
        full[: len(given)] = given
        arrays[name] = full
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
    """[segments + 1]: segments of these lengths more, and then some of nothing."""
    ends = starts[-1] + np.cumsum([*lengths, *[0] * (segments + 1 - len(starts) - len(lengths))])
    return np.concatenate([starts, ends]).astype(np.int32)


def micro_batch(found: Mapping[str, Tensor], extent: Extent) -> MicroBatch:
    plan = {name: found[name] for name in ("starts", "key_starts", "keys", "copies", "copy_starts") if name in found}
    return MicroBatch.made_of(found, Packed.planned(plan, extent.longest), extent.segments)


class Span(AbstractContextManager[None]):
    """How long the device was at something, waiting for the host included. Nothing waits until it is read."""

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
class _Graph:
    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    passed: Passed

    def replay(self, arrays: Mapping[str, Tensor]) -> Passed:
        for name, tensor in arrays.items():
            self.inputs[name].copy_(tensor)
        self.graph.replay()
        # The next replay writes over what this one gave.
        return Passed(self.passed.names, self.passed.values.clone())


@dataclass
class _Size:
    """How passes of one size went: the first few launch by launch, the first few as a graph."""

    plain: list[Span] = field(default_factory=list)
    replays: list[Span] = field(default_factory=list)
    graph: _Graph | None = None
    judged: bool = False
    refused: bool = False

    @property
    def is_slower(self) -> bool:
        """Of several the fastest: the others may have compiled kernels, or waited for somebody."""
        return min(span.ms for span in self.replays) > WORTH * min(span.ms for span in self.plain)


class PassGraphs:
    """`fits` says whether the memory plan has room for a pass of so many tokens and gathered keys, where the pool of
    all graphs has so many bytes already."""

    def __init__(self, device: torch.device, span: Callable[[], Span] = Span) -> None:
        self.fits: Callable[[int, int, int], bool] = lambda tokens, keys, pool_bytes: True
        self._device = device
        self._span = span
        self._sizes: dict[Hashable, _Size] = {}
        self._passes = 0  # so far
        self._begin_pool()

    @property
    def captured(self) -> list[Hashable]:
        """Kind, extent and inputs of each graph there is."""
        return [key for key, size in self._sizes.items() if size.graph is not None]

    def run(self, kind: Hashable, laid: Laid, work: Work, plainly: Callable[[], Passed]) -> Passed:
        """What `work` gives for the rows; `plainly` does it launch by launch."""
        if laid.kept is not None or len(laid.arrays["token_ids"]) >= GRAPH_TOKENS:
            return plainly()
        extent = Extent.covering(laid)
        size = self._sizes.setdefault((kind, extent, frozenset(laid.arrays)), _Size())
        self._passes += 1
        graph = self._graph_of(size, laid, extent, work)
        if graph is None:
            with self._timed(size.plain):
                return plainly()
        with self._timed(size.replays):
            return graph.replay(upload(padded(laid, extent), self._device))

    @contextmanager
    def _timed(self, spans: list[Span]) -> Iterator[None]:
        """The first few that come to their end."""
        span = self._span() if len(spans) < TIMED else None
        with span or nullcontext():
            yield
        if span is not None:
            spans.append(span)

    def _graph_of(self, size: _Size, laid: Laid, extent: Extent, work: Work) -> _Graph | None:
        """None while there is none, if there can be none, and where it was seen not to be worth it."""
        if len(size.plain) < TIMED or size.refused:
            return None
        if size.graph is None:
            if self._has_room(extent):
                try:
                    size.graph = self._capture(padded(laid, extent), extent, work)
                except RuntimeError as error:
                    self._give_up(size, extent, error)
        elif len(size.replays) == TIMED and not size.judged:
            size.judged = True
            if size.is_slower:
                size.graph, size.refused = None, True
                if not self.captured:
                    self._begin_pool()
        return size.graph

    def _has_room(self, extent: Extent) -> bool:
        """In the plan, and among the graphs. A full pool is begun anew after a while: sizes change as answers grow."""
        if len(self.captured) < MAX_GRAPHS and self.fits(extent.tokens, extent.keys, self._pool_bytes):
            return True
        if self._passes - self._begun < POOL_PASSES or not self.fits(extent.tokens, extent.keys, 0):
            return False
        self._begin_pool()
        return True

    def _begin_pool(self) -> None:
        """Without graphs: only all together give their memory back, and a pool that lost its last takes no other."""
        for size in self._sizes.values():
            size.graph = None
        self._pool: Any = None
        self._pool_bytes, self._begun = 0, self._passes

    def _give_up(self, size: _Size, extent: Extent, error: RuntimeError) -> None:
        """This size, where memory did not suffice; all of them, where something in the model cannot be captured."""
        size.refused = True
        what = f"passes of {extent.tokens} tokens are not captured"
        if isinstance(error, torch.OutOfMemoryError):
            self._begin_pool()  # what the capture took is nobody's else
        else:  # what was begun may not have been ended as it should be
            self.fits = lambda tokens, keys, pool_bytes: False
            what = "training passes are not captured"
        log.warning("%s: %s", what, str(error).partition("\n")[0])

    def _capture(self, arrays: dict[str, np.ndarray], extent: Extent, work: Work) -> _Graph:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        inputs = {name: tensor.clone() for name, tensor in upload(arrays, self._device).items()}
        micro = micro_batch(inputs, extent)
        inputs["weights"].zero_()  # what only compiles kernels adds nothing to the gradient
        work(micro)

        def passing() -> Passed:
            before = torch.cuda.memory_reserved(self._device)  # when all that is free was given back
            passed = work(micro)
            self._pool_bytes += torch.cuda.memory_reserved(self._device) - before
            return passed

        graph, passed = capture(passing, self._pool)
        return _Graph(graph, inputs, passed)
