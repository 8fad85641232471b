"""Supervised fine-tuning on GSM8K with the Hugging Face Trainer, for comparison with GRPO.

python examples/gsm8k/train_hf_trainer.py --model Qwen/Qwen2.5-0.5B-Instruct --output-dir outputs/gsm8k-hf
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for train_local_simple.py

import torch
from train_local_simple import arguments, collate, examples, load
from transformers import Trainer, TrainingArguments

from shoal.launcher import run
from shoal.runs.files import storage


def train(words):
    args = arguments(words, __doc__)
    model, tokenizer = load(args.model, torch.float32, "cpu")  # the Trainer moves it to its device
    rows = examples(args.data, tokenizer, args.max_length)
    with storage(f"create {args.output_dir} (--output-dir)"):  # fail before training, not after it
        args.output_dir.mkdir(parents=True, exist_ok=True)
    pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.output_dir),
            num_train_epochs=args.epochs,
            max_steps=args.max_steps or -1,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=args.seed,
            dataloader_num_workers=0,
        ),
        train_dataset=rows,
        data_collator=partial(collate, pad_id=pad_id),
    )
    trainer.train()
    trainer.save_model(str(args.output_dir))
    tokenizer.save_pretrained(args.output_dir)
    print(f"saved in {args.output_dir}; score it with evaluate.py {args.output_dir}")


if __name__ == "__main__":
    sys.exit(run(train))
