"""GGUF files: converted to plain weights once, and kept in the user's cache folder. Used by load.py.

Converting takes many times as long as reading the result. An entry is named by the digest of its file and the dtype. It
appears atomically, so runs may start at the same time, and it is used only if its files have the recorded digests.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from shoal.core.errors import ModelError, StorageError
from shoal.runs.checkpoints import write_folder
from shoal.runs.files import digest_files, remove_quietly, write_atomic

log = logging.getLogger(__name__)
FORMAT = 1  # of an entry
DIGESTS = "digests.json"
FREE_SHARE = 0.5  # of the free disk space: a larger model is converted at every start


def load_gguf(folder: str, file: str, dtype: torch.dtype) -> nn.Module:
    source = Path(folder) / file
    (digest,) = digest_files([source])
    kind = str(dtype).removeprefix("torch.")
    entry = cache_folder() / f"{digest}-{kind}-{FORMAT}-{transformers.__version__}"
    if (found := _read(entry, dtype)) is not None:
        found.name_or_path = found.config.name_or_path = folder
        return found
    model = _convert(folder, file, dtype)
    _keep(model, entry)
    return model


def cache_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "shoal" / "gguf"


def _convert(folder: str, file: str, dtype: torch.dtype) -> Any:
    found: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.float32, output_loading_info=True
    )
    loaded, info = found
    if missing := sorted(info["missing_keys"]):  # transformers would fill them with random numbers
        raise ModelError(f"{file} lacks {len(missing)} tensors of the model, such as {missing[0]}; is it complete?")
    return unquantised(loaded, dtype)


def unquantised(loaded: Any, dtype: torch.dtype) -> nn.Module:
    """transformers marks a dequantised model as quantised: it refuses to save it, or saves it under other names.

    Copy its weights into a model built from a config without `quantization_config`.
    """
    fields: dict[str, Any] = {k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"}
    clean = AutoModelForCausalLM.from_config(type(loaded.config)(**fields), dtype=dtype)
    clean.load_state_dict(loaded.state_dict())
    clean.name_or_path = clean.config.name_or_path = loaded.name_or_path  # adapters refer to it
    return clean


def _read(entry: Path, dtype: torch.dtype) -> Any:
    """The model of an entry; None without one. A damaged entry is removed."""
    if not entry.is_dir():
        return None
    try:
        recorded = json.loads((entry / DIGESTS).read_text("utf-8"))
        if dict(zip(recorded, digest_files(entry / name for name in recorded), strict=True)) != recorded:
            raise ValueError("its files have changed")
        return AutoModelForCausalLM.from_pretrained(entry, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # whatever is wrong with a cache, the original is there
        log.warning("the converted model %s is damaged and is converted again: %s", entry, error)
        remove_quietly(entry)
        return None


def _keep(model: Any, entry: Path) -> None:
    """Failing to keep a conversion costs time at the next start and nothing else."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
        if size > shutil.disk_usage(entry.parent).free * FREE_SHARE:
            return
        own = entry.with_name(f"{entry.name}.{os.getpid()}")  # another run may convert the same file now
        with write_folder(own) as folder:
            model.save_pretrained(folder)
            names = sorted(path.name for path in folder.iterdir())
            digests = dict(zip(names, digest_files(folder / name for name in names), strict=True))
            write_atomic(folder / DIGESTS, json.dumps(digests).encode())
        if entry.is_dir():
            remove_quietly(own)
        else:
            own.rename(entry)
    except (OSError, StorageError) as error:
        remove_quietly(entry.with_name(f"{entry.name}.{os.getpid()}"))
        if not entry.is_dir():  # another run was faster
            log.warning("the converted model is not kept in %s: %s", entry.parent, error)
