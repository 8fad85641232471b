"""The shape of a model, from a config.json or a known name: counts of weights, keys and values, without torch.

`shoal plan` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.config.model_names import SHAPES, similar_path
from shoal.core.errors import ConfigError

# Shapes of which every layer is the same dense decoder layer with full attention.
_KINDS = {"LlamaConfig": "llama", "Qwen2Config": "qwen2", "Qwen3Config": "qwen3"}
KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    name: {"model_type": _KINDS[shape.config], **shape.arguments}
    for name, shape in SHAPES.items()
    if shape.config in _KINDS and "vocab_size" in shape.arguments
}
_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MAX_FILE_BYTES = 1_000_000
MOST = 10**9  # of any size in a config.json
_OPTIONAL = ("head_dim", "num_key_value_heads")
_ATTENTION = {"full_attention", "sliding_attention"}
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
_TIED_BY_DEFAULT = ("gemma", "cohere")  # families whose config.json may leave out tie_word_embeddings=true


@dataclass(frozen=True)
class ModelShape:
    """A decoder with gated feed-forward layers. Sizes are per layer unless the name says otherwise."""

    name: str
    layers: int
    hidden: int
    queries: int  # heads times head_dim
    keys: int  # key heads times head_dim; values have the same size
    inner: int  # feed-forward
    vocab: int
    tied: bool
    small: int = 0  # norm weights and biases of all layers
    max_positions: int | None = None

    @property
    def layer_weights(self) -> int:
        """Of the linear layers."""
        return self.hidden * (2 * self.queries + 2 * self.keys + 3 * self.inner)

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def product_weights(self) -> int:
        """Weights that a decode step multiplies with: all layers and the output head."""
        return self.layers * self.layer_weights + self.head_weights

    @property
    def parameters(self) -> int:
        embeddings = self.head_weights * (1 if self.tied else 2)
        return self.layers * self.layer_weights + embeddings + self.small

    @property
    def adapter_rank_numbers(self) -> int:
        """Parameters of adapters of rank 1 on every linear layer."""
        outputs = 2 * self.hidden + self.queries + 2 * self.keys + 2 * self.inner
        return self.layers * (self.layer_inputs + outputs)

    @property
    def layer_inputs(self) -> int:
        """Inputs of the linear layers of one layer, added up."""
        return 5 * self.hidden + self.queries + self.inner

    @property
    def key_value_bytes(self) -> int:
        """Keys and values of one token, all layers, in 16 bits."""
        return 2 * 2 * self.layers * self.keys


def read_shape(model: str, argument: str = "MODEL") -> ModelShape:
    """From a known name, a folder or config.json, or a hub id in the local cache. Nothing is downloaded.

    `argument` is what messages call it.
    """
    if model in KNOWN_SHAPES:
        return shape_of(model, KNOWN_SHAPES[model], argument)
    path = Path(model).expanduser()
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        path = _cached(model) or _unknown(model, argument)
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_FILE_BYTES} bytes")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"command line: {argument}: {path} is not a readable config.json: {error}") from error
    return shape_of(model, found if isinstance(found, dict) else {}, argument)


def _cached(model: str) -> Path | None:
    if model.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(model, "config.json")
    except HFValidationError:
        return None
    return Path(found) if isinstance(found, str) else None


def _unknown(model: str, argument: str) -> Path:
    remedy = similar_path(model) or f"known shapes: {', '.join(KNOWN_SHAPES)}"
    raise ConfigError(
        f"command line: {argument}: {model!r} is not a known shape, a folder with config.json or a model in the "
        f"hub cache; {remedy}"
    )


def shape_of(name: str, config: Mapping[str, Any], argument: str = "MODEL") -> ModelShape:
    """From the keys of a config.json."""
    inner = config.get("text_config")
    config = {**config, **inner} if isinstance(inner, dict) else config
    if any(config.get(key) for key in _EXPERTS):
        raise ConfigError(
            f"command line: {argument}: {name}: mixture-of-experts models cannot be planned; use a dense model"
        )
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and (others := sorted({str(kind) for kind in kinds} - _ATTENTION)):
        raise ConfigError(f"command line: {argument}: {name}: layers of the kind {others[0]} cannot be planned")
    wrong = [key for key in _NEEDED if not _is_size(config.get(key))]
    wrong += [key for key in _OPTIONAL if config.get(key) is not None and not _is_size(config[key])]
    if wrong:
        raise ConfigError(f"command line: {argument}: {name}: config.json has no usable size for {wrong[0]}")
    heads, hidden, layers = (config[key] for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * dim, (config.get("num_key_value_heads") or heads) * dim
    kind = str(config.get("model_type", ""))
    tied = config.get("tie_word_embeddings")
    biases = queries + 2 * keys if kind == "qwen2" else 0
    head_norms = 2 * dim if kind == "qwen3" else 0
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        queries=queries,
        keys=keys,
        inner=config["intermediate_size"],
        vocab=config["vocab_size"],
        tied=kind.startswith(_TIED_BY_DEFAULT) if tied is None else bool(tied),
        small=layers * (2 * hidden + biases + head_norms) + hidden,
        max_positions=config.get("max_position_embeddings"),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST
