"""The dtype and device of a run, and refusals with a setting that works. On a machine without a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from shoal.config.train import TrainConfig
from shoal.core.errors import HardwareError
from shoal.models.precision import SMALL_MODEL_PARAMETERS, choose


def train(**fields: Any) -> TrainConfig:
    return TrainConfig.model_validate({"model": "m", **fields})


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_default_dtype_on_a_cpu() -> None:
    chosen = choose(train())
    assert (chosen.device.type, chosen.dtype) == ("cpu", torch.float32)
    assert chosen.notice is not None and "no GPU" in chosen.notice
    chosen = choose(train(device="cpu", recipe="bf16"))
    assert (chosen.dtype, chosen.notice) == (torch.bfloat16, None)


def test_bf16_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert (choose(train()).device.type, choose(train()).dtype) == ("cuda", torch.bfloat16)
    assert choose(train(recipe="fp32")).dtype == torch.float32
    assert choose(train(device="cpu")).device.type == "cpu"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": "cuda"}, "use cpu"),
        ({"recipe": "fp8-hybrid"}, "use train.recipe=fp32"),
    ],
    ids=str,
)
def test_unsupported_precision_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(HardwareError, match=said):
        choose(train(**fields))


@pytest.mark.parametrize(
    ("fields", "stored"),
    [({}, None), ({"qlora_fp8": True}, "fp8"), ({"qlora_bnb": True}, "nf4"), ({"qlora_fp4": True}, "fp4")],
    ids=str,
)
def test_how_the_base_is_stored(fields: dict[str, Any], stored: str | None) -> None:
    if "qlora_bnb" in fields:
        pytest.importorskip("bitsandbytes", reason="an extra")
    chosen = choose(train(device="cpu", lora=True, **fields))
    assert (chosen.stored, chosen.dtype, chosen.fp8_products) == (stored, torch.float32, False)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_fp8_hybrid_is_bf16_with_fp8_products(hopper: None) -> None:
    pytest.importorskip("torchao", reason="an extra")
    chosen = choose(train(recipe="fp8-hybrid"))
    assert (chosen.dtype, chosen.fp8_products, chosen.stored) == (torch.bfloat16, True, None)
    chosen = choose(train(recipe="fp8-hybrid", lora=True, qlora_fp4=True))
    assert (chosen.dtype, chosen.fp8_products, chosen.stored) == (torch.bfloat16, False, "fp4")


def test_fp8_hybrid_needs_units_that_older_gpus_lack(hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(HardwareError, match=r"compute capability 8.9, this GPU has 8.0"):
        choose(train(recipe="fp8-hybrid"))
    assert choose(train(qlora_fp8=True, lora=True)).stored == "fp8", "storage does not need FP8 units"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"recipe": "fp8-hybrid"}, r"torchao: pip install 'shoal\[fp8\]'; or use train.recipe=bf16"),
        ({"optimizer": "adamw_8bit"}, r"bitsandbytes: pip install 'shoal\[bnb\]'; or use adamw"),
        ({"qlora_bnb": True, "lora": True}, r"bitsandbytes: pip install 'shoal\[bnb\]'; or leave it out"),
    ],
    ids=str,
)
def test_missing_package_is_named_with_its_extra(
    fields: dict[str, Any], said: str, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HardwareError, match=said):
        choose(train(**fields))


@pytest.mark.parametrize(
    ("parameters", "threads", "expected"),
    [(1000, None, "1"), (SMALL_MODEL_PARAMETERS, None, "many"), (1000, "2", "2")],
    ids=("small", "large", "the user's word"),
)
def test_small_models_run_on_one_thread(parameters: int, threads: str | None, expected: str) -> None:
    """In a separate process, because the number of threads is global."""
    program = (
        "import torch; torch.set_num_threads(3)\n" if threads is None else "import torch\n"
    ) + f"from shoal.models.precision import limit_threads; limit_threads({parameters}); print(torch.get_num_threads())"
    env = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    env |= {"OMP_NUM_THREADS": threads} if threads is not None else {}
    out = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ("3" if expected == "many" else expected)
