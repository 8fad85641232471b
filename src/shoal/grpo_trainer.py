"""`GRPOTrainer`: the loop for scripts. Arguments are translated onto the schema; training is shoal.api.

Objects that a configuration cannot name (a model, items, reward functions) are handed to the build beside it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shoal import api, build
from shoal.config.base import IN_MEMORY
from shoal.config.infer import InferConfig
from shoal.config.orch import EnvConfig, EvalConfig
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.envs.items import ItemEnvironment, ItemError, Items, judges_itself
from shoal.envs.user_code import load_object
from shoal.errors import ArgumentError
from shoal.observability.run_dir import is_used, read_metrics
from shoal.orchestrator.signals import outside_event_loop
from shoal.rewards.functions import RewardFunctions
from shoal.surfaces.table import unknown_argument
from shoal.surfaces.trainer import DEFAULT_STEPS, LABEL, from_trl, translate
from shoal.surfaces.trainer_kinds import check_kinds
from shoal.surfaces.uncaught import one_line_if_uncaught

RewardFunction = Callable[..., Any] | str
TEST = "test"


class GRPOTrainer:
    """Train a model with GRPO: `GRPOTrainer(model, dataset, reward).train()`.

    `train_dataset` holds items: objects with `prompt` and `get_reward(completion)`, or rows (dictionaries, a
    `datasets.Dataset`) with a `prompt` column that `reward_funcs` judge. docs/grpo-trainer.md explains every argument.
    """

    def __init__(
        self,
        model: Any,
        train_dataset: Items,
        reward_funcs: RewardFunction | Sequence[RewardFunction] | None = None,
        eval_dataset: Items | None = None,
        eval_steps: int | None = None,
        *,
        num_steps: int = DEFAULT_STEPS,
        num_epochs: int | None = None,
        group_size: int = 4,
        batch_size: int = 1,
        ppo_steps: int = 1,
        clip_eps: float = 0.2,
        kl_penalty: float = 0.0,
        sampling_temperature: float = 0.7,
        max_new_tokens: int = 256,
        max_seq_len: int = 2048,
        generation_args: Mapping[str, Any] | None = None,
        optimizer: Any = "AdamW",
        optimizer_args: Mapping[str, Any] | None = None,
        lr_scheduler: str | Mapping[str, Any] | None = None,
        max_grad_norm: float = 1.0,
        output_dir: str | Path = "./outputs",
        saving_steps: int | None = None,
        logging_steps: int = 1,
        seed: int = 0,
        log_completions: bool | int = False,
        enable_wandb: bool = False,
        wandb_project: str | None = None,
        use_accelerate: bool = False,
        use_vllm: bool = False,
        vllm_args: Mapping[str, Any] | None = None,
        vllm_enable_sleep: bool = False,
        lora: bool = False,
        lora_rank: int = 16,
        lora_alpha: int = 32,
        lora_dropout: float = 0.0,
        lora_target_modules: Sequence[str] | None = None,
        adapter_path: str | Path | None = None,
        resume_from_checkpoint: bool | str | None = None,
        reward_weights: Sequence[float] | None = None,
        tokenizer: Any = None,
        device: str = "auto",
        overrides: Sequence[str] = (),
        **unknown: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        with one_line_if_uncaught():
            self._set_up(arguments, unknown)

    def _set_up(self, arguments: dict[str, Any], unknown: Mapping[str, Any]) -> None:
        if unknown:
            _refuse_unknown(next(iter(unknown)), list(arguments))
        for name in ("model", "output_dir", "adapter_path"):
            if isinstance(arguments[name], Path):
                arguments[name] = str(arguments[name])
        check_kinds(arguments)
        model, train_dataset, eval_dataset = (arguments[n] for n in ("model", "train_dataset", "eval_dataset"))
        self._processes = _processes(arguments["use_accelerate"])
        translation = translate(arguments, self._processes)
        _check_vllm(arguments["use_vllm"])
        self._rewards = _rewards(arguments["reward_funcs"], arguments["reward_weights"], train_dataset)
        self._eval_dataset = eval_dataset
        self._wording = translation.in_their_words
        self.config, self.notices = translation.config(_with_precision(arguments["overrides"], model))
        if eval_dataset is not None and arguments["eval_steps"] is None:
            self.notices.append("eval_dataset: is only used by test() unless eval_steps says how often to evaluate")
        if arguments["use_accelerate"] and self._processes == 1 and _launched_without_gpu():
            self.notices.append("use_accelerate: one process was started; without GPUs, several take --multi_gpu too")
        held_out = eval_dataset if eval_dataset is not None else ()
        with _about("GRPOTrainer", train="train_dataset", eval="eval_dataset"):
            environment = ItemEnvironment(train_dataset, held_out, LABEL, self._rewards)
        self._given = build.Given(
            environments={LABEL: environment},
            model=None if isinstance(model, str) else model,
            tokenizer=_tokenizer(model, arguments["tokenizer"]),
            processes=self._processes,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    @property
    def output_dir(self) -> Path:
        """The run directory: metrics, rollouts, checkpoints, report.html, and the trained weights in final/."""
        return Path(self.config.train.output_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary a step, as in metrics.jsonl."""
        return read_metrics(self.output_dir) if is_used(self.output_dir) else []

    def train(self) -> Path:
        """Train to the end and return the run directory."""
        with one_line_if_uncaught(self._wording):
            return self._train()

    def _train(self) -> Path:
        resume = self.config.train.resume_from_checkpoint
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise ArgumentError(f"GRPOTrainer: output_dir: {str(self.output_dir)!r} is a file; name a folder")
        if is_used(self.output_dir) and not resume and _is_main():
            raise ArgumentError(
                f"GRPOTrainer: output_dir: {str(self.output_dir)!r} already holds a run; continue it with "
                "resume_from_checkpoint=True, or choose another folder"
            )
        again = f"python {sys.argv[0] or 'your script'}, with GRPOTrainer(resume_from_checkpoint=True)"
        given, notices = self._given, self.notices
        return outside_event_loop(
            lambda: api.train(
                self.config, resume=resume, notices=notices, given=given, next_command=again, wording=self._wording
            )
        )

    def test(self, dataset: Items | None = None) -> dict[str, float]:
        """Rewards on `dataset`, or on eval_dataset, with the trained weights; before training, with those of the start.

        Under several processes the main one does it, and the others get an empty dictionary at once.
        """
        with one_line_if_uncaught(self._wording):
            return self._test(dataset if dataset is not None else self._eval_dataset)

    def _test(self, items: Items | None) -> dict[str, float]:
        if items is None or len(items) == 0:
            raise ArgumentError(
                "GRPOTrainer.test: dataset: there is nothing to test on; give items, or an eval_dataset"
            )
        if not _is_main():
            return {}
        with _about("GRPOTrainer.test", train="dataset", eval="dataset"):
            environment = ItemEnvironment(items, items, TEST, self._rewards)
        given = build.Given(
            environments={TEST: environment},
            model=None if self._finished and not self.config.train.lora else self._given.model,
            tokenizer=self._given.tokenizer,
        )
        found = outside_event_loop(lambda: api.evaluate_config(self._test_config(len(items)), given))
        return {name.removeprefix(f"eval/{TEST}/"): value for name, value in found.items()}

    @property
    def _finished(self) -> bool:
        return (self.output_dir / "final").is_dir()

    def _test_config(self, count: int) -> RunConfig:
        train, orch = self.config.train, self.config.orch
        weights: dict[str, Any] = {}
        if self._finished:
            key = "adapter_path" if train.lora else "model"
            weights = {key: str(self.output_dir / "final"), "reference": "none"}
        train = train.model_copy(update=weights)
        env = [EnvConfig(id=IN_MEMORY, name=TEST)]
        orch = orch.model_copy(update={"env": env, "eval": EvalConfig(num_examples=count), "model": type(orch.model)()})
        # Tested with the trained weights as they are, whatever sampled in training.
        infer = InferConfig(max_model_len=self.config.infer.max_model_len)
        return resolve_run(RunConfig.model_construct(train=train, infer=infer, orch=orch))


@contextmanager
def _about(surface: str, **arguments: str) -> Iterator[None]:
    """What is wrong with an item is told with the argument it came in; `arguments` has it for each split."""
    try:
        yield
    except ItemError as error:
        raise ArgumentError(f"{surface}: {arguments[error.split]}: {error.what}") from error


def _refuse_unknown(name: str, known: Sequence[str]) -> None:
    if name == "args":
        raise ArgumentError(
            "GRPOTrainer: args: there is no second object with settings; docs/coming-from.md has the argument for "
            "every field of TRL's GRPOConfig"
        )
    if here := from_trl(name):
        raise ArgumentError(f"GRPOTrainer: {name}: is not an argument; {here}")
    raise unknown_argument("GRPOTrainer", name, known)


def _processes(use_accelerate: bool) -> int:
    """How many processes a launcher started, which must be what the script expects."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not use_accelerate:
        raise ArgumentError(
            f"GRPOTrainer: use_accelerate: {world} processes were started, and without use_accelerate=True each would "
            "train a model of its own; set it, or start the script with python"
        )
    return world if use_accelerate else 1


def _launched_without_gpu() -> bool:
    """accelerate leaves --num_processes aside on a machine without GPUs, unless it is told --multi_gpu as well."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return False
    import torch

    return not torch.cuda.is_available()


def _is_main() -> bool:
    return int(os.environ.get("RANK", "0")) == 0


def _check_vllm(use_vllm: bool) -> None:
    if use_vllm and importlib.util.find_spec("vllm") is None:
        raise ArgumentError(
            "GRPOTrainer: use_vllm: the package vllm is not installed; on Linux with CUDA `pip install vllm`, or leave "
            "use_vllm out: the embedded engine generates with the trainer's own weights"
        )


def _rewards(functions: Any, weights: Sequence[float] | None, items: Items) -> RewardFunctions | None:
    if functions is None:
        if weights is not None:
            raise ArgumentError("GRPOTrainer: reward_weights: is not used without reward_funcs; leave it out")
        if len(items) and not judges_itself(items[0]):
            raise ArgumentError(
                f"GRPOTrainer: reward_funcs: the items of train_dataset ({type(items[0]).__name__}) have no "
                "get_reward(completion); give them one, or pass a reward function"
            )
        return None
    if len(items) and judges_itself(items[0]):
        raise ArgumentError(
            "GRPOTrainer: reward_funcs: the items of train_dataset have get_reward themselves; keep one"
        )
    many = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    return RewardFunctions([load_object(f) if isinstance(f, str) else f for f in many], weights)


def _with_precision(overrides: Sequence[str], model: Any) -> list[str]:
    """A model object keeps the precision it has, unless another one is asked for."""
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    recipe = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype)
    if isinstance(model, str) or any(text.startswith("train.recipe=") for text in overrides):
        return list(overrides)
    if recipe is None:
        raise ArgumentError(
            f"GRPOTrainer: model: {type(model).__name__} in {dtype or 'no precision'} cannot be trained; load it in "
            "float32 or bfloat16, or give its name"
        )
    return [f"train.recipe={recipe}", *overrides]


def _tokenizer(model: Any, tokenizer: Any) -> Any:
    if tokenizer is not None or isinstance(model, str):
        return tokenizer
    from shoal.models.load import load_tokenizer

    name = getattr(model, "name_or_path", "")
    if not name:
        raise ArgumentError(
            "GRPOTrainer: tokenizer: the model object does not say where it came from; give its tokenizer"
        )
    return load_tokenizer(name)
