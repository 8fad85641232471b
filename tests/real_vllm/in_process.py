"""Two steps of `GRPOTrainer(use_vllm=True)`, run by test_vllm.py in the Python with vLLM. Records the calls of vLLM.

python in_process.py MODEL OUTPUT_DIR full|lora
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from shoal import GRPOTrainer

LLM: Any = importlib.import_module("vllm").LLM
SEEN: dict[str, Any] = {"llm": {}, "sleep": [], "wake_up": []}


def letters(completion: str, **_: Any) -> float:
    return sum(c.isalpha() for c in str(completion)) / 10


def watch() -> None:
    """Record the calls of vLLM and forward them."""
    start, sleep, wake_up = LLM.__init__, LLM.sleep, LLM.wake_up

    def started(self: Any, *arguments: Any, **named: Any) -> None:
        SEEN["llm"] = {name: value for name, value in named.items() if isinstance(value, str | int | float | bool)}
        start(self, *arguments, **named)

    def slept(self: Any, **named: Any) -> Any:
        SEEN["sleep"].append(named)
        return sleep(self, **named)

    def woke(self: Any, **named: Any) -> Any:
        SEEN["wake_up"].append(named)
        return wake_up(self, **named)

    LLM.__init__, LLM.sleep, LLM.wake_up = started, slept, woke


NOISE = "{enabled: true, sigma_start: 0.2, sigma_end: 0.1, num_stages: 2}"  # none in the first step


def main(model: str, output_dir: str, kind: str) -> None:
    watch()
    trainer = GRPOTrainer(
        model,
        [{"prompt": f"{i} + {i} ="} for i in range(8)],
        letters,
        num_steps=2,
        group_size=4,
        batch_size=2,
        max_new_tokens=12,
        max_seq_len=96,
        sampling_temperature=1.0,
        optimizer_args={"lr": 5e-3},
        output_dir=output_dir,
        use_vllm=True,
        vllm_args={"enforce_eager": True, "max_num_seqs": 8},
        vllm_enable_sleep=True,
        lora=kind == "lora",
        lora_rank=4,
        lora_alpha=8,
        device="cpu",
        overrides=[] if kind == "lora" else [f"train.noise_scheduler={NOISE}"],
    )
    trainer.train()
    (Path(output_dir) / "seen.json").write_text(json.dumps(SEEN), "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
