"""Differences between the tensors of a checkpoint's files and those of the modules: names, split experts, orientation.

transformers converts both ways, by a list on the model. Used where files are loaded (`load.py`) and where a server
receives weights (`served_weights.py`).
"""

from __future__ import annotations

from typing import Any

from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, Transpose

from shoal.core.errors import ModelError


def is_converted(model: Any) -> bool:
    """Whether `save_pretrained` writes other tensors than the module's."""
    return bool(_conversions(model))


def keep_published_orientation(model: Any) -> None:
    """Let `save_pretrained` write matrices in the orientation of published checkpoints, the only one that vLLM reads.

    transformers compares shapes, so it reads both orientations and always writes its own (Qwen3-VL-MoE).
    """
    conversions = _conversions(model)
    either = [
        (operations, index)
        for conversion in conversions
        for operations in [getattr(conversion, "operations", [])]
        for index, operation in enumerate(operations)
        if isinstance(operation, Transpose) and getattr(operation, "check_dims", False)
    ]
    if not either:
        return
    for name, parameter in model.named_parameters():
        if ".experts." in name and parameter.ndim == 3 and parameter.shape[1] == parameter.shape[2]:
            raise ModelError(
                f"{name} is a square matrix, so its orientation in the files cannot be determined; the model is refused"
            )
    for operations, index in either:
        operations[index] = Transpose(operations[index].dim0, operations[index].dim1)
    model._weight_conversions = conversions  # a model that was not loaded from files has none of its own


def _conversions(model: Any) -> list[Any]:
    """Of the files from which the model was loaded, or those that `save_pretrained` applies to other models."""
    found = getattr(model, "_weight_conversions", None)
    if found is not None:
        return found
    return [x for x in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(x, PrefixChange)]
