"""`GRPOTrainer`: training from a Python script. Translates its arguments to the schema and calls shoal.api.

Objects that a configuration cannot name (a model, items, reward functions) are passed to the build as PythonObjects.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from shoal import api
from shoal.build.load import PythonObjects, Run
from shoal.build.ranks import is_main
from shoal.build.signals import outside_event_loop
from shoal.config.infer import InferConfig
from shoal.config.orch import EnvConfig, EvalConfig
from shoal.config.resolve import resolve_run
from shoal.config.schema import RunConfig
from shoal.core.errors import ArgumentError
from shoal.core.protocols import Environment
from shoal.core.section import IN_MEMORY
from shoal.envs.items import ItemEnvironment, ItemError, Items, judges_itself
from shoal.envs.stateful import StatefulEnvironment
from shoal.envs.user_code import load_object
from shoal.rewards.functions import RewardFunctions
from shoal.runs.run_dir import is_used, read_metrics
from shoal.surfaces import trl
from shoal.surfaces.grpo_config import GRPOConfig
from shoal.surfaces.names import Key, Translation, keys_of, one_line_if_uncaught
from shoal.surfaces.trainer import (
    COMPLETIONS_SHOWN,
    DEFAULT_STEPS,
    GENERATION_KEYS,
    LABEL,
    OPTIMIZER_KEYS,
    SCHEDULER_KEYS,
    STAND_INS,
    completions_shown,
    object_problems,
    optimizer_name,
    translate,
)

RewardFunction = Callable[..., Any] | str
TEST = "test"
NUM_PROCESSES = re.compile(r"--num[-_]processes[ =](\d+)")


class GRPOTrainer:
    """Train a model with GRPO: `GRPOTrainer(model, dataset, reward).train()`.

    The items of `train_dataset` are objects with `prompt` and `get_reward(completion)`, or rows (dictionaries, a
    `datasets.Dataset`) with a `prompt` column, which `reward_funcs` score. See docs/grpo-trainer.md.
    """

    def __init__(
        self,
        model: Annotated[
            Any, Key("train.model", "a name, or a transformers model that is trained in place", composed=True)
        ] = None,
        train_dataset: Annotated[
            Items | None,
            Key("orch.env", "items with `get_reward`, a list of rows, or a `datasets.Dataset`", composed=True),
        ] = None,
        reward_funcs: Annotated[
            RewardFunction | Sequence[RewardFunction] | None,
            Key(note="the functions run in the reward workers; the default is `get_reward` of the items"),
        ] = None,
        eval_dataset: Annotated[
            Items | None, Key("orch.eval.num_examples", "its rows are the held-out prompts", composed=True)
        ] = None,
        eval_steps: Annotated[int | None, Key("orch.eval.interval", composed=True)] = None,
        *,
        num_steps: Annotated[int, Key("train.max_steps", composed=True)] = DEFAULT_STEPS,
        num_epochs: Annotated[int | None, Key("train.epochs", "use it instead of num_steps", composed=True)] = None,
        group_size: Annotated[int, Key("orch.rollouts_per_example")] = 4,
        batch_size: Annotated[
            int,
            Key(
                "orch.batch_size",
                "the value is batch_size (prompts per process) × group_size × processes",
                composed=True,
            ),
        ] = 1,
        ppo_steps: Annotated[int, Key("train.ppo_epochs")] = 1,
        clip_eps: Annotated[float, Key("train.loss.clip_low", "clip_high has the same value")] = 0.2,
        kl_penalty: Annotated[float, Key("train.loss.kl.beta", "the estimator is k3")] = 0.0,
        sampling_temperature: Annotated[float, Key("orch.sampling.temperature")] = 0.7,
        max_new_tokens: Annotated[int, Key("orch.sampling.max_tokens")] = 256,
        max_seq_len: Annotated[int, Key("train.sequence_len")] = 2048,
        generation_args: Annotated[
            Mapping[str, Any] | None, Key(tuple(dict.fromkeys(GENERATION_KEYS.values())), composed=True)
        ] = None,
        optimizer: Annotated[Any, Key("train.optimizer", convert=optimizer_name)] = "AdamW",
        optimizer_args: Annotated[
            Mapping[str, Any] | None,
            Key((*OPTIMIZER_KEYS.values(), "train.adam_beta1", "train.adam_beta2"), composed=True),
        ] = None,
        lr_scheduler: Annotated[
            str | Mapping[str, Any] | None,
            Key(tuple(SCHEDULER_KEYS.values()), "a name, or a dictionary with these settings", composed=True),
        ] = None,
        max_grad_norm: Annotated[float, Key("train.max_grad_norm")] = 1.0,
        output_dir: Annotated[str | Path, Key("train.output_dir")] = "./outputs",
        saving_steps: Annotated[int | None, Key("train.save_steps")] = None,
        logging_steps: Annotated[int, Key("train.logging_steps")] = 1,
        seed: Annotated[int, Key("train.seed")] = 0,
        log_completions: Annotated[
            bool | int, Key("train.show_completions", f"True is {COMPLETIONS_SHOWN}", completions_shown)
        ] = False,
        enable_wandb: Annotated[
            bool, Key("train.report_to", convert=lambda enabled: ["wandb"] if enabled else None)
        ] = False,
        wandb_project: Annotated[str | None, Key("train.report_project")] = None,
        use_accelerate: Annotated[
            bool, Key(note="the processes that `accelerate launch` started train together")
        ] = False,
        use_vllm: Annotated[bool, Key(("infer.engine", "infer.in_process"), composed=True)] = False,
        vllm_args: Annotated[
            Mapping[str, Any] | None,
            Key(("infer.gpu_memory_utilization", "infer.tp", "infer.engine_args"), composed=True),
        ] = None,
        vllm_enable_sleep: Annotated[bool, Key("infer.engine_args.enable_sleep_mode", composed=True)] = False,
        lora: Annotated[bool, Key("train.lora")] = False,
        lora_rank: Annotated[int, Key("train.lora_rank")] = 16,
        lora_alpha: Annotated[int, Key("train.lora_alpha")] = 32,
        lora_dropout: Annotated[float, Key("train.lora_dropout")] = 0.0,
        lora_target_modules: Annotated[Sequence[str] | None, Key("train.lora_target_modules")] = None,
        adapter_path: Annotated[str | Path | None, Key("train.adapter_path")] = None,
        resume_from_checkpoint: Annotated[bool | str | None, Key("train.resume_from_checkpoint", composed=True)] = None,
        reward_weights: Annotated[Sequence[float] | None, Key(note="the weights of several reward functions")] = None,
        environment_factory: Annotated[
            Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
            Key(note="a class of stateful environments, one object per rollout, whose methods are tools"),
        ] = None,
        tokenizer: Annotated[
            Any,
            Key(note="the tokenizer of a model object; the default comes from the folder or hub id of the model"),
        ] = None,
        device: Annotated[str, Key("train.device")] = "auto",
        overrides: Annotated[Sequence[str], Key(note="any other key of the schema, as on the command line")] = (),
        args: Annotated[
            GRPOConfig | None, Key(note="TRL's configuration, with TRL's defaults, instead of the arguments above")
        ] = None,
        processing_class: Annotated[Any, Key(note="the tokenizer; use it with args")] = None,
        peft_config: Annotated[Any, Key(note="a LoraConfig of PEFT; use it with args")] = None,
        **unknown: Any,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        with one_line_if_uncaught():
            self._set_up(arguments, unknown)

    def _set_up(self, arguments: dict[str, Any], unknown: Mapping[str, Any]) -> None:
        for name in ("model", "output_dir", "adapter_path"):
            if isinstance(arguments[name], Path):
                arguments[name] = str(arguments[name])
        self._processes = _processes(arguments["use_accelerate"] or arguments["args"] is not None)
        translation = _translated(arguments, unknown, self._processes)
        model, train_dataset, eval_dataset = (arguments[n] for n in ("model", "train_dataset", "eval_dataset"))
        self.config, self.notices = translation.config(_with_precision(arguments["overrides"], model, translation))
        self._wording = translation.reword
        if self.config.infer.in_process:
            _check_vllm()
        weights = arguments["reward_weights"]
        if (args := arguments["args"]) is not None:
            weights = args.reward_weights
        self._factory = arguments["environment_factory"]
        self._rewards = _rewards(arguments["reward_funcs"], weights, train_dataset, self._factory)
        self._max_turns = None
        if args is not None and args.max_tool_calling_iterations is not None:
            self._max_turns = args.max_tool_calling_iterations + 1
        self._eval_dataset = eval_dataset
        if eval_dataset is not None and arguments["eval_steps"] is None and args is None:
            self.notices.append("eval_dataset: is only used by test() unless eval_steps is set")
        held_out = eval_dataset if eval_dataset is not None else ()
        with _about("GRPOTrainer", train="train_dataset", eval="eval_dataset"):
            environment = self._environment(LABEL, train_dataset, held_out)
        self._given = PythonObjects(
            environments={LABEL: environment},
            model=None if isinstance(model, str) else model,
            tokenizer=_tokenizer(model, arguments["tokenizer"] or arguments["processing_class"]),
            processes=self._processes,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
        )

    def _environment(self, name: str, train: Items | None, held_out: Items) -> Environment:
        if self._factory is None:
            assert train is not None
            return ItemEnvironment(train, held_out, name, self._rewards)
        if train is None and isinstance(self._factory, Mapping):
            raise ArgumentError(
                "GRPOTrainer: train_dataset: is needed with several environments; its column `environment` selects one"
            )
        rows = {"train": train, "eval": held_out} if train is not None else None
        made = StatefulEnvironment(
            self._factory, name=name, rows=rows, functions=self._rewards, max_turns=self._max_turns
        )
        if not made.scores_itself:
            raise ArgumentError("GRPOTrainer: reward_funcs: is needed, because the environment has no get_reward()")
        return made

    @property
    def output_dir(self) -> Path:
        """The run directory: metrics, rollouts, checkpoints, report.html, and the trained weights in final/."""
        return Path(self.config.train.output_dir)

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dictionary per step, as in metrics.jsonl."""
        return read_metrics(self.output_dir) if is_used(self.output_dir) else []

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Path:
        """Train to the end and return the run directory. `resume_from_checkpoint` replaces that of the constructor."""
        with one_line_if_uncaught(self._wording):
            return self._train(bool(resume_from_checkpoint))

    def _train(self, resume: bool) -> Path:
        resume = resume or self.config.train.resume_from_checkpoint
        if self.output_dir.exists() and not self.output_dir.is_dir():
            raise ArgumentError(f"GRPOTrainer: output_dir: {str(self.output_dir)!r} is a file; use a folder")
        if is_used(self.output_dir) and not resume and is_main():
            raise ArgumentError(
                f"GRPOTrainer: output_dir: {str(self.output_dir)!r} already holds a run; continue it with "
                "resume_from_checkpoint=True, or choose another folder"
            )
        again = f"python {sys.argv[0] or 'your script'}, with GRPOTrainer(resume_from_checkpoint=True)"
        run = Run(self.config, resume, self._given, tuple(self.notices), again, self._wording)
        return outside_event_loop(lambda: api.train(run))

    def test(self, dataset: Items | None = None) -> dict[str, float]:
        """Rewards on `dataset` (default: eval_dataset) with the current weights.

        With several processes, the main process evaluates; the others return an empty dictionary at once.
        """
        with one_line_if_uncaught(self._wording):
            return self._test(dataset if dataset is not None else self._eval_dataset)

    def _test(self, items: Items | None) -> dict[str, float]:
        if items is None or len(items) == 0:
            raise ArgumentError("GRPOTrainer.test: dataset: is empty; pass items, or set eval_dataset")
        if not is_main():
            return {}
        with _about("GRPOTrainer.test", train="dataset", eval="dataset"):
            environment = self._environment(TEST, items, items)
        given = PythonObjects(
            environments={TEST: environment},
            model=None if self._finished and not self.config.train.lora else self._given.model,
            tokenizer=self._given.tokenizer,
        )
        run = Run(self._test_config(len(items)), objects=given)
        found = outside_event_loop(lambda: api.evaluate_run(run))
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
        # The embedded engine evaluates, whichever engine was used in training.
        infer = InferConfig(max_model_len=self.config.infer.max_model_len)
        return resolve_run(RunConfig.model_construct(train=train, infer=infer, orch=orch))


KEYS = {name: key for name, key in keys_of(GRPOTrainer.__init__).items() if not name.startswith("args.")}
DEFAULTS = {name: p.default for name, p in inspect.signature(GRPOTrainer.__init__).parameters.items() if name in KEYS}


@contextmanager
def _about(surface: str, **arguments: str) -> Iterator[None]:
    """Name the argument in errors about its items. `arguments` maps splits to arguments."""
    try:
        yield
    except ItemError as error:
        raise ArgumentError(f"{surface}: {arguments[error.split]}: {error.what}") from error


def _translated(arguments: dict[str, Any], unknown: Mapping[str, Any], processes: int) -> Translation:
    """The translation of a call, in Shoal's own style or in TRL's, with all problems of the arguments."""
    config, objects = arguments["args"], object_problems(arguments)
    arguments = {**arguments, **{name: STAND_INS.get(name) for name in objects}}
    if config is None:
        to = translate(KEYS, arguments, processes, DEFAULTS)
        for name in ("processing_class", "peft_config"):
            if arguments[name] is not None:
                to.refuse(name, "belongs to args=GRPOConfig(…)", "use tokenizer, lora and lora_rank, or pass args")
    elif isinstance(config, GRPOConfig):
        to = trl.translate(config, arguments, processes)
        for name, value in arguments.items():
            if name not in trl.WITH_ARGS and value != DEFAULTS[name]:
                to.refuse(name, "cannot be combined with args=GRPOConfig(…)", trl.in_args(name, KEYS))
    else:
        to = Translation("GRPOTrainer")
        to.refuse("args", f"must be a shoal.GRPOConfig, not a {type(config).__name__}", "from shoal import GRPOConfig")
    for name in unknown:
        to.refuse_unknown(name, KEYS, trl.in_own_arguments(name, KEYS) if config is None else trl.in_args(name, KEYS))
    for name, problem in objects.items():
        to.refuse(name, problem)
    if "args" in to.refused:
        to.raise_problems()
    return to


def _processes(use_accelerate: bool) -> int:
    """The number of processes that a launcher started."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1 and use_accelerate and (wanted := _wanted_processes()) > 1 and _launched_without_gpu():
        _restart(wanted)
    if world > 1 and not use_accelerate:
        raise ArgumentError(
            f"GRPOTrainer: use_accelerate: {world} processes were started, but use_accelerate=True is not set, so each "
            "would train its own model; set it, or start the script with python"
        )
    return world if use_accelerate else 1


def _wanted_processes() -> int:
    """`--num_processes` of the `accelerate launch` that started this process; 1 if there is none."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return 1
    try:
        words = Path(f"/proc/{os.getppid()}/cmdline").read_text(errors="replace").split("\0")
        text = " ".join(words[: words.index(sys.argv[0])] if sys.argv[0] in words else words)
        return int(NUM_PROCESSES.findall(text)[-1])
    except (OSError, IndexError, ValueError):
        return 1


def _restart(processes: int) -> None:
    """Run the script again, in several processes. Without GPUs, accelerate starts one unless --multi_gpu is set."""
    print(f"no GPU: starting {processes} processes on the CPU", file=sys.stderr, flush=True)
    launch = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", str(processes))
    os.execv(sys.executable, [sys.executable, *launch, "--main_process_port", "0", *sys.argv])


def _launched_without_gpu() -> bool:
    import torch

    return not torch.cuda.is_available()


def _check_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        raise ArgumentError(
            "GRPOTrainer: use_vllm: the package vllm is not installed; run `pip install vllm` (Linux with CUDA), or "
            "remove use_vllm to use the embedded engine"
        )


def _rewards(functions: Any, weights: Any, items: Items | None, factory: Any) -> RewardFunctions | None:
    if functions is None:
        if weights is not None:
            raise ArgumentError("GRPOTrainer: reward_weights: is not used without reward_funcs; remove it")
        if factory is None and items and not judges_itself(items[0]):
            raise ArgumentError(
                f"GRPOTrainer: reward_funcs: the items of train_dataset ({type(items[0]).__name__}) have no "
                "get_reward(completion); add it, or pass a reward function"
            )
        return None
    if items and judges_itself(items[0]):
        raise ArgumentError(
            "GRPOTrainer: reward_funcs: cannot be combined with items that have get_reward; keep one of them"
        )
    many = [functions] if callable(functions) or isinstance(functions, str) else list(functions)
    if factory is not None and weights is None:
        weights = [1.0] * len(many)  # as a sum of named parts, because get_reward of the environment is another part
    return RewardFunctions([_named_reward(f) if isinstance(f, str) else f for f in many], weights)


def _named_reward(name: str) -> Any:
    if ":" not in name:  # TRL's name of a reward model
        raise ArgumentError(
            f"GRPOTrainer: reward_funcs: {name!r} does not name a function; write module:function. A reward model is "
            "not supported: pass a function that calls it"
        )
    return load_object(name)


def _with_precision(overrides: Sequence[str], model: Any, to: Translation) -> list[str]:
    """A model object keeps its precision unless an override sets train.recipe."""
    if {"model", "overrides"} & set(to.refused):
        return []
    dtype = str(getattr(model, "dtype", "")).removeprefix("torch.")
    recipe = {"float32": "fp32", "bfloat16": "bf16"}.get(dtype)
    if isinstance(model, str) or any(text.startswith("train.recipe=") for text in overrides):
        return list(overrides)
    if recipe is None:
        what = f"{type(model).__name__} in {dtype or 'no precision'} cannot be trained"
        to.refuse("model", what, "load it in float32 or bfloat16, or pass its name")
        return list(overrides)
    return [f"train.recipe={recipe}", *overrides]


def _tokenizer(model: Any, tokenizer: Any) -> Any:
    if tokenizer is not None or isinstance(model, str):
        return tokenizer
    from shoal.models.tokenizer import load_tokenizer

    name = getattr(model, "name_or_path", "")
    if not name:
        raise ArgumentError("GRPOTrainer: tokenizer: is required, because the model object has no name_or_path")
    return load_tokenizer(name)
