"""Loading and running Hugging Face decoders: one model, one attention function, three modes."""

import logging
import os

# Shoal shows its own progress bars. transformers reads this variable when it is first imported.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# peft imports these optional libraries for every adapter; each logs which of its kernels cannot be loaded here.
for _name in ("bitsandbytes", "torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
