"""Shoal post-trains language models with GRPO. Importing the package loads no torch."""

__version__ = "0.1.0"
