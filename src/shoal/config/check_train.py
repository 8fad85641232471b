"""Rules inside the `train` section, shared by GRPO and supervised training. Called by checks.py only."""

from __future__ import annotations

import json
import re
from pathlib import Path

from shoal.config.base import given
from shoal.config.problems import Findings, show
from shoal.config.train import TrainConfig

# Usual ranges of the peak learning rate for RL; LoRA takes about ten times as much.
FULL_RATES = (5e-7, 5e-5)
LORA_FACTOR = 10
# Our key → PEFT's: what an adapter to start from has decided already.
ADAPTER_KEYS = {"lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?\Z")


def check_train(train: TrainConfig, findings: Findings, supervised: bool = False) -> None:
    _check_exclusive(train, findings)
    _check_model(train, findings)
    _check_lora(train, findings)
    _check_schedule(train, findings)
    if not supervised:
        _advise_rate(train, findings)
    for name in given(train, "metric_names", "log_completions") if not train.report_to else []:
        findings.error(f"train.{name}", "is for trackers, and train.report_to names none", "set it, or remove this key")
    _check_devices(train, findings, supervised)


def _check_devices(train: TrainConfig, findings: Findings, supervised: bool) -> None:
    if supervised and train.gpus > 1:
        findings.error("train.gpus", f"is {train.gpus}, but supervised training runs on one device", "use train.gpus=1")
    if train.sharding == "none":
        return
    stored = next((name for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4") if getattr(train, name)), None)
    not_sharded = {
        "supervised training": supervised,
        "train.optimizer: adamw_8bit": train.optimizer == "adamw_8bit",
        "train.recipe: fp8-hybrid": train.recipe == "fp8-hybrid",
        f"a quantised base (train.{stored})": stored is not None,
    }
    for what, asked in not_sharded.items():
        if asked:
            findings.error(
                "train.sharding", f"is fsdp, which {what} cannot be combined with", "use train.sharding=none"
            )


def _check_exclusive(train: TrainConfig, findings: Findings) -> None:
    for names in (
        ("max_steps", "epochs"),
        ("warmup_steps", "warmup_ratio"),
        ("save_steps", "save_epochs", "save_seconds"),
        ("qlora_fp8", "qlora_bnb", "qlora_fp4"),
    ):
        set_names = [name for name in names if getattr(train, name) not in (None, False)]
        for name in set_names[1:]:
            findings.error(f"train.{name}", f"excludes train.{set_names[0]}, which is set too", "keep one of them")


def _check_model(train: TrainConfig, findings: Findings) -> None:
    problem = model_problem(train.model) if train.model is not None else None
    if problem is not None:
        findings.error("train.model", *problem)
    if train.adapter_path is not None:
        _check_adapter(train, train.adapter_path, findings)


def model_problem(model: str) -> tuple[str, str] | None:
    """What can be said about a model's name without loading it: (what, fix), or None."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        if (folder / "config.json").is_file():
            return None
        if (folder / "final" / "adapter_config.json").is_file():
            base = "name its base model, with train.lora=true and train.adapter_path="
            return f"{show(model)} is a run, not a model", f"{base}{folder / 'final'}"
        if (folder / "final").is_dir():
            return f"{show(model)} is a run, not a model", f"name the weights in it, as {show(str(folder / 'final'))}"
        return (
            f"{show(model)} is a folder without config.json",
            "name a folder written by save_pretrained, or a .gguf file",
        )
    if folder.is_file():
        return None if folder.suffix == ".gguf" else (f"{show(model)} is a file but not a .gguf one", "name its folder")
    if model.endswith(".gguf") or not _HUB_ID.match(model) or means_folder(model):
        return f"{show(model)} does not exist", "check the path; `shoal make-model tiny DIR` builds a small model"
    return None


def means_folder(model: str) -> bool:
    """A hub id is owner/name; where a folder of the owner's name lies here, a path was meant."""
    return "/" in model and Path(model.split("/")[0]).is_dir()


def _check_adapter(train: TrainConfig, adapter_path: str, findings: Findings) -> None:
    if not train.lora:
        findings.error("train.adapter_path", "needs train.lora: true", "set it, or remove adapter_path")
    file = Path(adapter_path).expanduser() / "adapter_config.json"
    try:
        adapter = dict(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        what = f"{show(adapter_path)} holds no adapter_config.json that can be read"
        findings.error("train.adapter_path", what, "name a folder that PEFT wrote")
        return
    for ours, theirs in ADAPTER_KEYS.items():
        wanted, found = getattr(train, ours), adapter.get(theirs)
        if given(train, ours) and wanted != found:
            what = f"is {show(wanted)}, but the adapter at train.adapter_path has {show(found)}"
            findings.error(f"train.{ours}", what, "leave it out: an adapter to start from keeps its own shape")


def _check_lora(train: TrainConfig, findings: Findings) -> None:
    for name in ("qlora_fp8", "qlora_bnb", "qlora_fp4"):
        if getattr(train, name) and not train.lora:
            what = "quantises the frozen base, so it needs train.lora: true; full fine-tuning cannot be quantised"
            findings.error(f"train.{name}", what, "set train.lora=true or remove it")
    if train.quantised and train.recipe == "fp8-hybrid":
        what = "has no effect with a quantised base, which is dequantised to bf16 for every product"
        findings.notice("train.recipe", f"fp8-hybrid {what}")
    if not train.lora:
        names = given(train, "lora_rank", "lora_alpha", "lora_dropout", "lora_target_modules")
        inert = [f"train.{name}" for name in names]
        if inert:
            findings.notice("train.lora", f"is false, so these have no effect: {', '.join(inert)}")
    if train.lora and train.lora_target_modules == []:
        findings.error(
            "train.lora_target_modules", "is empty, so nothing would be trained", "leave it out for all linear layers"
        )


def _check_schedule(train: TrainConfig, findings: Findings) -> None:
    if train.lr_scheduler_type == "constant" and given(train, "final_lr_fraction"):
        what = "is not used by a constant learning rate"
        findings.error(
            "train.final_lr_fraction", what, "remove it, or set train.lr_scheduler_type to cosine, linear or wsd"
        )
    noise = train.noise_scheduler
    if noise.enabled and noise.sigma_end > noise.sigma_start:
        what = f"is {noise.sigma_end:g}, above sigma_start ({noise.sigma_start:g}), but noise decays"
        findings.error("train.noise_scheduler.sigma_end", what, "swap the two")


def _advise_rate(train: TrainConfig, findings: Findings) -> None:
    factor = LORA_FACTOR if train.lora else 1
    low, high = FULL_RATES[0] * factor, FULL_RATES[1] * factor
    if not low <= train.learning_rate <= high:
        kind = "LoRA" if train.lora else "full fine-tuning"
        what = f"{train.learning_rate:g} is outside what {kind} usually takes"
        findings.notice("train.learning_rate", what, f"try {low:g} to {high:g}")
