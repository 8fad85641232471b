"""Costs and savings of each precision on a real model: bytes of weights, and differences of log-probs.

python benchmarks/precision.py MODEL OUT.json [NEW_TOKENS]

Each precision samples 16 answers, and scores its own tokens and those of the original model. `sampler` compares the
policy with the log-probs of its sampler, the mismatch in GRPO. `base` compares it with the original model.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import write_result

from shoal.core.batching import Packing, make_batches, rollout_samples
from shoal.core.types import Prompt, Request, Rollout, Row, SamplingParams, Turn
from shoal.engine.engine import EmbeddedEngine, EngineSettings
from shoal.models import fp8_linear as hybrid
from shoal.models.chat import Chat
from shoal.models.decoder import Decoder
from shoal.models.load import load_model
from shoal.models.lora import trained_parameters
from shoal.models.quantize import quantise_linears
from shoal.models.sampler_view import SamplerView
from shoal.models.tokenizer import eos_token_ids, load_tokenizer
from shoal.trainer.optimizer import AdamSettings, MasterAdamW, Schedule
from shoal.trainer.policy import TrainedPolicy

ASKED = ("What is 17 + 26?", "Write a haiku about the sea.", "Explain why the sky is blue.", "List three colours.")
GROUP = 4


class Bench:
    def __init__(self, name: str, new_tokens: int) -> None:
        self.new_tokens = new_tokens
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.model = load_model(name, self.dtype, self.device)
        self.chat = Chat(load_tokenizer(name))
        self.ends = eos_token_ids(self.model, self.chat.tokenizer)
        self.layers = Decoder(self.model).verify()
        self.published = self.answers(Decoder(self.model))

    def answers(self, decoder: Decoder) -> list[Row]:
        """Four prompts with four answers each, as rows with the sampler's log-probs."""
        switch = hybrid.scoring_switch(decoder.model)
        # The fused path reads weights without the layers, which is right unless it samples in FP8.
        settings = EngineSettings(16, 256, eos_token_ids=self.ends, fused=switch is None or not switch.on)
        engine = EmbeddedEngine(SamplerView(decoder), self.layers, settings, self.chat.text)
        prompts = [self.chat.prompt_ids([{"role": "user", "content": text}]) for text in ASKED]
        for number, ids in enumerate(prompts):
            for i in range(GROUP):
                engine.add(
                    Request(f"{number} {i}", ids, SamplingParams(max_tokens=self.new_tokens, seed=10 * number + i))
                )
        rollouts = []
        while engine.busy:
            for done in engine.step():
                number, i = map(int, done.request_id.split())
                turns = [Turn(prompts[number], done, 1.0)]
                rollouts.append(Rollout(Prompt("bench", number, []), i, turns, advantage=1.0))
        rollouts.sort(key=lambda rollout: rollout.rollout_id)
        samples = [rollout_samples(rollout) for rollout in rollouts]
        (batch,) = make_batches(samples, Packing(512, "token-mean", self.new_tokens))
        return batch.rows

    def measure(self, prepare: Any) -> dict[str, Any]:
        model = copy.deepcopy(self.model)
        prepare(model)
        decoder = Decoder(model)
        own = gap(decoder, self.answers(decoder))
        return {"weight_bytes": decoder.weight_bytes, "sampler": own, "base": gap(decoder, self.published)}


def gap(decoder: Decoder, rows: list[Row]) -> dict[str, float]:
    policy = TrainedPolicy(decoder, MasterAdamW(trained_parameters(decoder.model), AdamSettings()), Schedule(0.0, 1))
    found = [(ours - row.sampler_logprobs)[row.loss_mask] for row in rows for ours in policy.logprobs([row]).read()[1]]
    moved = np.concatenate(found).astype(np.float64)
    ratio = np.exp(moved)
    return {
        "tokens": len(moved),
        "mean_abs": float(np.abs(moved).mean()),
        "max_abs": float(np.abs(moved).max()),
        "k3": float((ratio - 1 - moved).mean()),
        "beyond_clip_0.2": float((np.abs(ratio - 1) > 0.2).mean()),
    }


def sample_in_fp8_too(model: Any) -> None:
    """A rejected variant: docs/log.md."""
    hybrid.convert(model)
    switch = hybrid.scoring_switch(model)
    assert switch is not None
    switch.on = True


def main(name: str, out: Path, new_tokens: int = 64) -> None:
    bench = Bench(name, new_tokens)
    cases = {
        "plain": lambda model: None,
        "fp8-hybrid": hybrid.convert,
        "fp8-hybrid, sampled in FP8 too": sample_in_fp8_too,
        **{f"stored as {f}": lambda m, f=f: quantise_linears(m, f, bench.device) for f in ("fp8", "nf4", "fp4")},
    }
    result = {"model": Path(name).name, "dtype": str(bench.dtype).removeprefix("torch."), "new_tokens": new_tokens}
    rows: dict[str, Any] = {}
    for case, prepare in cases.items():
        rows[case] = bench.measure(prepare)
        own, base = rows[case]["sampler"], rows[case]["base"]
        size = f"{rows[case]['weight_bytes'] / 1e6:.1f} MB"
        print(f"{case}: {size}, k3 {own['k3']:.1e} to its sampler, {base['k3']:.1e} to the base", flush=True)
        write_result(out, {**result, "precisions": rows})


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
