"""Arrays on their way to the device: one copy a dtype, from pinned memory where there is a GPU, so nothing waits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

# Each array begins at a multiple of this: kernels are compiled anew for pointers that are not aligned.
ALIGNMENT_BYTES = 16


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The same arrays as tensors on the device, each a view of one that holds all of its dtype."""
    found: dict[str, Tensor] = {}
    for dtype in sorted({array.dtype.str for array in arrays.values()}):
        members = {name: array for name, array in arrays.items() if array.dtype.str == dtype}
        multiple = max(1, ALIGNMENT_BYTES // np.dtype(dtype).itemsize)
        starts = np.cumsum([0, *(-(-array.size // multiple) * multiple for array in members.values())]).tolist()
        whole = np.zeros(starts[-1], dtype)
        for start, array in zip(starts, members.values(), strict=False):
            whole[start : start + array.size] = array.ravel()
        there = _copy(torch.from_numpy(whole), device)
        for start, (name, array) in zip(starts, members.items(), strict=False):
            found[name] = there[start : start + array.size].view(array.shape)
    return {name: found[name] for name in arrays}


def _copy(whole: Tensor, device: torch.device) -> Tensor:
    # The allocator of pinned memory keeps a block until the copy out of it is done.
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole.to(device)
