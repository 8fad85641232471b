"""An MXFP4 checkpoint of gpt-oss is loaded as plain weights: 4-bit codes, low half first, times 2 ** (scale - 127)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from models.families import build
from shoal.models.decoder import Decoder
from shoal.models.load import load_model

VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([VALUES, -VALUES])


def quantised_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """Replace the experts of a tiny checkpoint by random codes; returns their values by name."""
    build("gpt_oss").save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    rng, expected = np.random.default_rng(0), {}
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = rng.integers(0, 256, (experts, rows, columns // 32, 16), dtype=np.uint8)
        scales = rng.integers(120, 126, (experts, rows, columns // 32), dtype=np.uint8)
        tensors |= {f"{name}_blocks": torch.from_numpy(blocks), f"{name}_scales": torch.from_numpy(scales)}
        codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(experts, rows, columns // 32, 32)
        plain = VALUES[codes] * 2.0 ** (scales[..., None].astype(int) - 127)
        expected[name] = torch.from_numpy(plain.reshape(experts, rows, columns)).transpose(1, 2)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def test_dequantised_experts_match_codes_and_save_as_plain_weights(tmp_path: Path) -> None:
    expected = quantised_checkpoint(tmp_path / "model")
    model: Any = load_model(str(tmp_path / "model"), torch.float32, torch.device("cpu"))
    found = dict(model.named_parameters())
    assert len(expected) == 8
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values.float(), rtol=0, atol=0)
    assert all(parameter.dtype == torch.float32 and parameter.requires_grad for parameter in found.values())
    Decoder(model).verify()
    model.save_pretrained(tmp_path / "final")
    assert "quantization_config" not in json.loads((tmp_path / "final" / "config.json").read_text())
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "final", output_loading_info=True)  # type: ignore[misc]
    assert not info["missing_keys"] and not info["unexpected_keys"]
