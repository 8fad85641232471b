"""Settings for tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def whole_fp32() -> Iterator[None]:
    """TF32 keeps ten bits of a product. Parity in fp32 needs full fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
