"""Models that load, models that are refused and the messages, and the ids that end an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CohereConfig,
    DiffLlamaConfig,
    FalconH1Config,
    GPT2Config,
    Llama4TextConfig,
    MambaConfig,
    MptConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2VLConfig,
    SeedOssConfig,
    StableLmConfig,
    T5Config,
)

from shoal.core.errors import ModelError
from shoal.models import decoder as decoder_module
from shoal.models import fused, kernels
from shoal.models.decoder import Decoder
from shoal.models.load import adopt_model, load_model, release_model
from shoal.models.precision import Precision
from shoal.models.random_models import character_tokenizer
from shoal.models.tokenizer import eos_token_ids, files_fingerprint, load_tokenizer
from support.models import CONFIGS, EOS, TOKENIZER, VOCABULARY, randomise, small_model

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": EOS, "pad_token_id": 0, "bos_token_id": None,
}  # fmt: skip
MAMBA: dict[str, Any] = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}

# Refused from the config, before any weights are read.
BY_CONFIG: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "llama4": (lambda: Llama4TextConfig(**SHAPE), "chunked_attention layers"),
    "qwen2-vl": (Qwen2VLConfig, "multimodal"),
    "phi-3.5-moe": (PhimoeConfig, "at random in training"),
    "t5": (T5Config, "encoder-decoder"),
}
# Refused after running the model, before anything is sampled.
BY_PROBE: dict[str, tuple[Callable[[], PreTrainedConfig], str]] = {
    "mamba": (lambda: MambaConfig(**SHAPE), "no attention or state"),
    "stablelm": (lambda: StableLmConfig(**SHAPE), "cannot run with Shoal's attention: .* without a context"),
    "diffllama": (lambda: DiffLlamaConfig(**SHAPE), "attends more than once"),
    "mpt": (lambda: MptConfig(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4), "no attention or state"),
    "mpt, scale by name": (
        lambda: MptConfig(vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, logit_scale="inv_sqrt_d_model"),
        "logit_scale 'inv_sqrt_d_model'",
    ),
    "bloom": (lambda: BloomConfig(vocab_size=VOCABULARY, hidden_size=64, n_layer=2, n_head=4), "no attention or state"),
}


def load(folder: Path) -> Any:
    return load_model(str(folder), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", BY_CONFIG)
def test_refused_from_the_config(name: str, tmp_path: Path) -> None:
    make, said = BY_CONFIG[name]
    config = make()
    config.architectures = ["TheirModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"TheirModel .*{said}"):
        load(tmp_path)  # there are no weights: the check must come first


@pytest.mark.parametrize("name", BY_PROBE)
def test_refused_after_a_probe(name: str, tmp_path: Path) -> None:
    make, said = BY_PROBE[name]
    model = AutoModelForCausalLM.from_config(make())
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said) as refused:
        Decoder(load(tmp_path)).verify()
    assert type(model).__name__.removesuffix("ForCausalLM") in str(refused.value)


DROPOUT: dict[str, Callable[[], PreTrainedConfig]] = {
    "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=2, n_head=4),  # nn.Dropout modules
    "seed_oss": lambda: SeedOssConfig(**SHAPE, residual_dropout=0.1),  # functional.dropout
}


@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_of_the_model_is_off_in_training(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    randomise(AutoModelForCausalLM.from_config(DROPOUT[name]()), seed=0).save_pretrained(tmp_path)
    model = load(tmp_path).train()
    ids = torch.arange(12)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert "dropout" in caplog.text
    assert model.config.to_diff_dict() == type(model.config).from_pretrained(tmp_path).to_diff_dict()


def test_model_object_regains_its_dropout() -> None:
    model: Any = AutoModelForCausalLM.from_config(DROPOUT["seed_oss"]())
    adopted: Any = adopt_model(model, Precision(torch.device("cpu"), torch.float32))
    assert {layer.mlp.residual_dropout for layer in adopted.model.layers} == {0.0}
    release_model(model)
    assert {layer.mlp.residual_dropout for layer in model.model.layers} == {0.1}


def test_families_without_a_fused_path_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: GPT-2 names its layers differently from the families on the fused path."""
    monkeypatch.setattr(kernels, "available", lambda on_gpu: True)
    decoder = Decoder(AutoModelForCausalLM.from_config(DROPOUT["gpt2"]()))
    assert "GPT2LMHeadModel" in (fused.why_not(decoder) or "")


def test_logit_scale_is_applied() -> None:
    """Granite divides its logits by a number, which the tests of all architectures cover. Cohere multiplies them."""
    model = randomise(AutoModelForCausalLM.from_config(CohereConfig(**SHAPE, logit_scale=0.25)), seed=0)
    decoder = Decoder(model)
    assert len(decoder.verify()) == 2 and decoder.logit_scale == 0.25 and decoder.head.weight is None


def test_state_leak_between_sequences_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Falcon-H1 has attention in every layer and a recurrent state beside it, whose calls are not redirected here."""
    monkeypatch.setattr(decoder_module, "attach", lambda body: False)
    model = randomise(AutoModelForCausalLM.from_config(FalconH1Config(**SHAPE, **MAMBA)), seed=0)
    with pytest.raises(ModelError, match=r"FalconH1ForCausalLM: .* differ"):
        Decoder(model).verify()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_folder_loads_in_the_requested_dtype(architecture: str, tmp_path: Path) -> None:
    model = small_model(architecture)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        loaded = load_model(str(tmp_path), dtype, torch.device("cpu"))
        assert not loaded.training and {p.dtype for p in loaded.parameters()} == {dtype}
        for (name, ours), theirs in zip(model.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(ours.to(dtype), theirs), name


def test_code_in_a_model_folder_is_not_executed(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    for attempt in (load, lambda folder: load_tokenizer(str(folder))):
        with pytest.raises(ModelError, match="auto_map"):
            attempt(tmp_path)


@pytest.mark.parametrize("name", ("/no/such/folder", "./nowhere", "~/nowhere-at-all", "a/b/c"))
def test_missing_folder(name: str) -> None:
    for attempt in (load_tokenizer, lambda n: load_model(n, torch.float32, torch.device("cpu"))):
        with pytest.raises(ModelError, match="does not exist"):
            attempt(name)


def test_folders_with_something_else_in_them(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json and not exactly one .gguf"):
        load(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"not a GGUF file at all")
    for name in (tmp_path, tmp_path / "model.gguf"):
        with pytest.raises(ModelError, match="no model could be loaded from"):
            load(name)
        with pytest.raises(ModelError, match="no tokenizer could be loaded from"):
            load_tokenizer(str(name))
    (tmp_path / "other.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="not exactly one"):
        load(tmp_path)


def test_broken_weights_and_configs(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(ModelError, match="no model could be loaded from"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(ModelError, match="no model could be loaded from"):
        load(tmp_path)
    for text in ("{", "[1]", "7"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match="not a valid model config"):
            load(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_with_nan(value: float) -> None:
    """One nan is enough, and the message names it."""
    model = small_model("llama")
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if "down_proj" in name)[0, 0] = value
    with pytest.raises(ModelError, match=r"not finite; .* overflow in torch\.float32"):
        Decoder(model).verify()


def test_tokenizer_without_a_chat_template(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))
    bare = character_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no chat template"):
        load_tokenizer(str(tmp_path))


def test_every_declared_end_and_the_template_s_own() -> None:
    model, tokenizer = small_model("llama"), character_tokenizer()
    assert eos_token_ids(model, tokenizer) == (EOS,)
    tokenizer.eos_token = "<|endoftext|>"  # the tokenizer and the template end turns with different tokens
    assert eos_token_ids(None, tokenizer) == (0, EOS)
    model.generation_config.eos_token_id = [5, 7]
    assert eos_token_ids(model, tokenizer) == (0, EOS, 5, 7)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    assert eos_token_ids(None, tokenizer) == (0,), "a line break does not end an answer"
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="end-of-sequence"):
        eos_token_ids(None, tokenizer)


def test_misspelled_folder_is_not_looked_up_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`models/tny` if `models/` exists here: a path was meant, and the hub is not asked."""
    (tmp_path / "models" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ModelError, match='"models/tny" does not exist; did you mean "models/tiny"'):
        load_tokenizer("models/tny")


def test_models_of_equal_name_have_different_fingerprints(tmp_path: Path) -> None:
    """Everything that a resume reads again counts. Modification times and other files do not."""
    (tmp_path / "config.json").write_text("{}")
    weights = bytearray(8 << 20)
    (tmp_path / "model.safetensors").write_bytes(weights)
    first = files_fingerprint(str(tmp_path))
    for name in ("README.md", "results.json", "notes.txt"):
        (tmp_path / name).write_text("about a model")
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    os.utime(tmp_path / "model.safetensors", (0, 0))
    assert files_fingerprint(str(tmp_path)) == first is not None
    marks = {first}
    for change in (bytes([1]) * (8 << 20), weights[:-1], bytes(4 << 20) + b"\1" * (4 << 20)):
        (tmp_path / "model.safetensors").write_bytes(change)
        marks.add(files_fingerprint(str(tmp_path)))
    (tmp_path / "tokenizer.json").write_text("{}")
    marks.add(files_fingerprint(str(tmp_path)))
    assert len(marks) == 5
    assert files_fingerprint("Qwen/Qwen3-0.6B") is None, "weights on the hub are not on this machine"
