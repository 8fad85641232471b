"""The model card of an exported folder, generated from the records of the run directory only."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from shoal.config.problems import show
from shoal.runs.files import write_atomic
from shoal.runs.run_dir import read_metrics, read_status
from shoal.runs.weight_files import Weights, find_weights
from shoal.watch.report.data import supervised_algorithm

USE = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
messages = [{"role": "user", "content": "Hello"}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""


ADAPTER_USE = """```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or its name on a hub
tokenizer = AutoTokenizer.from_pretrained(folder)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), folder)
messages = [{{"role": "user", "content": "Hello"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
```"""


def write_card(run: Path) -> None:
    """The card of `final/`, once the run has ended."""
    if (run / "final").is_dir():
        weights = find_weights(str(run), checkpoint="final")
        write_atomic(run / "final" / "README.md", model_card(weights, merged=False).encode())


def model_card(weights: Weights, *, merged: bool = True) -> str:
    """`merged`: whether the folder has full weights even if `weights` has an adapter."""
    config = _config(weights.run)
    adapter = weights.adapter is not None and not merged
    sections = [
        f"---\n{yaml.safe_dump(_front_matter(weights, adapter), sort_keys=False)}---",
        f"# {Path(weights.run.name if weights.run is not None else weights.model).name}",
        _origin(weights, config, adapter),
        _results(weights.run),
        f"## Use\n\n{ADAPTER_USE.format(base=_base_arguments(weights.model)) if adapter else USE}",
        f"## Limits\n\n{_limits(config)} Evaluate it." if config else "",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _base_arguments(model: str) -> str:
    """How transformers loads the base of an adapter. A local path is not published."""
    path = Path(model)
    if path.suffix == ".gguf":
        return f'"path/to/folder", gguf_file="{path.name}"'
    return f'"path/to/{path.name}"' if _local(model) else f'"{model}"'


def _front_matter(weights: Weights, adapter: bool) -> dict[str, Any]:
    config = _config(weights.run)
    data: dict[str, Any] = {
        "library_name": "peft" if adapter else "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["shoal", *_tags(config), *(["lora"] if adapter else [])],
    }
    # Publish a hub id, but not a local path.
    base = weights.model if weights.run is None else config.get("train", {}).get("model")
    if base and not _local(base):
        data["base_model"] = base
    return data


def _origin(weights: Weights, config: dict[str, Any], adapter: bool) -> str:
    base = Path(weights.model).name if _local(weights.model) else weights.model
    if not config:
        return f"`{base}`{' with an adapter merged in' if weights.adapter else ''}, exported with Shoal."
    train, orch = config.get("train", {}), config.get("orch")
    steps = _steps(weights, train.get("max_steps"))
    rows = {"Steps": steps, "Epochs": train.get("epochs"), "Learning rate": train.get("learning_rate")}
    if orch is not None:
        rows |= {
            "Environments": ", ".join(env["id"] for env in orch["env"]),
            "Loss": train["loss"]["type"],
            "Rollouts per step": orch["batch_size"],
            "Rollouts per prompt": orch["rollouts_per_example"],
            "max_tokens per completion": orch["sampling"]["max_tokens"],
        }
    if train.get("lora"):
        rows["LoRA"] = f"rank {train['lora_rank']}, alpha {train['lora_alpha']}{'' if adapter else ', merged'}"
    how = algorithm(config)
    lines = "\n".join(f"| {name} | {show(value).strip(chr(34))} |" for name, value in rows.items() if value is not None)
    start = Path(str(train.get("model"))).name if _local(train.get("model")) else train.get("model")
    return f"Trained from `{start}` with Shoal, {how}.\n\n| | |\n|---|---|\n{lines}"


def _limits(config: dict[str, Any]) -> str:
    if config.get("orch") is not None:
        return "The model was trained to raise a reward and may do well only by that reward."
    if "loss" in config:
        return "The model was trained to prefer the chosen to the rejected completions of its data set."
    return "The model was trained to imitate the completions of its data set."


def algorithm(config: dict[str, Any]) -> str:
    """The algorithm in words: the name of the loss and of the advantages that it was used with."""
    if config.get("orch") is None:
        return supervised_algorithm(config)
    loss, advantage = config["train"]["loss"], config["orch"].get("advantage", {})
    names = {"grpo": "GRPO", "dapo": "DAPO", "gspo": "GSPO", "cispo": "CISPO", "sapo": "SAPO", "reinforce": "REINFORCE"}
    name = names.get(loss["type"], f"policy gradient with the loss `{loss['type']}`")
    if loss["type"] == "grpo" and advantage.get("std") == "none":
        name = "Dr. GRPO" if loss.get("aggregation") == "seq-mean-token-sum-norm" else "GRPO without scaled rewards"
    if advantage.get("function"):
        return f"{name} with the advantages of `{advantage['function']}`"
    mean = "leave-one-out" if advantage.get("leave_one_out") else f"{advantage.get('mean', 'group')}-relative"
    return (
        name if mean == "group-relative" and name in (*names.values(), "Dr. GRPO") else f"{name} with {mean} advantages"
    )


def _tags(config: dict[str, Any]) -> list[str]:
    if config.get("orch") is None:
        return ["dpo" if "loss" in config else "sft"] if config else []
    return ["reinforcement-learning", str(config["train"]["loss"]["type"]).rpartition(":")[2]]


def _steps(weights: Weights, planned: int | None) -> int | str | None:
    """For how many steps these weights were trained; may be fewer than planned."""
    at = re.fullmatch(r"step_(\d+)", Path(weights.adapter or weights.model).parent.name)
    done = int(at[1]) if at else read_status(weights.run).get("step") if weights.run is not None else None
    return planned if done in (None, planned) else f"{done} of {planned}" if planned is not None else done


def _local(model: object) -> bool:
    """Whether the name of a model is a path, on this machine or another."""
    name = str(model)
    return Path(name).expanduser().exists() or name.startswith(("/", ".", "~")) or name.count("/") > 1


def _results(run: Path | None) -> str:
    """First and last held-out scores, if the run has evaluations."""
    records = read_metrics(run) if run is not None else []
    means = [
        (record["step"], {k: v for k, v in record.items() if k.startswith("eval/") and k.endswith("/mean")})
        for record in records
    ]
    means = [(step, found) for step, found in means if found]
    if not means:
        return ""
    (first, before), (last, after) = means[0], means[-1]
    rows = "\n".join(f"| `{name}` | {before.get(name, '')} | {value} |" for name, value in after.items())
    status = read_status(run) if run is not None else {}
    ended = f" State of the run: {status['state']} at step {status['step']}." if status.get("state") else ""
    return (
        f"## Held-out evaluation\n\n| | step {first} | step {last} |\n|---|---|---|\n{rows}\n\n{ended.strip()}".rstrip()
    )


def _config(run: Path | None) -> dict[str, Any]:
    return (yaml.safe_load((run / "config.yaml").read_text("utf-8")) or {}) if run is not None else {}
