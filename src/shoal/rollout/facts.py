"""What a run needs of a server, what the server says of itself, and the comparison of the two before step 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ConfigError
from shoal.observability.manifest import describe

TIED_ON_CPU = (
    "infer.engine: vLLM on a CPU does not renew the output layer of a model with tied embeddings when weights are "
    "reloaded, so training would go wrong; use train.lora=true, an untied model, a GPU, or infer.engine embedded"
)


@dataclass(frozen=True)
class RemoteSettings:
    """What an engine must know of the run to ask a server for what the embedded engine would draw."""

    url: str
    model: str  # folder or hub id that the server must serve
    context_tokens: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    detokenize: Callable[[list[int]], str]
    scratch: Path  # a folder the server can read too
    api_key: str | None = None
    timeout_s: float = 600.0  # one request
    start_s: float = 300.0  # until the server answers
    return_s: float = 570.0  # until one that went away is back
    lora_rank: int | None = None  # None = full weights
    noise_seed: int = 0
    log: Path | None = None  # where the server's own words are
    whereabouts: Callable[[], tuple[str, str] | None] = lambda: None  # what is known of it while nothing answers
    trouble: Callable[[], str | None] = lambda: None  # what it cannot say itself, where somebody else sees it


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself."""

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
            f"train.lora: the {name} server at {settings.url} takes no adapters; start it with --enable-lora "
            f"--max-lora-rank {settings.lora_rank}, or set train.lora=false"
        )
    if settings.lora_rank > facts.max_lora_rank:
        raise ConfigError(
            f"train.lora_rank: {settings.lora_rank} is more than the {name} server takes ({facts.max_lora_rank}); "
            f"lower it, or start the server with --max-lora-rank {settings.lora_rank}"
        )


def _same_model(theirs: str, ours: str) -> bool:
    """A folder may be mounted elsewhere on the server's machine; then its own name must be the same."""
    a, b = Path(theirs), Path(ours).expanduser()
    return theirs == ours or a.resolve() == b.resolve() or (a.is_absolute() and not a.exists() and a.name == b.name)


def model_folder(model: str) -> Path:
    """Where the model's files are on this machine."""
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
    """The files of a version, whatever its number: a step that trained nothing publishes the same content again."""
    files = manifest.get("files") or {}
    return " ".join(f"{name}:{files[name]['digest']}" for name in sorted(files)) or str(manifest.get("hash", ""))


def own_files(model: str) -> dict[str, Any]:
    """The model a server was started with, as a manifest of version 0."""
    return {**describe(model_folder(model), 0, "full"), "own": True}
