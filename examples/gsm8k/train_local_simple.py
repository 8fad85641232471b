"""Supervised fine-tuning on GSM8K as a plain loop, for comparison with GRPO: cross-entropy on the answer tokens.

python examples/gsm8k/train_local_simple.py --model Qwen/Qwen2.5-0.5B-Instruct --output-dir outputs/gsm8k-sft
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for arguments.py

import torch
from arguments import Parser, at_least, folder, gsm8k, naming

from shoal.core.errors import ArgumentError
from shoal.launcher import run
from shoal.models.load import load_model
from shoal.models.tokenizer import load_tokenizer
from shoal.runs.files import storage

IGNORED = -100  # label that cross-entropy ignores


def arguments(words, description=__doc__):
    parser = Parser(description)
    parser.add_argument("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="folder or hub id")
    parser.add_argument("--data", help="folder with train.jsonl and test.jsonl; default: openai/gsm8k from the hub")
    parser.add_argument("--output-dir", type=folder, default="outputs/gsm8k-sft")
    parser.add_argument("--epochs", type=at_least(1), default=1)
    parser.add_argument("--max-steps", type=at_least(1), help="stop after this many steps")
    parser.add_argument("--batch-size", type=at_least(1), default=8)
    parser.add_argument("--lr", type=at_least(0.0), default=1e-5)
    parser.add_argument("--max-length", type=at_least(1), default=1024, help="longer examples are skipped and counted")
    parser.add_argument("--seed", type=at_least(0), default=0)
    return parser.parse_args(words)


def load(name, dtype, device):
    """Load the model and its tokenizer."""
    with naming("--model"):
        return load_model(name, dtype, torch.device(device)).train(), load_tokenizer(name)


def examples(data, tokenizer, max_length):
    """Token ids of question and worked answer, with labels that mask the question."""
    environment = gsm8k(data)
    found, too_long = [], 0
    for task in environment.tasks("train"):
        prompt = tokenizer.apply_chat_template(task.messages, tokenize=False, add_generation_prompt=True)
        answer = [*task.messages, {"role": "assistant", "content": environment.solution(task)}]
        whole = tokenizer.apply_chat_template(answer, tokenize=False)
        prompt_ids = tokenizer.encode(prompt, add_special_tokens=False)
        answer_ids = tokenizer.encode(whole.removeprefix(prompt), add_special_tokens=False)
        if len(prompt_ids) + len(answer_ids) > max_length:
            too_long += 1
            continue
        labels = [IGNORED] * len(prompt_ids) + answer_ids
        found.append({"input_ids": prompt_ids + answer_ids, "labels": labels})
    if not found:
        what = f"all {too_long} examples are longer than {max_length} tokens"
        raise ArgumentError(f"command line: --max-length: {what}; raise it")
    print(f"{len(found)} examples; {too_long} longer than {max_length} tokens are skipped")
    return found


def collate(batch, pad_id):
    """Pad on the right. Attention and loss ignore the padding."""
    longest = max(len(row["input_ids"]) for row in batch)

    def padded(row, name, filler):
        return row[name] + [filler] * (longest - len(row[name]))

    return {
        "input_ids": torch.tensor([padded(row, "input_ids", pad_id) for row in batch]),
        "labels": torch.tensor([padded(row, "labels", IGNORED) for row in batch]),
        "attention_mask": torch.tensor(
            [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch]
        ),
    }


def train(words):
    args = arguments(words)
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, tokenizer = load(args.model, torch.bfloat16 if device == "cuda" else torch.float32, device)
    rows = examples(args.data, tokenizer, args.max_length)
    with storage(f"create {args.output_dir} (--output-dir)"):  # fail before training, not after it
        args.output_dir.mkdir(parents=True, exist_ok=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    order, step = random.Random(args.seed), 0
    for _ in range(args.epochs):
        order.shuffle(rows)
        for start in range(0, len(rows), args.batch_size):
            batch = collate(rows[start : start + args.batch_size], pad_id)
            loss = model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            print(f"step {step}  loss {loss.item():.4f}")
            if step == args.max_steps:
                break
        if step == args.max_steps:
            break
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)
    print(f"saved in {args.output_dir}; score it with evaluate.py {args.output_dir}")


if __name__ == "__main__":
    sys.exit(run(train))
