"""Scores any checkpoint on GSM8K's test questions: a model, an adapter, a run directory, output of the SFT scripts.

python examples/gsm8k/evaluate.py outputs/gsm8k-grpo/trial0 --num-examples 200
python examples/gsm8k/evaluate.py outputs/gsm8k-grpo/trial0 --against outputs/gsm8k-sft
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for arguments.py

from arguments import Parser, at_least, gsm8k

from shoal.cli.entry import main
from shoal.launcher import run


def arguments(words):
    parser = Parser(__doc__)
    parser.add_argument("model", help="folder, hub id, adapter, checkpoint or run directory")
    parser.add_argument("--against", help="a second checkpoint; the difference is paired by question")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl; default: openai/gsm8k from the hub")
    parser.add_argument("--num-examples", type=at_least(1), default=1319, help="number of test questions; 1319 = all")
    parser.add_argument("--samples", type=at_least(1), default=1, help="answers per question, for avg@k and pass@k")
    parser.add_argument("--temperature", type=at_least(0.0), default=0.0)
    parser.add_argument("--max-new-tokens", type=at_least(1), default=512)
    return parser.parse_args(words)


def command(args):
    words = ["eval", args.model, "--env", "gsm8k", "--num-examples", str(args.num_examples)]
    words += ["--rollouts-per-example", str(args.samples), "--temperature", str(args.temperature)]
    words += ["--max-tokens", str(args.max_new_tokens)]
    words += ["--against", args.against] if args.against else []
    return words + (["--arg", f"path={json.dumps(args.data, ensure_ascii=False)}"] if args.data else [])


def score(words):
    args = arguments(words)
    gsm8k(args.data)  # report errors in the data under the name --data
    sys.exit(main(command(args)))


if __name__ == "__main__":
    sys.exit(run(score))
