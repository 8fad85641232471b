"""The checks of one family: load, sample, score, one full and one LoRA step, reload of `final/`.

`check` returns a Finding and raises nothing. The test evaluates the finding.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassClassValidationError
from safetensors import safe_open

from models.families import build, tiny_config
from shoal.build import model as building
from shoal.config.train import TrainConfig
from shoal.core.batching import rollout_samples
from shoal.core.errors import ModelError
from shoal.core.types import Rollout, Row
from shoal.engine.kv_cache import SlotCache
from shoal.models import fused, kernels
from shoal.models.load import check_config
from support.engines import ask, greedy, make_engine, run
from support.models import EOS, TOKENIZER, random_prompts
from support.training import as_rollout, grpo, one_turn, pack

LOGPROB_GAP = 2e-5
K3 = 1e-6
TOKENS = 24
LENGTHS = (5, 19, 40)  # the first is shorter than every window, the last is longer than every limit


@dataclass
class Finding:
    family: str
    status: str = "works"  # or refused, wrong, fails (an error without a clear reason), not built (by transformers)
    reason: str = ""
    name: str = ""
    path: str = ""  # the path of training on a GPU
    decode: str = ""  # the path of sampling on a GPU
    unverified: str = ""  # why a GPU refuses it
    lora: str = ""
    kind: str = ""  # the kinds of the layers
    logprob_gap: float | None = None
    seconds: float = 0.0
    details: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value not in ("", None, {})}


class Wrong(Exception):
    """A result differs from that of transformers."""


def check(name: str, folder: Path) -> Finding:
    start = time.perf_counter()
    finding = Finding(name)
    try:
        _check(name, folder, finding)
    except Wrong as error:
        finding.status, finding.reason = "wrong", str(error)
    except ModelError as error:
        finding.status, finding.reason = "refused", str(error)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        finding.status, finding.reason = "fails", f"{type(error).__name__}: {lines[0][:200]}"
        logging.getLogger(__name__).warning("%s", name, exc_info=True)
    finding.seconds = round(time.perf_counter() - start, 1)
    return finding


def _check(name: str, folder: Path, finding: Finding) -> None:
    try:
        model = build(name)
        finding.name = type(model).__name__
        model.save_pretrained(folder / "model")
        TOKENIZER.save_pretrained(folder / "model")
        model = type(model).from_pretrained(folder / "model").eval()  # the reference uses the files
        expected = _generated(model)
    except Exception as error:
        finding.status, finding.reason = "not built", f"transformers: {type(error).__name__}: {str(error)[:120]}"
        with contextlib.suppress(StrictDataclassClassValidationError):
            check_config(tiny_config(name))  # a clear refusal needs no weights
        return
    finding.kind = ", ".join(sorted(set(getattr(model.config.get_text_config(), "layer_types", None) or [])))
    _full(folder, model, expected, finding)
    try:
        finding.lora = _lora(folder, finding)
    except ModelError as error:
        finding.lora = f"refused: {error}"


def _generated(model: Any) -> list[list[int]]:
    model.set_attn_implementation("eager")
    texts = []
    for prompt in random_prompts(1, *LENGTHS):
        ids = torch.tensor([prompt])
        settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": TOKENS, "eos_token_id": None}
        texts.append(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
    return texts


def train_config(folder: Path, **values: Any) -> TrainConfig:
    settings = {"model": str(folder / "model"), "device": "cpu", "learning_rate": 1e-3, **values}
    return TrainConfig(**settings)


def _full(folder: Path, model: Any, expected: list[list[int]], finding: Finding) -> None:
    train = train_config(folder)
    loaded = building.load(train)
    finding.unverified = loaded.decoder.unverified or ""
    finding.path, finding.decode = _gpu_paths(loaded)
    actual = greedy(loaded.decoder, random_prompts(1, *LENGTHS), TOKENS)
    if actual != expected:
        raise Wrong(f"greedy text differs: {actual} against {expected}")
    rollouts = sample(loaded.decoder)
    finding.logprob_gap = float(f"{_own_gap(model, rollouts):.1e}")
    if not finding.logprob_gap < LOGPROB_GAP:
        raise Wrong(f"log-probs differ from the model's own by {finding.logprob_gap}")
    train_step(train, loaded, rollouts, folder / "full")
    _same_keys(folder, type(model))


def _lora(folder: Path, finding: Finding) -> str:
    train = train_config(folder, lora=True, lora_rank=4)
    loaded = building.load(train)
    train_step(train, loaded, sample(loaded.decoder), folder / "lora")
    adapted = {name for name, p in loaded.decoder.model.named_parameters() if p.requires_grad}
    finding.details["adapted"] = _summary(adapted)
    from peft import PeftModel

    kind: Any = type(loaded.decoder.inner)
    base = kind.from_pretrained(folder / "model")
    PeftModel.from_pretrained(base, str(folder / "lora"))
    with safe_open(folder / "lora" / "adapter_model.safetensors", framework="pt") as file:
        saved = set(file.keys())
    if saved != {name.replace(".default", "") for name in adapted}:
        raise Wrong("the keys of the saved adapter differ")
    return "works"


def sample(decoder: Any) -> list[Rollout]:
    """Two groups of four, at temperature 1, in one batch."""
    prompts = random_prompts(0, 7, 30)
    requests = [ask(f"{g}/{i}", prompts[g], seed=10 * g + i, max_tokens=TOKENS) for g in (0, 1) for i in range(4)]
    answers = run(make_engine(decoder, eos_token_ids=(EOS,)), requests)
    return [
        as_rollout(int(key[2:]), one_turn(prompts[int(key[0])], answer), (-1.0) ** int(key[2:]), group=int(key[0]))
        for key, answer in sorted(answers.items())
    ]


@torch.no_grad()
def _own_gap(model: Any, rollouts: list[Rollout]) -> float:
    worst = 0.0
    for rollout in rollouts:
        (turn,) = rollout.turns
        prompt, answer = turn.prompt_ids, turn.completion
        ids = torch.tensor([prompt + answer.token_ids])
        logprobs = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(own - np.array(answer.logprobs)).max()))
    return worst


def _rows(rollouts: list[Rollout], share_prefixes: bool) -> list[Row]:
    return pack([rollout_samples(rollout) for rollout in rollouts], share_prefixes=share_prefixes).rows


def train_step(train: TrainConfig, loaded: building.LoadedModel, rollouts: list[Rollout], folder: Path) -> None:
    policy = building.make_policy(train, loaded, 1)
    metrics, _ = policy.forward_backward(_rows(rollouts, policy.shares_prefixes), grpo()).read()
    total, count = metrics["mismatch/k3"]
    if not total / count < K3:
        raise Wrong(f"sampler and trainer differ: k3 {total / count:.1e}")
    before = {name: master.detach().clone() for name, master in policy.optimizer.masters.items()}
    norm = policy.optim_step().get("optim/grad_norm", math.nan)
    moved = sum(not torch.equal(before[name], master) for name, master in policy.optimizer.masters.items())
    frozen = [name for name in before if "vision" in name or "visual" in name or "projector" in name]
    if frozen:
        raise Wrong(f"parts besides the text are trained: {frozen[:3]}")
    if not (norm > 0 and moved):
        raise Wrong(f"the step moved {moved} of {len(before)} tensors, gradient norm {norm}")
    building.PolicyFiles(policy, loaded.chat).export(folder)


def _same_keys(folder: Path, kind: type) -> None:
    """`final/` has the keys of the checkpoint, and the original class loads it."""
    keys = []
    for part in ("model", "full"):
        files = sorted((folder / part).glob("*.safetensors"))
        found: set[str] = set()
        for path in files:
            with safe_open(path, framework="pt") as file:
                found |= set(file.keys())
        keys.append(found)
    if keys[0] != keys[1]:
        raise Wrong(f"keys of final/ differ: {sorted(keys[0] ^ keys[1])[:4]}")
    _, info = kind.from_pretrained(folder / "full", output_loading_info=True)  # type: ignore[attr-defined]
    if info["missing_keys"] or info["unexpected_keys"]:
        raise Wrong(f"final/ loads with missing or unexpected keys: {info}")


def _gpu_paths(loaded: building.LoadedModel) -> tuple[str, str]:
    """The paths of a GPU with Triton, as far as they are known without one."""
    available, kernels.available = kernels.available, lambda on_gpu: True
    try:
        training = fused.why_not(loaded.decoder)
        from shoal.engine.decode import why_no_graphs

        cache = SlotCache(loaded.layers, 8, 16, torch.float32, torch.device("cpu"))
        decoding = why_no_graphs(loaded.decoder, cache)
    finally:
        kernels.available = available
    return "fused" if training is None else "modules", "graphs" if decoding is None else "eager"


def _summary(adapted: set[str]) -> list[str]:
    """The last part of the name of each adapted module."""
    return sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapted})
