"""Triton kernels of a decoder layer, of log-probs and of quantised weights. Tests compare each with plain torch."""

from __future__ import annotations

import importlib.util
import os


def available(on_cuda: bool) -> bool:
    """Whether kernels can run: on a GPU, or anywhere under Triton's interpreter."""
    if importlib.util.find_spec("triton") is None:
        return False
    return on_cuda or os.environ.get("TRITON_INTERPRET") == "1"
