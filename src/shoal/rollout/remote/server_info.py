"""Checks on vLLM and SGLang servers: what they serve, their completions, and the log-probs that verify new weights.

Used by engine.py and vllm_inprocess.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, EngineError
from shoal.core.types import Completion, FinishReason, Request, Span
from shoal.runs.weight_files import describe

TIED_ON_CPU = (
    "infer.engine: vLLM on a CPU does not renew the output layer of a model with tied embeddings when weights are "
    "reloaded, so it would sample with wrong weights; use train.lora=true, an untied model, a GPU, or infer.engine "
    "embedded"
)


@dataclass(frozen=True)
class RemoteSettings:
    """What an engine must know of the run to sample from a server as the embedded engine would."""

    url: str
    model: str  # folder or hub id that the server must serve
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]
    scratch: Path  # a folder the server can read too
    api_key: str | None = None
    timeout_s: float = 600.0  # for one request
    start_s: float = 300.0  # until the server responds
    return_s: float = 570.0  # until a lost server is back
    lora_rank: int | None = None  # None = full weights
    adapter_name: str = "default"  # followed by the version
    noise_seed: int = 0
    log: Path | None = None  # the log of the server
    whereabouts: Callable[[], tuple[str, str] | None] = lambda: None  # reason and remedy while it does not respond
    trouble: Callable[[], str | None] = lambda: None  # a problem that it cannot report itself


@dataclass(frozen=True)
class ServerFacts:
    """What a server reports about itself."""

    model: str
    context_tokens: int
    max_lora_rank: int | None = None
    on_cpu: bool = False


def check_facts(name: str, facts: ServerFacts, settings: RemoteSettings) -> None:
    if not _same_model(facts.model, settings.model):
        raise ConfigError(
            f"train.model: the {name} server at {settings.url} serves {facts.model}, this run trains {settings.model}; "
            "start it with the same model, or name another server in orch.client.base_url"
        )
    if facts.context_tokens < settings.context_tokens:
        raise ConfigError(
            f"infer.max_model_len: the run needs {settings.context_tokens} tokens of context and the {name} server at "
            f"{settings.url} has {facts.context_tokens}; start it with more, or lower orch.seq_len"
        )
    if settings.lora_rank is None:
        # On a CPU vLLM multiplies with a packed copy of the head, which a reload does not renew if it is tied.
        if facts.on_cpu and tied(model_folder(settings.model)):
            raise ConfigError(TIED_ON_CPU)
        return
    if facts.max_lora_rank is None:
        raise ConfigError(
            f"train.lora: the {name} server at {settings.url} has no adapters enabled; start it with --enable-lora "
            f"--max-lora-rank {settings.lora_rank}, or set train.lora=false"
        )
    if settings.lora_rank > facts.max_lora_rank:
        raise ConfigError(
            f"train.lora_rank: {settings.lora_rank} is more than the {name} server allows ({facts.max_lora_rank}); "
            f"lower it, or start the server with --max-lora-rank {settings.lora_rank}"
        )


def _same_model(theirs: str, ours: str) -> bool:
    """A folder may have another path on the server's machine; then its name must be the same."""
    a, b = Path(theirs), Path(ours).expanduser()
    return theirs == ours or a.resolve() == b.resolve() or (a.is_absolute() and not a.exists() and a.name == b.name)


def model_folder(model: str) -> Path:
    """The folder with the model's files on this machine."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, local_files_only=True))


def tied(folder: Path) -> bool:
    """Whether the model's output layer is its embedding."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("tie_word_embeddings", False))


def content_of(manifest: Mapping[str, Any]) -> str:
    """Identifies the files of a version without its number: a step that trained nothing publishes the same files."""
    files = manifest.get("files") or {}
    return " ".join(f"{name}:{files[name]['digest']}" for name in sorted(files)) or str(manifest.get("hash", ""))


def startup_manifest(model: str) -> dict[str, Any]:
    """The model a server was started with, as a manifest of version 0."""
    return {**describe(model_folder(model), 0, "full"), "own": True}


# Raised when an answer does not have the expected structure.
UNREADABLE = (KeyError, IndexError, TypeError, ValueError, AttributeError)


@dataclass(frozen=True)
class ParsedAnswer:
    """A completion as the server returned it. `versions` is [(start, end, name)], empty if not reported."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    versions: list[tuple[int, int, str]] = field(default_factory=list)


@dataclass(frozen=True)
class CompletionReader:
    """Turns answers into checked completions, with text decoded from the ids."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]

    def check(self, request: Request) -> None:
        """Reject prompt ids outside the vocabulary, which not every server does."""
        ids = request.prompt_ids
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise EngineError(f"{request.request_id}: token ids must be from 0 to {self.vocab_size - 1}")

    def ends(self, request: Request) -> list[int]:
        return sorted({*self.eos_token_ids, *request.sampling.stop_token_ids})

    def completion(self, request: Request, answer: ParsedAnswer, version: int, by: str) -> Completion:
        """`version` applies to tokens without a version in the answer; `by` names the server in messages."""
        name, sampling, ids = request.request_id, request.sampling, answer.token_ids
        problem = self._problem(request, answer)
        if problem is not None:
            raise EngineError(f"{by} answered {name} wrongly: {problem}")
        text = self.detokenize(ids)
        if answer.finish_reason == "stop":
            text = text[: min((text.find(stop) for stop in sampling.stop if stop in text), default=len(text))]
        kept = None
        if sampling.min_tokens > 0 and not sampling.truncated:
            banned = [~i for i in self.ends(request)]
            kept = [banned if i < sampling.min_tokens else [] for i in range(len(ids))]
        reason: FinishReason = answer.finish_reason  # type: ignore[assignment]
        logprobs = [min(0.0, float(value)) for value in answer.logprobs]
        return Completion(name, ids, logprobs, _spans(answer, version), reason, text, kept)

    def _problem(self, request: Request, answer: ParsedAnswer) -> str | None:
        ids, values = answer.token_ids, answer.logprobs
        if answer.finish_reason not in ("stop", "length", "abort"):
            return f"finish_reason is {answer.finish_reason!r}"
        if not all(type(i) is int and 0 <= i < self.vocab_size for i in ids):
            return f"a token id is not one of 0 to {self.vocab_size - 1}"
        if len(values) != len(ids):
            return f"{len(ids)} tokens but {len(values)} log-probs"
        if not all(isinstance(value, int | float) and math.isfinite(value) and value < 1e-4 for value in values):
            return "a log-prob is positive or not finite"
        if len(ids) > request.sampling.max_tokens:
            return f"{len(ids)} tokens, {request.sampling.max_tokens} were requested"
        edges = [0, *(edge for start, end, _ in answer.versions if start != end for edge in (start, end)), len(ids)]
        if len(edges) > 2 and (edges[::2] != edges[1::2] or edges != sorted(edges)):
            return f"its versions do not cover {len(ids)} tokens"
        return None


def _spans(answer: ParsedAnswer, version: int) -> list[Span]:
    count = len(answer.token_ids)
    named = [(start, end, name) for start, end, name in answer.versions if end > start]
    if not named:
        return [Span(0, count, version)] if count else []
    return [Span(start, end, int(name) if name.isdigit() else version) for start, end, name in named]


PROBE_TOKENS = 16
# Other requests in the batch change the rounding: in bf16 by up to this much, and other weights change it by more.
TOLERANCE = 0.1
# In bf16 a small update may leave all probed log-probs unchanged once; a broken transfer leaves them unchanged always.
MAX_UNCHANGED = 2


class Probes:
    """The log-probs after a fixed prompt for the last two weight versions."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: dict[str, list[float]] = {}  # content of the weights → log-probs
        self._last: tuple[str, list[float]] | None = None
        self._unchanged = 0

    def judge(self, content: str, values: Sequence[float], version: int) -> None:
        """Raise if equal content gives other log-probs than before, or if new content repeatedly changes nothing."""
        numbers = [float(value) for value in values]
        known = self._seen.get(content)
        if known is not None:
            apart = max((abs(a - b) for a, b in zip(known, numbers, strict=True)), default=0.0)
            if apart > TOLERANCE:
                raise EngineError(
                    f"{self._name} loaded weights it has served before as version {version}, but log-probs after a "
                    f"fixed prompt differ by {apart:.3g}: it does not serve the weights it loaded"
                )
        elif self._last is not None and self._last[1] == numbers:
            self._unchanged += 1
        else:
            self._unchanged = 0
        if self._unchanged >= MAX_UNCHANGED:
            raise EngineError(
                f"{self._name} loaded {MAX_UNCHANGED} new weight versions (the last is {version}) and the log-probs "
                "after a fixed prompt have not moved: it does not serve the weights it loaded"
            )
        self._last = (content, numbers)
        self._seen[content] = numbers
        while len(self._seen) > 2:
            self._seen.pop(next(iter(self._seen)))
