"""AdamW with fp32 masters: against the formula, and updates that bf16 parameters would lose."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from shoal.trainer.optimizer import AdamSettings, MasterAdamW

SETTINGS = AdamSettings(beta1=0.8, beta2=0.95, epsilon=1e-6, weight_decay=0.1)


def make_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "norm": (4,), "other": (2, 2)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def give_gradient(parameters: dict[str, nn.Parameter], seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    """Through the autograd engine, as in training, so that hooks run."""
    generator = torch.Generator().manual_seed(seed)
    wanted = {n: scale * torch.randn(p.shape, generator=generator) for n, p in parameters.items()}
    sum((p.float() * wanted[n].to(p.dtype).float()).sum() for n, p in parameters.items()).backward()  # type: ignore[union-attr]
    return {n: g.to(parameters[n].dtype).double() for n, g in wanted.items()}


def adamw_by_hand(weight: np.ndarray, grads: list[np.ndarray], rates: list[float], decay: float) -> np.ndarray:
    first, second, s = np.zeros_like(weight), np.zeros_like(weight), SETTINGS
    for t, (g, rate) in enumerate(zip(grads, rates, strict=True), start=1):
        weight = weight * (1 - rate * decay)
        first, second = s.beta1 * first + (1 - s.beta1) * g, s.beta2 * second + (1 - s.beta2) * g * g
        corrected = np.sqrt(second / (1 - s.beta2**t)) + s.epsilon
        weight = weight - rate * first / (1 - s.beta1**t) / corrected
    return weight


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_three_steps_by_hand_with_decay_on_matrices_only(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    start = {name: p.detach().double().numpy().copy() for name, p in parameters.items()}
    optimizer = MasterAdamW(parameters, SETTINGS)
    rates, grads = [0.1, 0.05, 0.2], []
    for seed, rate in enumerate(rates):
        grads.append(give_gradient(parameters, seed))
        optimizer.step(rate)
        optimizer.zero_grad()
    for name, master in optimizer.masters.items():
        decay = SETTINGS.weight_decay if name != "norm" else 0.0
        expected = adamw_by_hand(start[name], [g[name].numpy() for g in grads], rates, decay)
        assert master.dtype == torch.float32
        np.testing.assert_allclose(master.detach().numpy(), expected, rtol=0, atol=2e-6)
        assert torch.equal(parameters[name], master.to(dtype))


def test_small_updates_accumulate_in_the_master_weights() -> None:
    """Near 1, bf16 numbers have a distance of 1/128. Updates of 1e-4 would all be lost."""
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, AdamSettings(weight_decay=0.0))
    naive = torch.ones((), dtype=torch.bfloat16)
    for _ in range(100):
        parameter.sum().backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()
        naive = naive - torch.tensor(1e-4, dtype=torch.bfloat16)
    assert naive.item() == 1.0
    np.testing.assert_allclose(optimizer.masters["w"], 0.99, atol=1e-5)
    assert (parameter == torch.tensor(0.99, dtype=torch.bfloat16)).all()


def test_small_gradients_accumulate_in_the_master_weights() -> None:
    parameter = nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    optimizer = MasterAdamW({"w": parameter}, AdamSettings())
    (parameter * 256).sum().backward()
    for _ in range(100):
        (parameter * 0.5).sum().backward()  # 256 + 0.5 is 256 in bf16
    assert parameter.grad is None
    grad = optimizer.masters["w"].grad
    assert grad is not None and grad.dtype == torch.float32 and (grad == 306).all()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_parameters_are_written_in_place(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in parameters.items()}
    optimizer = MasterAdamW(parameters, SETTINGS)
    give_gradient(parameters, 0)
    optimizer.step(0.1)
    for name, parameter in parameters.items():
        assert parameter.data_ptr() == before[name][0] and not torch.equal(parameter, before[name][1])
        assert (optimizer.masters[name] is parameter) == (dtype == torch.float32), "an fp32 parameter is its own master"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_clipping(dtype: torch.dtype) -> None:
    parameters = make_parameters(dtype)
    optimizer = MasterAdamW(parameters, SETTINGS)
    grads = give_gradient(parameters, 1)
    norm = np.sqrt(sum(float((g**2).sum()) for g in grads.values()))
    assert float(optimizer.clip(10 * norm)) == pytest.approx(norm, rel=1e-6)
    for name, grad in grads.items():
        np.testing.assert_allclose(optimizer.masters[name].grad, grad, rtol=1e-6)  # type: ignore[arg-type]
    assert float(optimizer.clip(norm / 4)) == pytest.approx(norm, rel=1e-6), "the norm before clipping is returned"
    for name, grad in grads.items():
        np.testing.assert_allclose(optimizer.masters[name].grad, grad / 4, rtol=1e-5)  # type: ignore[arg-type]
    optimizer.zero_grad()
    assert float(optimizer.clip(1.0)) == 0.0


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    one = MasterAdamW(make_parameters(dtype), SETTINGS)
    for seed in range(3):
        give_gradient(one.parameters, seed)
        one.step(0.01)
        one.zero_grad()
    saved = {name: tensor.clone() for name, tensor in one.state().items()}
    other = MasterAdamW(make_parameters(dtype), SETTINGS)
    pointers = {name: p.data_ptr() for name, p in other.parameters.items()}
    other.load_state(saved)
    assert {name: p.data_ptr() for name, p in other.parameters.items()} == pointers
    for seed in range(3, 6):
        for optimizer in (one, other):
            give_gradient(optimizer.parameters, seed)
            optimizer.step(0.01)
            optimizer.zero_grad()
    first, second = one.state(), other.state()
    assert first.keys() == second.keys() and len(first) == 4 * 3
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)


def test_state_of_another_model_is_refused() -> None:
    saved = MasterAdamW(make_parameters(torch.float32), SETTINGS).state()
    few = {name: p for name, p in make_parameters(torch.float32).items() if name != "other"}
    with pytest.raises(ValueError, match="another model"):
        MasterAdamW(few, SETTINGS).load_state(saved)


def test_settings_of_one_step_replace_those_of_the_start():
    """A step with its own settings equals a step of an optimizer created with them. Norms are never decayed."""
    ours, theirs = make_parameters(torch.float32), make_parameters(torch.float32)
    one, other = MasterAdamW(ours, AdamSettings()), MasterAdamW(theirs, SETTINGS)
    give_gradient(ours, 1)
    give_gradient(theirs, 1)
    one.step(0.1, SETTINGS)
    other.step(0.1)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])


EIGHT_BIT = AdamSettings(weight_decay=0.1, eight_bit=True)


@pytest.mark.parametrize("settings", (SETTINGS, EIGHT_BIT), ids=("fp32", "8 bits"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("bad", (0, 2), ids=("the first", "the third"))
def test_nonfinite_step_is_undone(settings: AdamSettings, dtype: torch.dtype, bad: int) -> None:
    if settings.eight_bit:
        pytest.importorskip("bitsandbytes", reason="an extra")
    one, other = (MasterAdamW(make_parameters(dtype), settings) for _ in range(2))
    for seed in range(4):
        if seed == bad:
            give_gradient(one.parameters, 9, scale=float("inf"))
            one.step(0.3, None, one.clip(1.0))
            one.zero_grad()
        for optimizer in (one, other):
            give_gradient(optimizer.parameters, seed)
            optimizer.step(0.1, None, optimizer.clip(1.0))
            optimizer.zero_grad()
    first, second = one.state(), other.state()
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(one.parameters[name], other.parameters[name]) for name in one.parameters)


def large_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """A matrix larger than bitsandbytes' minimum of 4,096 numbers, whose last block of 256 is not full, and a norm."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (97, 130), "norm": (64,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def fall(optimizer: MasterAdamW, steps: range) -> None:
    """Descend to a random point with noise: gradients that shrink and change direction, as in training."""
    for seed in steps:
        generator = torch.Generator().manual_seed(99)
        goals = {n: torch.randn(p.shape, generator=generator) for n, p in optimizer.parameters.items()}
        noise = torch.Generator().manual_seed(seed)
        loss = sum(
            ((p.float() - goals[n]) * (p.float().detach() - goals[n] + torch.randn(p.shape, generator=noise))).sum()
            for n, p in optimizer.parameters.items()
        )
        loss.backward()  # type: ignore[union-attr]
        optimizer.step(1e-2)
        optimizer.zero_grad()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_eight_bit_moments_follow_adamw_for_fifty_steps(dtype: torch.dtype) -> None:
    """The path differs by less than 5 %. A norm is too small for quantisation and agrees to rounding."""
    pytest.importorskip("bitsandbytes", reason="an extra")
    start = {name: p.detach().float().clone() for name, p in large_parameters(dtype).items()}
    exact = MasterAdamW(large_parameters(dtype), AdamSettings(weight_decay=0.1))
    small = MasterAdamW(large_parameters(dtype), EIGHT_BIT)
    for optimizer in (exact, small):
        fall(optimizer, range(50))
    for name, tolerance in (("matrix", 0.05), ("norm", 1e-4)):
        way = (exact.masters[name] - start[name]).norm()
        gap = (exact.masters[name] - small.masters[name]).norm() / way
        assert gap < tolerance and way > 1, (name, gap)
        assert torch.equal(small.parameters[name], small.masters[name].to(dtype)), "written in place, from the master"
    assert (exact.masters["matrix"] != small.masters["matrix"]).any()


def test_bytes_of_the_state() -> None:
    """12,610 numbers of a matrix: two bytes and two fp32 scales for each 256 of them, against eight bytes."""
    pytest.importorskip("bitsandbytes", reason="an extra")
    exact = MasterAdamW(large_parameters(torch.bfloat16), AdamSettings())
    small = MasterAdamW(large_parameters(torch.bfloat16), EIGHT_BIT)
    masters = 4 * (97 * 130 + 64)
    assert exact.state_bytes == small.state_bytes == masters, "nothing has changed yet"
    for optimizer in (exact, small):
        fall(optimizer, range(1))
    assert exact.state_bytes == masters + 8 * (97 * 130 + 64)
    assert small.state_bytes == masters + 2 * 97 * 130 + 2 * 4 * 50 + 8 * 64


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_eight_bit_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes", reason="an extra")
    one, other = (MasterAdamW(large_parameters(dtype), EIGHT_BIT) for _ in "ab")
    fall(one, range(5))
    other.load_state({name: tensor.clone() for name, tensor in one.state().items()})
    for optimizer in (one, other):
        fall(optimizer, range(5, 10))
    first, second = one.state(), other.state()
    assert first.keys() == second.keys() and len(first) == 6 + 4
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("saved_in", (False, True), ids=("fp32", "8 bits"))
def test_state_of_the_other_kind_is_refused(saved_in: bool) -> None:
    pytest.importorskip("bitsandbytes", reason="an extra")
    one = MasterAdamW(large_parameters(torch.float32), AdamSettings(eight_bit=saved_in))
    fall(one, range(1))
    with pytest.raises(ValueError, match=r"another train\.optimizer"):
        MasterAdamW(large_parameters(torch.float32), AdamSettings(eight_bit=not saved_in)).load_state(one.state())
