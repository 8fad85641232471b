"""Arrays on their way to the device: one copy a dtype, from pinned memory where there is a GPU, so nothing waits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor


def upload(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, Tensor]:
    """The same arrays as tensors on the device, each a view of one that holds all of its dtype."""
    found: dict[str, Tensor] = {}
    for dtype in sorted({array.dtype.str for array in arrays.values()}):
        members = {name: array for name, array in arrays.items() if array.dtype.str == dtype}
        whole = torch.from_numpy(np.concatenate([array.ravel() for array in members.values()]))
        if device.type == "cuda":
            # The allocator of pinned memory keeps a block until the copy out of it is done.
            whole = whole.pin_memory()
        pieces = whole.to(device, non_blocking=True).split([array.size for array in members.values()])
        for (name, array), piece in zip(members.items(), pieces, strict=True):
            found[name] = piece.view(array.shape)
    return {name: found[name] for name in arrays}
