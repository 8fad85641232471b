"""Scores any checkpoint on GSM8K's test questions: a model, an adapter, a run directory, what the SFT scripts saved.

python examples/gsm8k/evaluate.py outputs/gsm8k-grpo/trial0 --num-examples 200
python examples/gsm8k/evaluate.py outputs/gsm8k-grpo/trial0 --against outputs/gsm8k-sft
"""

import argparse
import sys

from shoal.cli import main


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, hub id, adapter, checkpoint or run directory")
    parser.add_argument("--against", help="a second one; the difference is paired by question")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl; openai/gsm8k from the hub unless given")
    parser.add_argument("--num-examples", type=int, default=1319, help="test questions; 1319 is all of them")
    parser.add_argument("--samples", type=int, default=1, help="answers a question, for avg@k and pass@k")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    return parser.parse_args()


def command(args):
    words = ["eval", args.model, "--env", "gsm8k", "--num-examples", str(args.num_examples)]
    words += ["--rollouts-per-example", str(args.samples), "--temperature", str(args.temperature)]
    words += ["--max-tokens", str(args.max_new_tokens)]
    words += ["--against", args.against] if args.against else []
    return words + (["--arg", f"path={args.data}"] if args.data else [])


if __name__ == "__main__":
    sys.exit(main(command(arguments())))
