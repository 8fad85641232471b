"""The embedded engine: schedule, run, sample, retire.

Synchronous and single-threaded; driven by `rollout/embedded.py`. On a CPU, results depend only on the request (tokens,
sampling parameters, seed) and the weights: batches are padded so that a row rounds the same whatever else is in the
batch. A GPU chooses kernels by batch size, so its rounding depends on it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import NonFiniteError, RequestError
from shoal.core.types import Completion, FinishReason, Request
from shoal.engine.decode import make_fused, make_plain, why_no_graphs
from shoal.engine.decode_graphs import MANY_ROWS, WINDOW, CaptureError, DecodeBucket, DecodeGraphs, Window
from shoal.engine.kv_cache import SlotCache
from shoal.engine.prefill import Prefill
from shoal.engine.sampler import MAX_ENDS, SamplingState, draw
from shoal.engine.scheduler import Scheduler, StopChecker
from shoal.engine.scheduler import Sequence as Running
from shoal.models.attention import KEY_MULTIPLE, ROW_MULTIPLE, Decode, round_up
from shoal.models.decoder import LayerShape
from shoal.models.sampler_view import SamplerView

log = logging.getLogger(__name__)
EAGER = "eager"  # without CUDA graphs


@dataclass(frozen=True)
class EngineSettings:
    slots: int = 64
    context_tokens: int = 2048  # prompt and completion together
    prefill_tokens: int = 8192  # most prompt tokens of one prefill
    eos_token_ids: tuple[int, ...] = ()
    graphs: bool = True  # decode with CUDA graphs where supported
    fused: bool = True  # use the fused path where supported

    def __post_init__(self) -> None:
        if self.slots % ROW_MULTIPLE:  # a smaller batch would round differently
            raise ValueError(f"slots must be a multiple of {ROW_MULTIPLE}, not {self.slots}")


@dataclass(frozen=True)
class _LaunchedWindow:
    """A launched window of decode steps: its sequences, their rows, and the weight version."""

    sequences: Sequence[Running]
    rows: Sequence[int]  # one per sequence
    steps: int
    version: int


class EmbeddedEngine:
    """`detokenize` converts ids to text without special tokens, for stop strings and `Completion.text`."""

    def __init__(
        self,
        view: SamplerView,
        layers: dict[int, LayerShape],
        settings: EngineSettings,
        detokenize: Callable[[list[int]], str],
    ) -> None:
        self.view = view
        self.settings = settings
        self.detokenize = detokenize
        self.layers = layers
        self.path = EAGER  # description of the decode path, for logs
        decoder = view.decoder
        self.device = decoder.device
        decoder.check_length(settings.context_tokens)
        length = round_up(settings.context_tokens, KEY_MULTIPLE)
        self.cache = SlotCache(layers, settings.slots, length, decoder.dtype, self.device)
        self.scheduler = Scheduler(settings.slots, settings.prefill_tokens)
        self.sampling = SamplingState.allocate(settings.slots, self.device)
        self._last = np.zeros(settings.slots, dtype=np.int64)
        self._endings = StopChecker(settings.eos_token_ids, detokenize)
        self._vocab_size = decoder.vocab_size
        self._end_ids = np.array(sorted(settings.eos_token_ids), dtype=np.int64)
        self._graphs = self._make_graphs()
        self._prompts = Prefill(view, self.cache, self._graphs is not None and self._graphs.fused)
        self._launched: deque[_LaunchedWindow] = deque()
        self._served: int | None = None  # the version of the adapter copies in the graphs
        self._plain = make_plain(decoder, layers, self.cache) if settings.fused else None
        self.generated_tokens = 0

    def _make_graphs(self) -> DecodeGraphs | None:
        """CUDA graphs if the kernels support this model, on the fused path if it passes the parity check."""
        decoder = self.view.decoder
        reason = why_no_graphs(decoder, self.cache) if self.settings.graphs else "CUDA graphs are disabled"
        if reason is not None:
            if decoder.device.type != "cpu":  # eager is the only path on a CPU
                self.path = f"{EAGER}: {reason}"
            return None
        fused, why = make_fused(decoder, self.layers, self.cache) if self.settings.fused else (None, "disabled")
        self.path = f"CUDA graphs, {'' if fused is not None else 'model modules: '}{why}"
        return DecodeGraphs(self.view, self.cache, self.sampling, self.settings.eos_token_ids, fused)

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def check(self, request: Request) -> None:
        """Reject requests that would raise an error on the device and so fail every running request."""
        self.check_ids(request.request_id, request.prompt_ids)
        if request.sampling.min_tokens and len(self._endings.of(request.sampling)) > MAX_ENDS:
            raise RequestError(f"{request.request_id}: with min_tokens, at most {MAX_ENDS} stop ids are supported")

    def check_ids(self, name: str, ids: Sequence[int]) -> None:
        if ids and not 0 <= min(ids) <= max(ids) < self._vocab_size:
            raise RequestError(f"{name}: token ids must be from 0 to {self._vocab_size - 1}")

    def add(self, request: Request) -> Completion | None:
        """Queue a request. Without room for a token, returns an empty completion with the finish reason `length`."""
        room = self.settings.context_tokens - len(request.prompt_ids)
        limit = min(request.sampling.max_tokens, room)
        if not request.prompt_ids or limit < 1:
            return Completion(request.request_id, [], [], [], "length")
        narrowed = request.sampling.truncated or request.sampling.min_tokens > 0
        self.scheduler.waiting.append(Running(request, limit, kept_ids=[] if narrowed else None))
        return None

    def cancel(self, request_ids: Set[str]) -> None:
        """Drop requests and free their slots. Unknown ids are ignored, since a request may have just finished."""
        self.scheduler.drop(request_ids)
        if not self.scheduler.running:
            self._forget_launches()

    def abort(self) -> list[Completion]:
        """Drop all requests; returns their tokens so far with the finish reason `abort`."""
        dropped = [*self.scheduler.running.values(), *self.scheduler.waiting]
        self.scheduler.running.clear()
        self.scheduler.waiting.clear()
        self._forget_launches()
        return [s.completion("abort", self.detokenize(s.token_ids)) for s in dropped]

    @torch.no_grad()
    def step(self) -> list[Completion]:
        """Admit waiting requests, then draw one token per running sequence; returns finished completions."""
        with self.view.active():
            finished = []
            self._follow_weights()
            admitted = self.scheduler.admit()
            if admitted:
                finished += self._prefill(admitted)
            if self.scheduler.running:
                finished += self._decode()
            if not self.scheduler.running:
                self._forget_launches()
        self._compact()
        return finished

    def _compact(self) -> None:
        """Move sequences into lower slots so that the batch fits into a smaller bucket."""
        moves = self.scheduler.compaction()
        if not moves:
            return
        sources, targets = np.array(moves).T
        longest = max(s.length + s.in_flight for s in (self.scheduler.running[t] for _, t in moves))
        at = self._tensor(sources), self._tensor(targets)
        self.cache.move(*at, min(longest, self.cache.length))
        self.sampling.move(*at)
        self._last[targets] = self._last[sources]
        if self._graphs is not None:
            self._graphs.move(*at)

    def _follow_weights(self) -> None:
        """Refresh adapter copies: weights may change when a version is published, or while nothing runs."""
        if self._graphs is not None and (not self.scheduler.running or self._served != self.view.version):
            self._graphs.follow_weights()
            self._served = self.view.version

    def _prefill(self, admitted: Sequence[Running]) -> list[Completion]:
        """Write the prompts' keys and values into all slots that need them, and draw first tokens."""
        hidden = self._prompts.run(admitted)
        self._set_sampling(admitted)
        logits = self.view.decoder.logits(hidden)[: len(admitted)]
        if self._graphs is None:
            return self._draw(admitted, logits)
        self._begin(self._graphs, admitted, logits)
        return []

    def _begin(self, graphs: DecodeGraphs, admitted: Sequence[Running], logits: Tensor) -> None:
        """Draw first tokens without reading them on the host, so nothing here waits for the device."""
        slots, positions, limits = np.array([(s.slot, s.length, s.limit) for s in admitted]).T
        rows = self._tensor(slots)
        drawn = graphs.draw(logits, rows, torch.zeros_like(rows), any(s.kept_ids is not None for s in admitted))
        graphs.begin(slots, positions, limits, drawn)
        self._note_launch(admitted, range(len(admitted)), 1)

    def _decode(self) -> list[Completion]:
        """One token per running sequence, or a window of tokens with CUDA graphs."""
        if self._graphs is not None:
            return self._decode_window(self._graphs)
        rows = self.scheduler.rows
        running = sorted(self.scheduler.running.values(), key=lambda s: s.slot)
        slots = np.array([s.slot for s in running])
        positions = np.zeros(rows, dtype=np.int64)
        positions[slots] = [s.length - 1 for s in running]
        context = Decode(self.cache, self._tensor(positions), round_up(int(positions.max()) + 1, KEY_MULTIPLE))
        tokens = self._tensor(self._last[:rows])
        if self._plain is not None:
            hidden = self._plain.step(tokens, context)
        else:
            hidden = self.view.decoder.hidden(tokens[:, None], context.positions[:, None], context)[:, 0]
        logits = self.view.decoder.logits(hidden)
        return self._draw(running, logits if len(running) == rows else logits[self._tensor(slots)])

    def _decode_window(self, graphs: DecodeGraphs) -> list[Completion]:
        """Launch the next window, then read all older ones, so the device never waits for the host."""
        ahead, finished = 0, []
        try:
            ahead = int(self._launch(graphs))
        except CaptureError as error:
            self._leave_graphs(str(error))
        while len(self._launched) > ahead:
            finished += self._collect(self._launched.popleft(), graphs.collect())
        return finished

    def _leave_graphs(self, reason: str) -> None:
        """Decode eagerly from now on. Windows in flight are still collected."""
        log.warning("decoding without CUDA graphs: %s", reason)
        self.path = f"{EAGER}: {reason}"
        self._graphs = None
        self._prompts = Prefill(self.view, self.cache, False)

    def _collect(self, launched: _LaunchedWindow, window: Window) -> list[Completion]:
        sequences = [s for s in launched.sequences if not s.finished]
        rows = [row for s, row in zip(launched.sequences, launched.rows, strict=True) if not s.finished]
        for sequence, row in zip(sequences, rows, strict=True):
            sequence.in_flight -= launched.steps
            if sequence.kept_ids is not None:
                assert window.kept is not None
                self._keep_window(sequence, window.kept[:, row])
        return self._retire(sequences, window.ids[:, rows], window.logprobs[:, rows], launched.version)

    def _forget_launches(self) -> None:
        """Drop windows in flight."""
        self._launched.clear()
        if self._graphs is not None:
            self._graphs.clear()

    def _launch(self, graphs: DecodeGraphs) -> bool:
        """Launch a window if any sequence may still draw a token; returns whether one was launched."""
        sequences, rows = list(self.scheduler.running.values()), self.scheduler.rows
        window = WINDOW if rows < MANY_ROWS else WINDOW // 2
        steps = min(window, max((s.limit - len(s.token_ids) - s.in_flight for s in sequences), default=0))
        if steps < 1:
            return False
        keys = max(s.length + s.in_flight for s in sequences) + steps
        extent = DecodeBucket.covering(rows, keys, self.cache.length)
        graphs.launch(extent, steps, any(s.kept_ids is not None for s in sequences))
        self._note_launch(sequences, [s.slot for s in sequences], steps)
        return True

    def _note_launch(self, sequences: Sequence[Running], rows: Sequence[int], steps: int) -> None:
        for sequence in sequences:
            sequence.in_flight += steps
        self._launched.append(_LaunchedWindow(sequences, rows, steps, self.view.version))

    def _draw(self, sequences: Sequence[Running], logits: Tensor) -> list[Completion]:
        """`logits` has one row per sequence, in the same order."""
        slots = [s.slot for s in sequences]
        whole = slots[-1] == len(slots) - 1 and slots[0] == 0  # slots are sorted, so none is missing
        state = self.sampling[slice(len(slots))] if whole else self.sampling[self._tensor(np.array(slots))]
        counts = self._tensor(np.array([len(s.token_ids) for s in sequences], dtype=np.int64))
        truncated = any(s.request.sampling.truncated for s in sequences)
        early = any(len(s.token_ids) < s.request.sampling.min_tokens for s in sequences)
        banned = state.banned(counts, logits.shape[1]) if early else None
        drawn = draw(logits, state, counts, banned, truncated)
        self._keep(sequences, drawn.kept)
        ids, logprobs = drawn.token_ids[None].cpu().numpy(), drawn.logprobs[None].cpu().numpy()
        return self._retire(sequences, ids, logprobs, self.view.version)

    def _keep(self, sequences: Sequence[Running], kept: Tensor | None) -> None:
        """Record the ids that each next token is drawn from, if sampling is truncated."""
        rows = kept.tolist() if kept is not None else [None] * len(sequences)
        for sequence, ids in zip(sequences, rows, strict=True):
            if sequence.kept_ids is not None:
                sequence.kept_ids.append(self._endings.allowed(sequence, len(sequence.token_ids), ids))

    def _keep_window(self, sequence: Running, kept: np.ndarray) -> None:
        """The same for the steps of a window, [steps, MAX_KEPT]; steps past the end are cut in `_retire`."""
        assert sequence.kept_ids is not None
        start = len(sequence.token_ids)
        sequence.kept_ids += [self._endings.allowed(sequence, start + i, ids) for i, ids in enumerate(kept.tolist())]

    def _retire(
        self, sequences: Sequence[Running], ids: np.ndarray, logprobs: np.ndarray, version: int
    ) -> list[Completion]:
        """Append the drawn tokens, [steps, sequences], up to each sequence's end; later tokens are dropped."""
        steps = len(ids)
        if not np.isfinite(logprobs).all():
            raise NonFiniteError(
                f"log-probs of version {version} are not finite: its weights contain NaN or overflow; "
                "lower train.learning_rate and resume from the last checkpoint"
            )
        ends = (ids[..., None] == self._end_ids).any(-1)
        first_end = np.where(ends.any(0), ends.argmax(0) + 1, steps + 1).tolist()
        if sequences:
            self._last[[s.slot for s in sequences]] = ids[-1]
        finished = []
        # One flat list instead of a list per sequence: thousands of new objects per window would trigger full passes of
        # Python's garbage collector, during which the device idles.
        token_ids, values = ids.T.ravel().tolist(), logprobs.T.ravel().tolist()
        for at, sequence, end in zip(range(0, len(token_ids), steps), sequences, first_end, strict=True):
            taken = min(steps, end, sequence.limit - len(sequence.token_ids))
            if sequence.stops:
                taken = self._endings.taken(sequence, token_ids[at : at + taken])
            sequence.extend(token_ids[at : at + taken], values[at : at + taken], version)
            self.generated_tokens += taken
            if sequence.kept_ids is not None:
                del sequence.kept_ids[len(sequence.token_ids) :]
            if end <= taken or sequence.stopped:
                finished.append(self._finish(sequence, "stop"))
            elif len(sequence.token_ids) >= sequence.limit:
                finished.append(self._finish(sequence, "length"))
        return finished

    def _finish(self, sequence: Running, reason: FinishReason) -> Completion:
        self.scheduler.retire(sequence)
        text = self.detokenize(sequence.token_ids) if sequence.text is None else sequence.text
        return sequence.completion(reason, text)

    def _set_sampling(self, admitted: Sequence[Running]) -> None:
        params = [s.request.sampling for s in admitted]
        ends = None
        if any(p.min_tokens for p in params):
            ends = self._tensor(np.array([(self._endings.of(p) + [-1] * MAX_ENDS)[:MAX_ENDS] for p in params]))
        integers = self._tensor(np.array([(p.seed, p.top_k, p.min_tokens) for p in params], dtype=np.int64).T)
        numbers = np.array([(p.temperature, p.top_p, p.min_p) for p in params], dtype=np.float32).T
        slots = self._tensor(np.array([s.slot for s in admitted]))
        self.sampling.put(slots, integers, self._tensor(numbers, torch.float32), ends)

    def _tensor(self, array: np.ndarray, dtype: torch.dtype = torch.long) -> Tensor:
        """Copy to the device without waiting for it, through pinned memory on a GPU."""
        host = torch.as_tensor(np.ascontiguousarray(array), dtype=dtype)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)
