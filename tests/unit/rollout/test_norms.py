"""Noise for a server's norms: which tensors, how much, in which precision, and reproducible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal.core.errors import ConfigError
from shoal.rollout.remote.norm_noise import applied_sigma, write_noisy_norms
from support.models import small_model

NORMS = [
    "model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight",
    "model.layers.1.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight", "model.norm.weight",
]  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> Path:
    small_model("qwen3", seed=1).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def noisy(model: Path, target: Path, **changes: float) -> dict[str, torch.Tensor]:
    values = {"sigma": 0.1, "seed": 3, "version": 5, **changes}
    assert write_noisy_norms(model, target, values["sigma"], int(values["seed"]), int(values["version"])) == NORMS
    return load_file(target / "model.safetensors")


def test_noise_on_norms_has_the_configured_size(model: Path, tmp_path: Path) -> None:
    clean = load_file(model / "model.safetensors")
    found = noisy(model, tmp_path / "a")
    apart = torch.cat([found[name] - clean[name] for name in NORMS])
    assert len(apart) == 5 * 64
    # 320 draws: their mean is within 4 sigma/sqrt(320), and their spread within a few percent of sigma.
    assert abs(float(apart.mean())) < 0.1 * 4 / 320**0.5
    assert float(apart.std()) == pytest.approx(0.1, rel=0.15)


def test_noise_depends_on_seed_and_version(model: Path, tmp_path: Path) -> None:
    first, again = noisy(model, tmp_path / "a"), noisy(model, tmp_path / "b")
    assert all(torch.equal(first[name], again[name]) for name in NORMS)
    for change in ({"seed": 4}, {"version": 6}):
        other = noisy(model, tmp_path / "c", **change)
        assert not any(torch.equal(first[name], other[name]) for name in NORMS)
    assert not torch.equal(first[NORMS[0]] - 0, first[NORMS[1]])


def test_sigma_zero_takes_it_off(model: Path, tmp_path: Path) -> None:
    clean = load_file(model / "model.safetensors")
    assert all(torch.equal(tensor, clean[name]) for name, tensor in noisy(model, tmp_path / "a", sigma=0).items())


def test_bf16_is_rounded_as_torch_rounds(model: Path, tmp_path: Path) -> None:
    clean = load_file(model / "model.safetensors")
    exact = noisy(model, tmp_path / "a")
    apart = torch.cat([exact[name].double() - clean[name].double() for name in NORMS])
    assert applied_sigma(model, tmp_path / "a") == pytest.approx(float(apart.square().mean().sqrt()), rel=1e-6)
    save_file({name: tensor.bfloat16() for name, tensor in clean.items()}, model / "model.safetensors")
    found = noisy(model, tmp_path / "b")
    for name in NORMS:
        noise = exact[name].double() - clean[name].double()
        expected = (clean[name].bfloat16().float() + noise.float()).bfloat16()
        assert found[name].dtype == torch.bfloat16
        # The noise is known here to fp32 rounding, which very rarely crosses a bf16 boundary.
        assert (found[name] != expected).sum() <= 1
    assert applied_sigma(model, tmp_path / "b") == pytest.approx(0.1, rel=0.15)
    noisy(model, tmp_path / "b", sigma=1e-5)
    assert applied_sigma(model, tmp_path / "b") < 3e-6, "bf16 removes most of it by rounding"


def test_model_without_rms_norms_is_refused(model: Path, tmp_path: Path) -> None:
    config = json.loads((model / "config.json").read_text("utf-8"))
    del config["rms_norm_eps"]
    (model / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(ConfigError, match=r"train.noise_scheduler: .* has no RMSNorm"):
        write_noisy_norms(model, tmp_path / "a", 0.1, 0, 0)
