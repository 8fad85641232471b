"""Declared numbers of `shoal plan`, and the time of prefills, decode steps and training passes computed from them.

Each part of a step adds the time of its matrix products, of the bytes that it moves and of its kernel starts. Sizes
that cost no measurable time are left out.
The rates of the H200 are those that benchmarks/limits.py measured. The rates of other devices are those of their data
sheets times the shares that the H200 reached of its own data sheet; they are not measured. The constants are fitted by
benchmarks/plan_errors.py, which also compares every prediction with the recorded runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.planning.shapes import ModelShape

GIB = 2**30
H200_SHEET = (4.8e12, 989e12)  # bytes/s, bf16 operations/s without sparsity
H200_MEASURED = (4.26e12, 796e12)  # a large copy, and a product of 8192 x 8192 matrices


@dataclass(frozen=True)
class Device:
    name: str
    title: str
    bytes_per_s: float
    operations_per_s: float
    memory_gib: float
    link_bytes_per_s: float  # to the other devices of a machine, one direction
    measured: bool = False
    note: str = ""

    @property
    def source(self) -> str:
        return "measured rates" if self.measured else "rates from the data sheet, not measured"


def _from_sheet(
    name: str, title: str, sheet: tuple[float, float], memory_gib: float, link: float, note: str = ""
) -> Device:
    shares = [measured / stated for measured, stated in zip(H200_MEASURED, H200_SHEET, strict=True)]
    return Device(name, title, sheet[0] * shares[0], sheet[1] * shares[1], memory_gib, link, note=note)


DEVICES = {
    device.name: device
    for device in (
        Device("h200", "NVIDIA H200", *H200_MEASURED, 139.8, 450e9, measured=True),
        _from_sheet("h100", "NVIDIA H100 SXM, 80 GB", (3.35e12, 989e12), 79.1, 450e9),
        _from_sheet("a100", "NVIDIA A100 SXM, 80 GB", (2.039e12, 312e12), 79.1, 300e9),
        _from_sheet("4090", "NVIDIA RTX 4090, 24 GB", (1.008e12, 165e12), 23.5, 32e9),
        _from_sheet("t4", "NVIDIA T4, 16 GB", (0.32e12, 65e12), 14.6, 16e9, "no bf16 units: the rate is that of fp16"),
    )
}  # fmt: skip


def find_device(name: str) -> Device:
    found = DEVICES.get(name.lower())
    if found is None:
        raise ConfigError(f"command line: --gpu: there is no device {name!r}; known: {', '.join(DEVICES)}")
    return found


@dataclass(frozen=True)
class Constants:
    """Of the time model. Efficiencies are shares of the device's rates."""

    products: float  # share of the bf16 rate that matrix products reach
    attention: float  # share of the bf16 rate that attention reaches
    bandwidth: float  # share of the copy bandwidth that reading weights, keys and values reaches
    decode_layer_s: float  # time per layer of a decode step that depends on nothing else: starts of kernels
    adapter_layer_s: float  # the same, added by unmerged adapters
    prefill_layer_s: float  # host time per layer of a prefill, which is launched kernel by kernel
    activations: float  # measured over counted bytes of activations
    backward_activations: float  # the same of forward and backward, relative to the forward pass alone
    adapter_activations: float  # times that training reads or writes inputs of adapted layers
    eager_layer_s: float  # host time per layer of a training pass that is not captured as a CUDA graph
    eager_adapter_layer_s: float  # the same with adapters
    optimizer_s: float  # host time of an optimizer step
    rollout_s: float  # host time per rollout while sampling: templates, text, the environment
    packing_s: float  # host time per rollout while training: rows, advantages, metrics
    other_s: float  # host time per rollout for rewards, publishing weights and the loop


CONSTANTS = Constants(
    products=0.85,
    attention=0.289,
    bandwidth=0.952,
    decode_layer_s=2.89e-05,
    adapter_layer_s=0.0001,
    prefill_layer_s=0.000119,
    activations=1.08,
    backward_activations=4.15,
    adapter_activations=5.91,
    eager_layer_s=0.005,
    eager_adapter_layer_s=0.009,
    optimizer_s=0.00742,
    rollout_s=0.000518,
    packing_s=0.000429,
    other_s=0.000201,
)

# Not fitted: assumptions about several devices, printed with each extrapolation.
DEVICES_PER_MACHINE = 8
NETWORK_BYTES_PER_S = 50e9  # per device between machines, one direction (400 Gbit/s)
LINK_SHARE = 0.7  # share of a link's rate that collectives reach
ALL_REDUCE_S = 10e-6  # latency of one all-reduce of tensor parallelism, two per layer


BACKWARD = 3  # forward and backward, relative to the forward pass
BACKWARD_FROZEN = 2  # of frozen weights, which need no gradient
LOGIT_PASSES = 4  # times that a decode step reads or writes its logits
TRAINED_LOGIT_PASSES = 8
OPTIMIZER_BYTES = 30  # per trained weight: master and two moments read and written, gradient read, weight written
PUBLISHED_BYTES = 4  # per trained weight: the sampler's copy is read and written


@dataclass(frozen=True)
class Rollouts:
    """Completions of one step on one engine."""

    count: int
    prompts: int  # distinct; the prompt of a group is computed once
    prompt_tokens: float
    new_tokens: float  # mean
    longest: float  # the longest completion decides how many decode steps there are
    slots: int

    @property
    def drawn(self) -> float:
        """Tokens drawn in decode steps; the first token of a completion comes from the prefill."""
        return self.count * (self.new_tokens - 1)

    @property
    def steps(self) -> float:
        return max(self.drawn / min(self.slots, self.count), self.longest - 1)

    @property
    def keys(self) -> float:
        """Keys that all decode steps read. Unequal lengths are taken as geometric, which longer ones dominate."""
        square = self.new_tokens**2
        if self.longest > self.new_tokens:
            square = min(2 * square, self.longest * self.new_tokens)
        return self.drawn * self.prompt_tokens + self.count * square / 2


@dataclass(frozen=True)
class TimeModel:
    shape: ModelShape
    device: Device
    constants: Constants
    tensor_parallel: int = 1  # devices that share one copy of the model while sampling

    @property
    def _activation_bytes(self) -> float:
        """Of a forward pass, per token: what the kernels between and inside matrix products read and write."""
        shape = self.shape
        numbers = 10 * shape.hidden + 4 * (shape.queries + 2 * shape.keys) + 6 * shape.inner
        return 2.0 * shape.layers * numbers * self.constants.activations

    def _products_s(self, operations: float) -> float:
        return operations / (self.constants.products * self.device.operations_per_s)

    def _bytes_s(self, size: float) -> float:
        return size / (self.constants.bandwidth * self.device.bytes_per_s)

    def _attention_s(self, tokens: float, keys: float) -> float:
        """Two products over `keys` keys per token, of which the causal mask leaves half."""
        operations = 4.0 * self.shape.layers * self.shape.queries * tokens * keys / 2
        return operations / (self.constants.attention * self.device.operations_per_s)

    def decode_s(self, rollouts: Rollouts, adapters: bool = False) -> float:
        """All decode steps. Reading weights and multiplying overlap: the longer of the two counts."""
        shape, constants = self.shape, self.constants
        if rollouts.steps < 1:
            return 0.0
        rows = rollouts.drawn / rollouts.steps
        starts = shape.layers * (constants.decode_layer_s + adapters * constants.adapter_layer_s)
        weights = max(self._bytes_s(2.0 * shape.product_weights), self._products_s(2.0 * shape.product_weights * rows))
        moved = rollouts.keys * shape.key_value_bytes / rollouts.steps
        moved += rows * 2.0 * LOGIT_PASSES * shape.vocab  # activations stay in the cache of the device
        return rollouts.steps * (starts + (weights + self._bytes_s(moved)) / self.tensor_parallel)

    def prefill_s(self, rollouts: Rollouts) -> float:
        shape = self.shape
        tokens = rollouts.prompts * rollouts.prompt_tokens
        operations = 2.0 * (shape.layers * shape.layer_weights * tokens + shape.head_weights * rollouts.count)
        copied = rollouts.count * rollouts.prompt_tokens * shape.key_value_bytes
        busy = self._products_s(operations) + self._attention_s(tokens, rollouts.prompt_tokens)
        busy += self._bytes_s(tokens * self._activation_bytes + copied)
        return shape.layers * self.constants.prefill_layer_s + busy / self.tensor_parallel

    def forward_s(self, tokens: float, sequence: float) -> float:
        """Log-probs of given tokens."""
        operations = 2.0 * self.shape.product_weights * tokens
        moved = tokens * (self._activation_bytes + 2.0 * LOGIT_PASSES * self.shape.vocab)
        return self._products_s(operations) + self._attention_s(tokens, sequence) + self._bytes_s(moved)

    def train_s(
        self, tokens: float, scored: float, sequence: float, adapter_rank: int = 0, again: bool = False
    ) -> float:
        """Forward and backward of `tokens` tokens, `scored` of them in the loss; `again`: activation checkpointing."""
        shape = self.shape
        passes = (BACKWARD_FROZEN if adapter_rank else BACKWARD) + again
        weights = shape.layers * shape.layer_weights * tokens + shape.head_weights * scored
        operations = 2.0 * passes * weights
        operations += 6.0 * adapter_rank * shape.adapter_rank_numbers * tokens
        moved = (self.constants.backward_activations + again) * tokens * self._activation_bytes
        moved += 2.0 * TRAINED_LOGIT_PASSES * shape.vocab * scored
        if adapter_rank:
            moved += 2.0 * self.constants.adapter_activations * tokens * self._adapted_numbers
        attention = (BACKWARD + again) * self._attention_s(tokens, sequence)
        return self._products_s(operations) + attention + self._bytes_s(moved)

    @property
    def _adapted_numbers(self) -> float:
        """Inputs and outputs of the adapted layers, per token."""
        return self.shape.adapter_rank_numbers

    def eager_s(self, adapters: bool, again: bool = False) -> float:
        """Host time to launch one training pass kernel by kernel: its least time unless it is a CUDA graph."""
        layer = self.constants.eager_adapter_layer_s if adapters else self.constants.eager_layer_s
        return self.shape.layers * layer * (4 / 3 if again else 1)

    def optimizer_s(self, trained: float) -> float:
        return self.constants.optimizer_s + self._bytes_s(OPTIMIZER_BYTES * trained)

    def publish_s(self, trained: float) -> float:
        return self._bytes_s(PUBLISHED_BYTES * trained)
