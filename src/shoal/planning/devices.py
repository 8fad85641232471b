"""The declared numbers of `shoal plan`: rates and memory of devices, and the constants of the time model.

The H200's rates are those that benchmarks/limits.py measured. The rates of other devices are those of their data sheets
times the shares that the H200 reached of its own data sheet; they are not measured. The constants are fitted by
benchmarks/plan_errors.py, which also compares every prediction with the recorded runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.core.errors import ConfigError

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
