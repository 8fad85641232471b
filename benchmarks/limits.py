"""The limits of a device: its measured rates, and the minimal bytes and operations of a piece of work.

python benchmarks/limits.py [--smoke]     prints the measured rates as JSON

A limit counts weights read once per decode step, keys and values read and written once, states read and written in
each step, and two operations per weight and token. Of a mixture of experts it counts the experts that the tokens of a
step use if the router chooses evenly. Logits, activations and norms are not counted. `limit_bytes` and
`limit_operations` are in tokens/s, each as if nothing else took time. A fraction is the measured rate divided by the
lower limit.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Rates:
    """Measured on this device: a large copy, bytes read plus written, and a large matrix product."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True)
class Work:
    bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def least_s(self, rates: Rates) -> float:
        return max(self.bytes / rates.bytes_per_s, self.operations / rates.operations_per_s)

    def limits(self, rates: Rates, tokens: float, measured: float) -> dict[str, float]:
        """Tokens/s if only bytes or only operations took time, and the reached share of the lower limit."""
        by_bytes = tokens * rates.bytes_per_s / self.bytes
        by_operations = tokens * rates.operations_per_s / self.operations
        return {
            "limit_bytes": by_bytes,
            "limit_operations": by_operations,
            "fraction": measured / min(by_bytes, by_operations),
        }


@dataclass(frozen=True)
class ModelShape:
    parameters: int
    body_weights: int  # of linear layers in the body, used by every token
    head_weights: int  # of the output head, used only where a token is predicted
    layers: int  # with attention
    query_numbers: int  # heads times head size of the queries, per layer
    cache_numbers: int  # keys and values of one token, all layers
    adapter_numbers: int  # of adapters of rank 1 on every linear layer of the body
    element_bytes: int = 2
    expert_weights: int = 0  # of all experts, all layers
    experts: int = 1  # per layer
    experts_per_token: int = 1
    state_bytes: int = 0  # of one sequence, all layers
    windows: tuple[int, ...] = ()  # of the layers with a sliding window

    @classmethod
    def of(cls, config: Any, element_bytes: int = 2) -> ModelShape:
        """From a Hugging Face configuration, counted on a model without storage."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config)
        output = model.get_output_embeddings()
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not output]
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
        layers = sum(kind in ("full_attention", "sliding_attention") for kind in kinds)
        experts = next((n for key in _EXPERTS if (n := getattr(config, key, None))), 1)
        matrices = (p for name, p in model.named_parameters() if ".experts." in name and p.dim() == 3)
        return cls(
            parameters=sum(p.numel() for p in model.parameters()),
            body_weights=sum(m.weight.numel() for m in linear),
            head_weights=output.weight.numel(),
            layers=layers,
            query_numbers=config.num_attention_heads * dim,
            cache_numbers=2 * layers * config.num_key_value_heads * dim,
            adapter_numbers=sum(m.in_features + m.out_features for m in linear),
            element_bytes=element_bytes,
            expert_weights=sum(p.numel() for p in matrices),
            experts=experts,
            experts_per_token=config.num_experts_per_tok if experts > 1 else 1,
            state_bytes=kinds.count("linear_attention") * _state_bytes(config, element_bytes),
            windows=(getattr(config, "sliding_window", 0),) * kinds.count("sliding_attention"),
        )

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one token."""
        return self.cache_numbers * self.element_bytes

    @property
    def token_weights(self) -> float:
        """Weights of the body that one token uses."""
        return self.body_weights + self.expert_weights * self.experts_per_token / self.experts

    def step_weight_bytes(self, tokens: int) -> float:
        """Weights that a pass over this many tokens reads, without an untied input embedding, of which it reads a few
        rows.
        """
        used = 1 - (1 - self.experts_per_token / self.experts) ** tokens
        return (self.body_weights + self.expert_weights * used + self.head_weights) * self.element_bytes

    def keys(self, before: int, tokens: int) -> float:
        """Keys that `tokens` tokens after the first `before` attend to, averaged over the layers."""
        full = before * tokens + tokens * (tokens + 1) / 2
        windowed = (_keys_in_window(before, tokens, window) for window in self.windows)
        return (full * (self.layers - len(self.windows)) + sum(windowed)) / max(1, self.layers)

    def attention(self, keys: float) -> float:
        """Operations of attention to `keys` keys in total, all layers: one product with keys and one with values."""
        return 4.0 * self.layers * self.query_numbers * keys

    def decode(self, sequences: Sequence[tuple[int, int]], slots: int) -> Work:
        """(prompt, new tokens) of each sequence, at most `slots` at a time, with all slots always used. The prefill
        samples first tokens.

        Token t of a completion attends to prompt + t keys.
        """
        drawn = sum(new - 1 for _, new in sequences)
        keys = sum(self.keys(prompt, new - 1) for prompt, new in sequences)
        steps = max(-(-drawn // slots), max(new for _, new in sequences) - 1)
        weights = steps * self.step_weight_bytes(min(slots, len(sequences)))
        moved = weights + (keys + drawn) * self.cache_bytes + 2 * drawn * self.state_bytes
        return Work(moved, 2.0 * (self.token_weights + self.head_weights) * drawn + self.attention(keys))

    def prefill(self, prompts: Sequence[int], sequences: int) -> Work:
        """Different prompts of these lengths, whose keys and values are written to `sequences` sequences, evenly."""
        tokens = sum(prompts)
        keys = sum(self.keys(0, n) for n in prompts)
        operations = 2.0 * (self.token_weights * tokens + self.head_weights * sequences) + self.attention(keys)
        written = (tokens / len(prompts) * self.cache_bytes + self.state_bytes) * sequences
        return Work(self.step_weight_bytes(tokens) + written, operations)

    def train(self, tokens: int, adapter_parameters: int = 0) -> Work:
        """Forward and backward: 6 operations per parameter and token; 4 for a frozen base, which has no gradient.

        Weights are read in both directions, and an fp32 gradient is written for all trained weights.
        """
        used = self.parameters - self.expert_weights * (1 - self.experts_per_token / self.experts)
        operations = 4.0 * used + 6.0 * adapter_parameters if adapter_parameters else 6.0 * used
        trained = adapter_parameters or self.parameters
        return Work(2.0 * self.parameters * self.element_bytes + 4.0 * trained, operations * tokens)

    def optimizer_bytes(self, trained: int) -> float:
        """fp32 master and two moments read and written, the fp32 gradient read, the shared weight written."""
        return trained * (3 * 8.0 + 4.0 + self.element_bytes)


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _keys_in_window(before: int, tokens: int, window: int) -> float:
    """The same as `ModelShape.keys` in a layer that sees `window` tokens."""
    growing = min(max(window - before, 0), tokens)
    return before * growing + growing * (growing + 1) / 2 + window * (tokens - growing)


def _state_bytes(config: Any, element_bytes: int) -> int:
    """The state of one sequence in a layer with the gated delta rule: the recurrent state in fp32, and that of the
    convolution.
    """
    if not hasattr(config, "linear_num_value_heads"):
        return 0
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return 4 * values * config.linear_key_head_dim + element_bytes * (2 * keys + values) * config.linear_conv_kernel_dim


def measure_rates(smoke: bool = False) -> Rates:
    """On the GPU, or for a smoke test on the CPU with small sizes."""
    import torch

    device = torch.device("cpu" if smoke else "cuda")
    if smoke:
        torch.set_num_threads(1)
    size, numbers, repeats = (256, 1 << 20, 2) if smoke else (8192, 1 << 30, 20)
    source = torch.ones(numbers, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copied = 2 * numbers * 4 / _seconds(lambda: target.copy_(source), repeats, device)
    dtype = torch.float32 if smoke else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(left)
    multiplied = 2 * size**3 / _seconds(lambda: torch.mm(left, right, out=product), repeats, device)
    return Rates(copied, multiplied)


def _seconds(action: Any, repeats: int, device: Any) -> float:
    """The best of three means over `repeats`, after a warm-up."""
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        action()
    best = float("inf")
    for _ in range(3):
        wait()
        start = time.perf_counter()
        for _ in range(repeats):
            action()
        wait()
        best = min(best, (time.perf_counter() - start) / repeats)
    return best


if __name__ == "__main__":
    print(json.dumps(asdict(measure_rates("--smoke" in sys.argv))))
