"""What tests on a GPU ask of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def whole_fp32() -> Iterator[None]:
    """TF32 keeps ten bits of a product; parity in fp32 means fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)
