"""Locate a model's files and load its tokenizer, without importing torch."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.config.model_names import expanded, missing_path, shape_of, similar_path
from shoal.core.errors import ModelError
from shoal.models.chat import special_tokens
from shoal.models.chat_templates import HOW, with_chat_template
from shoal.models.template_check import CONVERSATION, check_template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Environment variables read by huggingface_hub and transformers.
OFFLINE, YES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"), ("1", "ON", "YES", "TRUE")
Answer = tuple[bool, tuple[str, str] | None]  # whether the hub was reached; the problem and its fix
_ANSWERS: dict[str, tuple[float, Answer]] = {}
HUB_ANSWER_S = 5.0  # timeout of the first request; HF_HUB_ETAG_TIMEOUT takes precedence
ASKED_AGAIN_S = 30.0  # retry interval after a failed request
# Files that models and tokenizers are loaded from; other files do not affect the fingerprint.
MODEL_FILES = re.compile(
    r".*\.(safetensors|bin|gguf|jinja|model|index\.json)|(config|generation_config|adapter_config|tokenizer|"
    r"tokenizer_config|special_tokens_map|added_tokens|vocab|chat_template)\.json|(vocab|merges)\.txt"
)
MARK_BLOCKS, MARK_BLOCK_BYTES = 256, 1 << 14


@contextmanager
def torch_left_out() -> Iterator[None]:
    """Keep transformers from importing torch, which takes seconds and which tokenizers do not need."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # as if torch were not installed
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # transformers warns about it
    if "transformers" in sys.modules:  # for the schemas of tools; it remembers that torch can be imported
        from transformers.utils import is_torch_available

        is_torch_available.cache_clear()
    try:
        yield
    finally:
        sys.modules.pop("torch", None)


def load_tokenizer(name: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """`chat_template`: a built-in name or a file, instead of the template of the tokenizer."""
    tokenizer = _read_tokenizer(name)
    if chat_template is not None:
        tokenizer = with_chat_template(tokenizer, chat_template)
    if tokenizer.chat_template is None:
        raise ModelError(f"the tokenizer of {name!r} has no chat template, which Shoal requires; {HOW}")
    check_template(tokenizer, name)
    return tokenizer


def _read_tokenizer(name: str) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    if (shape := shape_of(name)) is not None:
        from shoal.models.random_models import shape_tokenizer

        return shape_tokenizer(shape)
    folder, gguf = locate(name)
    extra = {"gguf_file": gguf} if gguf else {}
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **extra)
    except Exception as error:  # the libraries raise various exceptions for a bad folder
        raise ModelError(f"no tokenizer could be loaded from {name!r}: {first_line(error)}") from error


def locate(name: str) -> tuple[str, str | None]:
    if (shape := shape_of(name)) is not None:
        raise ModelError(f"{name!r} has no files; write them with `shoal make-model DIR --shape {shape}`")
    path = expanded(name)
    if path.is_file() and path.suffix == ".gguf":
        return str(path.parent), path.name
    if path.is_dir():
        if not (path / "config.json").exists():
            files = sorted(path.glob("*.gguf"))
            if len(files) == 1:
                return str(path), files[0].name
            raise ModelError(f"{name!r} has no config.json and not exactly one .gguf file")
        if "auto_map" in _read_config(path / "config.json"):
            raise ModelError(f"{name!r} needs remote code (auto_map), which Shoal does not run")
        return str(path), None
    if (problem := missing_path(name)) is not None:
        raise ModelError("; ".join(problem))
    return _from_hub(name), None


def check_found(key: str, name: str) -> None:
    """Check that the model's files exist; raises ModelError that names the config key."""
    try:
        if shape_of(name) is None:
            locate(name)
    except ModelError as error:
        raise ModelError(f"{key}: {error}") from error


def files_fingerprint(name: str) -> str | None:
    """A fingerprint of a local model or adapter; None if the folder does not exist here.

    Small files are hashed in full. Large files are sampled in blocks: training, or another seed, changes every block.
    """
    path = Path(name).expanduser()
    if not path.exists():
        return None
    files = [file for file in sorted(path.iterdir()) if MODEL_FILES.fullmatch(file.name)] if path.is_dir() else [path]
    mark = hashlib.blake2b(digest_size=16)
    try:
        for file in filter(Path.is_file, files):
            size = file.stat().st_size
            mark.update(f"{file.name} {size}\n".encode())
            with file.open("rb") as content:
                for start in range(0, size, max(MARK_BLOCK_BYTES, size // MARK_BLOCKS)):
                    content.seek(start)
                    mark.update(content.read(MARK_BLOCK_BYTES))
    except OSError as error:
        raise ModelError(f"{name!r} cannot be read: {error.strerror}") from error
    return mark.hexdigest()


def _read_config(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise ModelError(f"{str(file)!r} is not a valid model config: {first_line(error)}") from error


@functools.cache
def _warn_once(text: str) -> None:
    logging.getLogger(__name__).warning(text)


def _from_hub(name: str) -> str:
    """The hub id, for the libraries to download; without a network, the folder of the cached files."""
    from huggingface_hub import try_to_load_from_cache

    fetched = try_to_load_from_cache(name, "config.json")
    variable = next((variable for variable in OFFLINE if os.environ.get(variable, "").upper() in YES), None)
    if variable is not None:
        problem = f"{variable}={os.environ[variable]} disables downloads", f"unset {variable} to download it"
    else:
        reached, problem = _ask_hub(name)
        if not reached and problem is not None and isinstance(fetched, str):
            _warn_once(f"{name}: {problem[0]}; using the cached files")
            return str(Path(fetched).parent)
    if problem is not None and not isinstance(fetched, str):
        folder = similar_path(name) or "give a local folder"
        raise ModelError(f"{name!r} is not a local folder, and {problem[0]}; {problem[1]}, or {folder}")
    return name


def _ask_hub(name: str) -> Answer:
    """Cached per process; failures are retried after ASKED_AGAIN_S."""
    asked, answer = _ANSWERS.get(name, (0.0, None))
    if answer is None or (answer[1] is not None and time.monotonic() - asked > ASKED_AGAIN_S):
        answer = _ask(name)
        _ANSWERS[name] = time.monotonic(), answer
    return answer


def _ask(name: str) -> Answer:
    """One request with a short timeout: the libraries wait for half a minute, and again for every file."""
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError

    limit_s = constants.HF_HUB_ETAG_TIMEOUT if "HF_HUB_ETAG_TIMEOUT" in os.environ else HUB_ANSWER_S
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=limit_s)
    except HfHubHTTPError as error:
        if error.response.status_code == 429 or error.response.status_code >= 500:
            return True, None  # busy: let the libraries retry
        return True, (f"the hub refused access: {first_line(error)}", "check the name and your access rights")
    except Exception as error:  # no route, unknown host, timeout: the client raises various exceptions
        what = f"it could not be downloaded from {constants.ENDPOINT}: {first_line(error)}"
        return False, (what, "connect to the network (with HF_HUB_ETAG_TIMEOUT, if it is slow)")
    return True, None


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """All ids that end an answer: the EOS ids of model and tokenizer, and the chat template's end of turn."""
    found: list[int] = []
    configs = [getattr(model, "generation_config", None), getattr(model, "config", None)] if model is not None else []
    for source in (*configs, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.extend(ids if isinstance(ids, (list, tuple)) else [ids] if ids is not None else [])
    closing = turn_end_id(tokenizer)
    if closing is not None:
        found.append(closing)
    if not found:
        raise ModelError("neither the model nor its tokenizer defines an end-of-sequence token")
    return tuple(sorted({int(i) for i in found}))


def turn_end_id(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token with which the template ends an assistant turn; often different from the declared EOS."""
    mark = "xqzx"
    messages = [CONVERSATION[0], {**CONVERSATION[1], "content": mark}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # of a tokenizer that a script made
        raise ModelError(f"the chat template of the tokenizer cannot be used: {first_line(error)}") from error
    tail = text.rsplit(mark, 1)[-1]
    ids = tokenizer.encode(tail, add_special_tokens=False) if tail else []
    return ids[0] if ids and ids[0] in special_tokens(tokenizer).values() else None
