"""GRPO on arithmetic with `GRPOTrainer`: each item has a prompt and computes the reward of a completion.

    python examples/grpo_trainer_math.py --model Qwen/Qwen2.5-0.5B-Instruct
    accelerate launch --num_processes 2 examples/grpo_trainer_math.py --model Qwen/Qwen2.5-0.5B-Instruct

With two processes, each samples `batch_size` prompts per step, and both train one model. On a machine without GPUs they
run on the CPU.
"""

from __future__ import annotations

import argparse
import random
import re
from dataclasses import dataclass

from shoal import GRPOTrainer


@dataclass
class Sum:
    """One addition. If `get_reward` returns None, the completion is left out of its group."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        return f"What is {self.a} + {self.b}? Answer with the number."

    def get_reward(self, completion: str) -> float | None:
        numbers = re.findall(r"\d+", completion)
        if not numbers:
            return 0.0
        return 1.0 if int(numbers[-1]) == self.a + self.b else 0.1


def sums(count: int, seed: int) -> list[Sum]:
    draw = random.Random(seed)
    return [Sum(draw.randint(1, 9), draw.randint(1, 9)) for _ in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="a folder or a hub id")
    parser.add_argument("--output-dir", default="outputs/grpo_trainer_math")
    parser.add_argument("--num-steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()
    trainer = GRPOTrainer(
        model=arguments.model,
        train_dataset=sums(400, seed=0),
        eval_dataset=sums(32, seed=1),
        eval_steps=10,
        num_steps=arguments.num_steps,
        group_size=4,
        batch_size=4,
        ppo_steps=1,
        clip_eps=0.2,
        kl_penalty=0.0,
        sampling_temperature=0.8,
        max_new_tokens=arguments.max_new_tokens,
        optimizer_args={"lr": arguments.learning_rate},
        max_grad_norm=1.0,
        output_dir=arguments.output_dir,
        saving_steps=10,
        log_completions=2,
        resume_from_checkpoint=arguments.resume,
        use_accelerate=True,
    )
    trainer.train()
    held_out = trainer.test()
    if held_out:
        print(f"held-out reward {held_out['mean']:.3f}; report: {trainer.output_dir / 'report.html'}")


if __name__ == "__main__":
    main()
