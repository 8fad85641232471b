"""Writes docs/models.md and the table of models in README.md from models.json and models_vllm.json in results/.

    python benchmarks/models_page.py

`make test-models` records models.json and runs this; vllm_families.py records models_vllm.json. A test compares both
pages with what this writes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import readme_tables
from performance_tables import table

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "models.md"
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]

# Names that readers know, by model_type; the page lists the others by their type. In the order of the README.
LABELS = {
    "qwen2": "Qwen2.5", "qwen3": "Qwen3", "llama": "Llama 3, SmolLM2", "mistral": "Mistral 7B", "smollm3": "SmolLM3",
    "qwen3_moe": "Qwen3-MoE", "qwen2_moe": "Qwen2-MoE", "mixtral": "Mixtral", "deepseek_v2": "DeepSeek V2",
    "deepseek_v3": "DeepSeek V3 and R1, Kimi K2", "glm4": "GLM-4", "glm4_moe": "GLM-4.5 and 4.6",
    "glm4_moe_lite": "GLM-4.7-Flash", "gemma": "Gemma", "gemma2": "Gemma 2", "gemma3_text": "Gemma 3 270M and 1B",
    "gemma3": "Gemma 3 from 4B", "gemma3n_text": "Gemma 3n (text class)", "gemma4_text": "Gemma 4 (text class)",
    "gemma4": "Gemma 4", "mistral3": "Mistral Small 3, Ministral 3", "ministral": "Ministral 8B",
    "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL", "qwen3_vl_moe": "Qwen3-VL-MoE", "phi": "Phi-1 and Phi-2",
    "phi3": "Phi-3, Phi-4", "olmo": "OLMo", "olmo2": "OLMo 2", "olmo3": "OLMo 3", "olmoe": "OLMoE",
    "granite": "Granite 3", "granitemoe": "Granite 3 MoE", "hunyuan_v1_dense": "Hunyuan", "ernie4_5": "ERNIE 4.5",
    "minimax_m2": "MiniMax-M2", "cohere": "Command R", "cohere2": "Command R7B", "exaone4": "EXAONE 4",
    "seed_oss": "Seed-OSS", "starcoder2": "StarCoder2", "gpt_neox": "Pythia", "opt": "OPT", "gpt2": "GPT-2",
    "gpt_oss": "gpt-oss", "mimo_v2_flash": "MiMo-V2-Flash", "granite_swa": "Granite-SWA", "lfm2": "LFM2",
    "lfm2_moe": "LFM2-MoE", "qwen3_5": "Qwen3.5", "qwen3_5_moe": "Qwen3.5-MoE", "qwen3_5_text": "Qwen3.5 (text class)",
    "qwen3_next": "Qwen3-Next", "granitemoehybrid": "Granite 4-H", "bamba": "Bamba", "falcon_h1": "Falcon-H1",
    "nemotron_h": "Nemotron-H", "kimi_linear": "Kimi-Linear", "olmo_hybrid": "OLMo hybrid", "minimax": "MiniMax-01",
    "jamba": "Jamba", "zamba2": "Zamba2", "mamba": "Mamba", "mamba2": "Mamba 2", "rwkv": "RWKV", "llama4": "Llama 4",
    "deepseek_v32": "DeepSeek V3.2", "deepseek_v4": "DeepSeek V4", "glm_moe_dsa": "GLM-5", "phimoe": "Phi-3.5-MoE",
    "diffllama": "DiffLlama", "stablelm": "StableLM", "falcon": "Falcon", "gptj": "GPT-J", "gpt_neo": "GPT-Neo",
    "bloom": "BLOOM", "mpt": "MPT",
}  # fmt: skip

FUSED = "full and LoRA training; fused GPU path with CUDA graphs"
MODULES = "full and LoRA training through the transformers modules, which is slower on a GPU"
CPU_ONLY = "full and LoRA training on a CPU; refused on a GPU until verified there (`SHOAL_TRY_ON_GPU=1` tries)"
# Part of a recorded reason → what the README says. The first match counts.
REFUSED = {
    "multimodal": "refused: multimodal checkpoint",
    "indexed": "refused: indexed, compressed or chunked attention",
    "compressed": "refused: indexed, compressed or chunked attention",
    "chunked": "refused: indexed, compressed or chunked attention",
    "linear_attention": "refused: state layers (linear attention, convolution or state space)",
    "conv": "refused: state layers (linear attention, convolution or state space)",
    "hybrid": "refused: state layers (linear attention, convolution or state space)",
    "sinks": "refused: attention sinks",
    "more than once": "refused: attends twice per layer",
    "at random": "refused: draws its experts at random in training",
}
OTHER = "refused: Shoal cannot access the attention or the recurrent state"
GROUPS = (FUSED, MODULES, CPU_ONLY, *dict.fromkeys(REFUSED.values()), OTHER)


def group_of(row: Row) -> str | None:
    """The README's line for a family; None if transformers itself did not build the tiny model."""
    if row["status"] == "works":
        return CPU_ONLY if row.get("unverified") else FUSED if row["path"] == "fused" else MODULES
    if row["status"] != "refused":
        return None
    return next((text for part, text in REFUSED.items() if part in row["reason"]), OTHER)


def readme_table(folder: Path) -> str:
    result = readme_tables.read(folder, "models")
    if result is None:
        return ""
    found = {row["family"]: group_of(row) for row in result["families"]}
    rows = []
    for group in GROUPS:
        members = [label for family, label in LABELS.items() if found.get(family) == group]
        if members:
            rows.append([", ".join(members), group])
    return table(["Models", "Status"], rows)


# Of log-probs in vLLM and in transformers with the same weights: the largest gap in fp32, the mean gap in bf16.
EQUAL, EQUAL_IN_BF16 = 1e-4, 0.05
# Part of a recorded error → what the page says. The first match counts.
NOT_LOADED = {
    "are not supported for now": "no class in this vLLM",
    "does not recognize this architecture": "unknown to its transformers",
    "not supported by MLA": "heads too small for its MLA on a CPU",
    "not initialized from checkpoint": "the tiny model lacks tensors that vLLM requires",
    "object has no attribute": "the tiny model lacks fields that vLLM reads",
}


def in_vllm(found: Row | None) -> str:
    """What vLLM did with the exports of a family. Empty: not tried."""
    if found is None:
        return ""
    kinds = {"full": "full", "merged": "merged LoRA"}
    texts = {name: _export_in_vllm(found[kind]) for kind, name in kinds.items() if kind in found}
    if not texts:
        return ""
    same = len(set(texts.values())) == 1
    return next(iter(texts.values())) if same else "; ".join(f"{name}: {text}" for name, text in texts.items())


def _export_in_vllm(export: Row) -> str:
    if "error" in export:
        known = next((text for part, text in NOT_LOADED.items() if part in export["error"]), None)
        return f"not loaded: {known or _first_sentence(export['error'])}"
    if export["dtype"] == "bfloat16" and export["logprob_gap_mean"] < EQUAL_IN_BF16:
        return "equal (bf16)"
    gap = export["logprob_gap"]
    return "equal" if gap < EQUAL else f"loads; log-probs differ by up to {gap:.2g}"


def _first_sentence(error: str) -> str:
    """Without the name of the exception. An assertion may have no text."""
    return error.split(": ", 1)[-1].strip().split(". ")[0].rstrip(".")[:90] or "an assertion without a text"


def page(result: dict[str, Any], vllm: dict[str, Any]) -> str:
    rows = result["families"]
    tried = {row["family"]: row for row in vllm["families"]}
    count = {status: sum(row["status"] == status for row in rows) for status in ("works", "refused", "not built")}
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    head = [
        "Family",
        "`model_type`",
        "Status",
        "Training on a GPU",
        "Decoding on a GPU",
        "In vLLM",
        "LoRA adapts",
        "Notes",
    ]
    order = {family: number for number, family in enumerate(LABELS)}
    rows = sorted(rows, key=lambda row: (row["status"] != "works", order.get(row["family"], len(order)), row["family"]))
    return PAGE_TEXT.format(
        works=count["works"], refused=count["refused"], unbuilt=count["not built"], total=len(rows), versions=versions,
        vllm=vllm["vllm"], equal=sum(in_vllm(found).startswith("equal") for found in tried.values()),
        tried=sum(in_vllm(found) != "" for found in tried.values()),
        table=table(head, [_cells(row, in_vllm(tried.get(row["family"]))) for row in rows]),
    )  # fmt: skip


def _cells(row: Row, vllm: str) -> list[str]:
    cpu_only = "refused until verified" if row.get("unverified") else None
    notes = row.get("reason", "") or row.get("unverified", "") or row.get("kind", "")
    adapted = (
        ", ".join(row.get("details", {}).get("adapted", [])) if row.get("lora") == "works" else row.get("lora", "")
    )
    return [
        LABELS.get(row["family"], ""), row["family"], row["status"], cpu_only or row.get("path", ""),
        cpu_only or row.get("decode", ""), _plain(vllm), adapted.replace("|", "/"), _plain(notes),
    ]  # fmt: skip


def _plain(text: str) -> str:
    return text.replace("|", "/").replace("_", r"\_")


PAGE_TEXT = """# Models

Look up whether Shoal trains a model, and what happens on a GPU. To check a model of your own, load it:

```bash
shoal grpo train.model=MODEL train.output_dir=outputs/check orch.env=reverse-text train.max_steps=1
```

Shoal compares every model with its own forward pass when it loads, and refuses by name what it cannot compute.

This page is generated from the results of `make test-models`: a tiny random model of each of {total} architectures, in
fp32 on a CPU ({versions}). {works} work, {refused} are refused with a reason, and transformers could not
build {unbuilt} at this size. "Works" means: greedy text equals `generate`, log-probs of samples equal the model's own
forward pass (largest gap below 2e-5), one full and one LoRA step train, and `final/` loads with the keys of the
checkpoint. Pretrained weights were not loaded.

Checkpoints with a vision tower are trained on text: the tower is loaded, frozen, without adapters, and written back,
with the files of the image processor. Text that contains the placeholder tokens of images is treated as plain text.

Training on a GPU is `fused` (Shoal's kernels, checked against the modules when the model loads) or `modules` (the
modules of transformers). Decoding is `graphs` (CUDA graphs) or `eager`. Both columns are what the checks of the source
say for the tiny model; they were not run on a GPU here. "Refused until verified" means that the model trains on a CPU,
and that a GPU refuses it: no one has run it there. `SHOAL_TRY_ON_GPU=1` tries, without fused kernels and CUDA graphs.

"In vLLM" is the result of `python benchmarks/vllm_families.py`: a tiny random model of the family was trained for one
step and exported, and vLLM {vllm} on a CPU continued three prompts greedily (fp32; bf16 where its kernels need it).
"Equal" means that the log-probs of vLLM match those of transformers with the same weights (largest gap below 1e-4; in
bf16, mean gap below 0.05). This is the case for {equal} of the {tried} families that were tried. An empty cell means
that the family was not tried. For some families a LoRA adapter
was also trained, merged and exported. Classes of multimodal checkpoints need torchvision, and were loaded with
`language_model_only`.

{table}
"""


def main() -> None:
    PAGE.write_text(recorded_page(), "utf-8")
    readme = ROOT / "README.md"
    readme.write_text(readme_tables.fill(readme.read_text("utf-8"), RESULTS), "utf-8")


def recorded_page() -> str:
    return page(*(json.loads((RESULTS / name).read_text("utf-8")) for name in ("models.json", "models_vllm.json")))


if __name__ == "__main__":
    main()
