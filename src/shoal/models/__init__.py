"""Loading and running Hugging Face decoders: one model, one attention function, three modes."""

import logging
import os

# Progress is Shoal's own to show; transformers reads this before its first import.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Optional libraries say at import which kernels of theirs this machine cannot load; peft imports them for any adapter.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
