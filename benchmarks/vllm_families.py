"""Loads exports of every family in a real vLLM on the CPU and compares log-probs; writes models_vllm.json.

    python benchmarks/vllm_families.py ~/.cache/shoal-vllm [FAMILY ...]

The folder is that of `make test-vllm`. Each family of docs/models.md is built as a tiny random model, trained for one
step (all weights, and for some families an adapter that is merged), and exported. vLLM continues three prompts
greedily; transformers scores the same tokens with the exported weights. With names of families, the other recorded
results are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import write_result

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from models.check import LENGTHS, sample, train_config, train_step  # noqa: E402
from models.families import FAMILIES, MULTIMODAL, build  # noqa: E402
from real_vllm.install import VLLM  # noqa: E402
from shoal import api  # noqa: E402
from shoal.build import model as building  # noqa: E402
from shoal.models.load import load_model  # noqa: E402
from support.models import TOKENIZER, random_prompts  # noqa: E402

RESULT = ROOT / "benchmarks" / "results" / "models_vllm.json"
TOKENS = 16
# The smallest head of vLLM's attention on a CPU has 32 dimensions.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "kv_channels", "index_head_dim"), 32),
}
# Fields that vLLM reads, with the values of published checkpoints; the classes of transformers do not need them.
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"topk_method": "noaux_tc"},
    "gemma4": {"num_experts": None, "top_k_experts": None},
    "gemma4_text": {"num_experts": None, "top_k_experts": None},
    "lfm2": {"conv_dim": 64, "block_dim": 64},
    "qwen2_5_vl": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}},
    "qwen3_5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3_5_moe": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "qwen3_vl_moe": {"norm_topk_prob": True},
}
# vLLM reads the processor of a multimodal class even if it serves text only.
PROCESSORS = {
    "gemma3": ("Gemma3ImageProcessor", "Gemma3Processor"), "gemma4": ("Gemma4ImageProcessor", "Gemma4Processor"),
    "mistral3": ("PixtralImageProcessor", "PixtralProcessor"),
    "qwen2_5_vl": ("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor"),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe"), ("Qwen2VLImageProcessor", "Qwen3VLProcessor")),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), ("Qwen2VLImageProcessor", "Qwen3VLProcessor")),
}  # fmt: skip
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
# Of these, an adapter is trained, merged and exported too.
MERGED = (
    "deepseek_v3", "gemma3", "gemma3_text", "gemma4", "gpt_oss", "granitemoehybrid", "lfm2", "mistral3", "qwen2_5_vl",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe",
)  # fmt: skip
NEEDS_BF16 = "requires BF16"


def exports(family: str, folder: Path) -> dict[str, Path]:
    """Train one step of all weights, and one of an adapter; the folders of the exports by kind."""
    model = build(family, sizes=SIZES, own=PUBLISHED.get(family))
    model.save_pretrained(folder / "model")
    TOKENIZER.save_pretrained(folder / "model")
    if family in PROCESSORS:
        kinds = dict(zip(("image_processor_type", "processor_class"), PROCESSORS[family], strict=True))
        (folder / "model" / "preprocessor_config.json").write_text(json.dumps(kinds), "utf-8")
    train = train_config(folder)
    loaded = building.load(train)
    train_step(train, loaded, sample(loaded.decoder), folder / "full")
    if family not in MERGED:
        return {"full": folder / "full"}
    train = train_config(folder, lora=True, lora_rank=4, learning_rate=0.05)
    loaded = building.load(train)
    train_step(train, loaded, sample(loaded.decoder), folder / "lora")
    api.export(str(folder / "model"), folder / "merged", adapter=str(folder / "lora"))
    return {"full": folder / "full", "merged": folder / "merged"}


def job(name: str, folder: Path, dtype: str) -> dict[str, Any]:
    family = name.split("/")[0]
    arguments = {
        "dtype": dtype, "enforce_eager": True, "max_model_len": 128, "max_num_seqs": 4, "enable_prefix_caching": False,
        "logprobs_mode": "processed_logprobs",
    }  # fmt: skip
    if family in MULTIMODAL:
        arguments["language_model_only"] = True
    prompts = random_prompts(1, *LENGTHS)
    return {"name": name, "folder": str(folder), "prompts": prompts, "tokens": TOKENS, "engine_args": arguments}


def answers(python: Path, jobs: list[dict[str, Any]], folder: Path) -> dict[str, dict[str, Any]]:
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs), "utf-8")
    child = str(ROOT / "benchmarks" / "vllm_families_child.py")
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": ""}
    subprocess.run([python, child, folder / "jobs.json", folder / "out.jsonl"], env=environment, check=True)
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text("utf-8").splitlines()]
    return {row["job"]: row for row in rows}


@torch.no_grad()
def gaps(folder: Path, completions: list[dict[str, Any]], dtype: str) -> dict[str, Any]:
    """How far vLLM's log-probs are from transformers', and its tokens from the most probable ones."""
    model: Any = load_model(str(folder), getattr(torch, dtype), torch.device("cpu"))
    model.set_attn_implementation("eager")
    logprob, choice = [], []
    for prompt, answer in zip(random_prompts(1, *LENGTHS), completions, strict=True):
        ids = torch.tensor([prompt + answer["token_ids"]])
        rows = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        chosen = rows.gather(1, torch.tensor(answer["token_ids"])[:, None])[:, 0]
        logprob.append((chosen - torch.tensor(answer["logprobs"]).double()).abs())
        choice.append(rows.max(-1).values - chosen)
    return {
        "dtype": dtype,
        "logprob_gap": float(f"{torch.cat(logprob).max():.1e}"),
        "logprob_gap_mean": float(f"{torch.cat(logprob).mean():.1e}"),
        "below_the_best": float(f"{torch.cat(choice).max():.1e}"),
    }


def measure(families: list[str], python: Path, work: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    folders: dict[str, Path] = {}
    for family in families:
        found[family] = {"family": family}
        try:
            with contextlib.redirect_stdout(sys.stderr):
                made = exports(family, work / family)
        except Exception as error:
            found[family]["not_exported"] = f"{type(error).__name__}: {error}"[:300]
            continue
        folders |= {f"{family}/{kind}": folder for kind, folder in made.items()}
    dtype, names = "float32", list(folders)
    for dtype in ("float32", "bfloat16"):
        rows = answers(python, [job(name, folders[name], dtype) for name in names], work / dtype) if names else {}
        names = [name for name, row in rows.items() if NEEDS_BF16 in row.get("error", "")]
        for name in set(rows) - set(names if dtype == "float32" else []):
            family, kind = name.split("/")
            row = rows[name]
            failed = {"error": row.get("error", "")}
            found[family][kind] = gaps(folders[name], row["completions"], dtype) if "completions" in row else failed
            print(name, found[family][kind], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*")
    asked = parser.parse_args()
    recorded = json.loads((RESULT.parent / "models.json").read_text("utf-8"))["families"]
    works = [row["family"] for row in recorded if row["status"] == "works"]
    unknown = set(asked.families) - set(FAMILIES)
    if unknown:
        parser.error(f"unknown families: {', '.join(sorted(unknown))}")
    python = asked.folder.expanduser() / "env" / "bin" / "python"
    with tempfile.TemporaryDirectory(prefix="shoal-vllm-families-") as work:
        found = measure(asked.families or works, python, Path(work))
    kept = json.loads(RESULT.read_text("utf-8"))["families"] if asked.families and RESULT.exists() else []
    rows = {row["family"]: row for row in kept} | found
    write_result(RESULT, {"vllm": VLLM, "tokens": TOKENS, "families": [rows[name] for name in sorted(rows)]})


if __name__ == "__main__":
    main()
