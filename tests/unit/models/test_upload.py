"""Arrays are sent to the device with one copy per dtype and are unchanged."""

from __future__ import annotations

import numpy as np
import torch

from shoal.models.attention import upload

CPU = torch.device("cpu")


def test_values_shapes_dtypes_and_order() -> None:
    arrays = {
        "ids": np.array([3, 1, 2]),
        "heat": np.array([0.5, 1.0], dtype=np.float32),
        "square": np.arange(6).reshape(2, 3),
        "weights": np.array([1 / 3]),
        "none": np.zeros(0, dtype=np.float32),
    }
    found = upload(arrays, CPU)
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name].numpy(), array, strict=True)


def test_one_block_per_dtype() -> None:
    found = upload({"a": np.arange(3), "b": np.arange(2), "c": np.ones(1)}, CPU)
    blocks = {name: tensor.untyped_storage().data_ptr() for name, tensor in found.items()}
    assert blocks["a"] == blocks["b"] != blocks["c"]


def test_every_array_is_aligned() -> None:
    found = upload(
        {name: np.arange(size, dtype=np.int32) for name, size in zip("abcd", (1, 5, 4, 3), strict=True)}, CPU
    )
    assert [tensor.storage_offset() for tensor in found.values()] == [0, 4, 12, 16], "multiples of four int32"


def test_callers_arrays_are_not_modified() -> None:
    array = np.arange(3)
    upload({"a": array}, CPU)["a"].zero_()
    assert array.tolist() == [0, 1, 2]
