"""GRPO on GSM8K: four answers per question, reward 1 for the right number and 0 otherwise, no reward model.

python -m shoal.launcher.local examples/gsm8k/train_grpo.py --config examples/gsm8k/train_grpo.yaml \
    experiment_name=gsm8k-grpo-local trial_name=trial0 actor.path=Qwen/Qwen2.5-0.5B-Instruct
"""

import sys

from shoal.envs import answer_of
from shoal.launcher import load_config, run, train
from shoal.rewards.math_parser import process_results


def reward(task, messages):
    """Compare the last \\boxed{}, #### or "answer is" of the completion with the gold answer, by value."""
    correct, _ = process_results(answer_of(messages), str(task.data["answer"]))
    return float(correct)


def main(args):
    train(load_config(args, reward=reward))


if __name__ == "__main__":
    sys.exit(run(main))
