"""Seconds of the parts of a step on one device: prefill, decode steps, training passes, the optimizer step.

Each part adds the time of its matrix products, of the bytes that it moves and of its kernel starts. Sizes that cost no
measurable time are left out. Efficiencies come from `Constants`.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.planning.devices import Constants, Device
from shoal.planning.shapes import ModelShape

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
