"""Loading and running Hugging Face decoders: one model, one attention function, three modes."""

import os

# Progress is Shoal's own to show; transformers reads this before its first import.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
