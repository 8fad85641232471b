"""What kind of thing each argument of `GRPOTrainer` has to be, said in one line before anything is made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from shoal.errors import ArgumentError

ORDER = "GRPOTrainer(model, train_dataset, reward_funcs)"
MAPPINGS = ("generation_args", "optimizer_args", "vllm_args")


def check_kinds(given: Mapping[str, Any]) -> None:
    """Raises for the first argument that cannot be what it is for. Ranges are the schema's to check."""
    _check_model(given["model"])
    _check_items("train_dataset", given["train_dataset"])
    if given["eval_dataset"] is not None:
        _check_items("eval_dataset", given["eval_dataset"])
    _check_rewards(given["reward_funcs"], given["reward_weights"])
    for name in MAPPINGS:
        if given[name] is not None and not isinstance(given[name], Mapping):
            _refuse(name, f"must be a dictionary, not {_shown(given[name])}")
    betas = (given["optimizer_args"] or {}).get("betas", (0.9, 0.999))
    if not _is_list(betas):
        _refuse("optimizer_args['betas']", f"are two numbers, not {_shown(betas)}")
    if not _is_list(given["overrides"]):
        _refuse("overrides", f"must be a list such as ['train.seed=3'], not {_shown(given['overrides'])}")
    if not isinstance(given["log_completions"], bool | int):
        _refuse("log_completions", f"must be True, False or a number, not {_shown(given['log_completions'])}")


def _check_model(model: Any) -> None:
    if isinstance(model, str) or hasattr(model, "parameters"):
        return
    if callable(model) or hasattr(model, "__len__"):
        _refuse("model", f"is {_shown(model)}, not a model; the order is {ORDER}")
    _refuse("model", f"must be a folder, a hub id or a transformers model, not {_shown(model)}")


def _check_items(name: str, items: Any) -> None:
    if isinstance(items, str | bytes):
        _refuse(name, f"is text ({items!r}), not items; load them, as datasets.load_dataset({items!r}, split='train')")
    if callable(items) or hasattr(items, "parameters"):
        _refuse(name, f"is {_shown(items)}, not items; the order is {ORDER}")
    if isinstance(items, Mapping) or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        _refuse(name, f"must be a list of items or a datasets.Dataset, not {_shown(items)}")


def _check_rewards(functions: Any, weights: Any) -> None:
    if functions is not None and not callable(functions) and not isinstance(functions, str) and not _is_list(functions):
        _refuse("reward_funcs", f"must be a function, or a list of them, not {_shown(functions)}")
    for function in list(functions) if _is_list(functions) else []:
        if isinstance(function, Mapping):
            _refuse("reward_funcs", f"holds rows, not functions; the order is {ORDER}")
        if not callable(function) and not isinstance(function, str):
            _refuse("reward_funcs", f"holds {_shown(function)}, which is not a function")
    if weights is not None and not _is_list(weights):
        _refuse("reward_weights", f"must be a list of numbers, not {_shown(weights)}")


def _is_list(value: Any) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    kind = type(value).__name__
    return "a function" if kind in ("function", "builtin_function_or_method") else f"{_article(kind)} {kind}"


def _article(word: str) -> str:
    return "an" if word[:1].lower() in "aeiou" else "a"


def _refuse(name: str, what: str) -> None:
    raise ArgumentError(f"GRPOTrainer: {name}: {what}")
