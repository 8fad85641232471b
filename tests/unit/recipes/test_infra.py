"""setup_infra and its clients on a tiny model: sampling, gradients of any loss, syncs, checkpoints of a trainer."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from shoal.core.errors import ArgumentError, DeadlineError, RunLockedError, StorageError
from shoal.recipes.attach import TrainerFolder
from shoal.recipes.clients import AdamParams
from shoal.recipes.config import POLICY_LOSSES, Config, DeployConfig, InfraConfig, WeightSyncConfig, WeightSyncScope
from shoal.recipes.datums import Datum, PromptGroup, build_grpo_datums, make_grpo_loss_fn
from shoal.recipes.infra import Infra, setup_infra
from support.folders import write_model

ROOT = Path(__file__).parents[3]
REWARDS = [0.0, 1.0, 0.25, 0.5]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("custom_loop", ROOT / "examples" / "custom_loop.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(model: str, **given: Any) -> Config:
    values = {"log_path": "out", "base_model": model, "dataset": ["unused"], "deployment": DeployConfig(model)}
    small = {"max_completion_tokens": 5, "max_seq_len": 64, "tis": None}
    return Config(**{**values, **small, **given})


@pytest.fixture(scope="module")
def infra(model: str) -> Iterator[Infra]:
    with setup_infra(config(model, lora_rank=4), needs_reference=True) as found:
        yield found


def sample(infra: Infra, prompts: tuple[str, ...] = ("Shout fish", "Shout crab"), **sampling: Any) -> list[PromptGroup]:
    sampler = infra.sampler

    async def all_of_them() -> Any:
        return await asyncio.gather(*(sampler.sample_with_tokens(prompt, 4, **sampling) for prompt in prompts))

    return [PromptGroup(group, REWARDS) for group in asyncio.run(all_of_them())]


def gradient(infra: Infra) -> dict[str, torch.Tensor]:
    """The accumulated gradient. Clears it."""
    optimizer = infra._trainer.policy.optimizer
    found = {name: m.grad.clone() for name, m in optimizer.masters.items() if m.grad is not None}
    optimizer.zero_grad()
    return found


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and one
    scale = max(float(value.abs().max()) for value in one.values())
    assert scale > 1e-6
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, atol=1e-5 * scale, rtol=1e-3)


def test_samples_have_n_log_probs_and_the_trainer_n_minus_one(infra: Infra):
    (group, _) = sample(infra)
    assert len({tuple(c.completion_ids) for c in group.completions}) > 1
    for one in group.completions:
        assert len(one.logprobs) == len(one.token_ids) and one.logprobs[0] is None
        assert all(value == 0 for value in one.logprobs[1 : one.prompt_tokens])
    datums = build_grpo_datums([group])
    for datum, policy in zip(datums, infra.policy.forward(datums), strict=True):
        assert len(policy) == datum.num_tokens - 1
        sampler = np.array(datum.sampler_logprobs[1:], dtype=float)
        np.testing.assert_allclose(policy[datum.loss_mask], sampler[datum.loss_mask], atol=1e-5)


def test_forward_agrees_with_the_model_itself(infra: Infra, model: str):
    """Also of prompt tokens, by the forward pass of transformers. The adapter starts at zero, so the base is the
    policy.
    """
    base: Any = AutoModelForCausalLM.from_pretrained(model)
    datums = build_grpo_datums(sample(infra))
    for datum, ours in zip(datums, infra.policy.forward(datums), strict=True):
        ids = torch.as_tensor(datum.sample.token_ids)[None]
        expected = base(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(ours, expected.detach().numpy(), atol=2e-5)


def test_loss_of_ten_lines_equals_the_built_in_one(infra: Infra, example: ModuleType, model: str):
    datums = build_grpo_datums(sample(infra))
    own = infra.policy.forward_backward_custom(datums, example.my_loss)
    ours = gradient(infra)
    built_in = infra.policy.forward_backward_custom(datums, make_grpo_loss_fn(config(model)))
    assert own.loss == pytest.approx(built_in.loss, abs=1e-6)
    assert own.metrics == {"tokens": float(sum(datum.loss_mask.sum() for datum in datums))}
    assert_same(gradient(infra), ours)


@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_built_in_losses_have_the_loops_gradient(infra: Infra, model: str, loss: str):
    """The same rows through forward_backward of shoal.trainer, off-policy so that ratios matter."""
    from shoal.build.model import make_objective
    from shoal.core.batching import Packing, make_batches
    from shoal.recipes.config import translate

    datums = build_grpo_datums(sample(infra))
    for datum in datums:
        datum.sample.sampler_logprobs[datum.sample.loss_mask] += 0.05
        shifted = [None, *(float(v) for v in datum.sample.sampler_logprobs[1:])]
        object.__setattr__(datum, "sampler_logprobs", shifted)
    run = translate(config(model, policy_loss=loss), in_memory=True)[0]
    old = [values - 0.02 for values in infra.policy.forward(datums)]
    infra.policy.forward_backward_custom(datums, make_grpo_loss_fn(config(model, policy_loss=loss), old_logprobs=old))
    ours = gradient(infra)
    packing = Packing(10_000, str(run.train.loss.aggregation), 5, share_prefixes=False)
    (batch,) = make_batches([[datum.sample] for datum in datums], packing)
    at = {datum.sample.rollout_id: np.concatenate([[0], values]) for datum, values in zip(datums, old, strict=True)}
    for row in batch.rows:
        row.old_logprobs = np.concatenate([at[name] for name in row.rollout_ids]).astype(np.float32)
    infra._trainer.policy.forward_backward(batch.rows, make_objective(run.train))
    assert_same(gradient(infra), ours)


def test_rows_do_not_matter(infra: Infra, model: str):
    """A loss over all datums at once, although only one of them fits into a row."""
    from dataclasses import replace

    from shoal.recipes.clients import PolicyClient

    datums = build_grpo_datums(sample(infra))
    loss_fn = make_grpo_loss_fn(config(model))
    infra.policy.forward_backward_custom(datums, loss_fn)
    whole = gradient(infra)
    small = replace(infra.policy._device, token_budget=max(datum.num_tokens for datum in datums))
    client = PolicyClient(infra._trainer.policy, small, infra._trainer.sampler.model.chat)
    client.forward_backward_custom(datums, loss_fn)
    assert_same(gradient(infra), whole)


def test_invalid_loss_function_is_refused(infra: Infra):
    datums = build_grpo_datums(sample(infra))
    with pytest.raises(ArgumentError, match=r"forward_backward_custom: loss_fn: must return"):
        infra.policy.forward_backward_custom(datums, lambda d, lp: (torch.zeros(()), {}))
    for wrong in (None, datums[0].advantage, (1.0, {}, {})):
        with pytest.raises(ArgumentError, match=r"forward_backward_custom: loss_fn: must return"):
            infra.policy.forward_backward_custom(datums, lambda d, lp, wrong=wrong: wrong)  # type: ignore[misc]
    with pytest.raises(ArgumentError, match=r"forward_backward_custom: datums: is empty"):
        infra.policy.forward_backward_custom([], make_grpo_loss_fn(infra.config, [0]))


def test_reference_is_forward_only(infra: Infra):
    datums = build_grpo_datums(sample(infra))
    for ours, theirs in zip(infra.policy.forward(datums), infra.reference.forward(datums), strict=True):  # type: ignore[union-attr]
        np.testing.assert_allclose(ours, theirs, atol=1e-6)  # the adapter is still zero
    with pytest.raises(RuntimeError, match=r"forward-only; call optim_step on the policy"):
        infra.reference.optim_step(AdamParams())  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match=r"forward-only"):
        infra.reference.forward_backward_custom(datums, lambda d, lp: (lp[0].sum(), {}))  # type: ignore[union-attr]


def test_sync_that_is_missing_or_not_awaited_is_an_error(model: str):
    with setup_infra(config(model)) as infra:
        datums = build_grpo_datums(sample(infra))
        infra.policy.forward_backward_custom(datums, make_grpo_loss_fn(infra.config))
        infra.policy.optim_step()
        with pytest.raises(ArgumentError, match=r"1 optimizer steps behind the policy; call `await infra.sync_weights"):
            sample(infra)
        infra.sync_weights().close()  # not awaited
        with pytest.raises(ArgumentError, match=r"await infra.sync_weights"):
            sample(infra)
        asyncio.run(infra.sync_weights())
        sample(infra)


def test_wrong_arguments_of_the_parts_are_named(infra: Infra):
    datums = build_grpo_datums(sample(infra))
    for wrong in (3, "text", [datums[0]], [[1.0]]):
        with pytest.raises(ArgumentError, match=r"build_grpo_datums: groups"):
            build_grpo_datums(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"build_grpo_datums: config"):
        build_grpo_datums([], {"policy_loss": "grpo"})  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"make_grpo_loss_fn: old_logprobs: must be a list"):
        make_grpo_loss_fn(infra.config, [0], 3)  # type: ignore[arg-type]
    reference = infra.reference.forward(datums)  # type: ignore[union-attr]
    with pytest.raises(ArgumentError, match=r"make_grpo_loss_fn: reference_logprobs: must be one array per datum"):
        infra.policy.forward_backward_custom(datums, make_grpo_loss_fn(infra.config, reference[1:]))


def test_loop_with_its_own_prompts_needs_no_dataset(model: str):
    from shoal.recipes.rl_loop import main
    from shoal.recipes.utils import rl

    assert rl.setup_infra is setup_infra
    with setup_infra(config(model, dataset=None)) as infra:
        assert infra.reference is None and len(sample(infra)) == 2
    with pytest.raises(ArgumentError, match=r"Config: dataset: is required by main"):
        main(config(model, dataset=None), len)


def test_mistakes_in_a_custom_loop_are_named(infra: Infra, tmp_path: Path):
    with pytest.raises(ArgumentError, match=r"PromptGroup: completions: is a coroutine; await sample_with"):
        PromptGroup(infra.sampler.sample_with_tokens("a", 2), [0.0, 1.0])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"PromptGroup: rewards: must be numbers, or None"):
        PromptGroup([], ["good"])  # type: ignore[list-item]
    with pytest.raises(ArgumentError, match=r"prompt: must be text, messages or token ids, not int"):
        asyncio.run(infra.sampler.sample_with_tokens(3, 2))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"AdamParams: learning_rate: must be a number of at least 0, not '1e-5'"):
        AdamParams(learning_rate="1e-5")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"adam_params: must be AdamParams\(learning_rate=…\), not \{'lr'"):
        infra.policy.optim_step({"lr": 1e-5})  # type: ignore[arg-type]
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ArgumentError, match=r"export: folder: '.*file' is a file; use a folder"):
        infra.policy.export(file)


def step(infra: Infra, rate: float = 0.05) -> dict[str, float]:
    datums = build_grpo_datums(sample(infra))
    infra.policy.forward_backward_custom(datums, _imitate)
    return infra.policy.optim_step(AdamParams(learning_rate=rate, weight_decay=0.0))


def _imitate(datums: list[Datum], logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    return -torch.cat(logprobs).mean(), {}


def test_sampler_changes_only_on_sync(model: str):
    """Within a window of two steps, the second one may sample with the weights of the first."""
    with setup_infra(
        config(model, lora_rank=4, weight_sync=WeightSyncConfig(weight_sync_interval=2)), needs_reference=True
    ) as infra:
        before = sample(infra, seed=7)
        assert sample(infra, seed=7)[0].completions[0].logprobs != []
        result = step(infra)
        assert result["optim/lr"] == 0.05 and result["optim/skipped"] == 0 and infra.policy.version == 1
        assert infra.sampler.version == 0
        datums = build_grpo_datums(sample(infra))
        policy, reference = infra.policy.forward(datums), infra.reference.forward(datums)  # type: ignore[union-attr]
        sampled = [np.array(d.sampler_logprobs[1:], dtype=float)[d.loss_mask] for d in datums]
        stale = [abs(p[d.loss_mask] - s).max() for p, d, s in zip(policy, datums, sampled, strict=True)]
        kept = [abs(r[d.loss_mask] - s).max() for r, d, s in zip(reference, datums, sampled, strict=True)]
        assert min(stale) > 1e-3 and max(kept) < 1e-5  # the sampler still has the weights of the start
        assert asyncio.run(infra.sync_weights()) == 1 == infra.sampler.version
        datums = build_grpo_datums(sample(infra))
        for datum, values in zip(datums, infra.policy.forward(datums), strict=True):
            now = np.array(datum.sampler_logprobs[1:], dtype=float)
            np.testing.assert_allclose(values[datum.loss_mask], now[datum.loss_mask], atol=1e-5)
        assert len(before) == 2


def test_full_fine_tuning_has_a_reference_only_with_a_shape(model: str):
    with pytest.raises(ArgumentError, match=r"setup_infra: needs_reference: .*infra.ref_training_shape_id"):
        setup_infra(config(model), needs_reference=True)
    shape = InfraConfig(training_shape_id="cpu-fp32", ref_training_shape_id="cpu-fp32")
    with setup_infra(config(model, infra=shape), needs_reference=True, needs_inference=True) as infra:
        datums = build_grpo_datums(sample(infra))
        before = infra.reference.forward(datums)  # type: ignore[union-attr]
        step(infra)
        for one, other in zip(before, infra.reference.forward(datums), strict=True):  # type: ignore[union-attr]
            np.testing.assert_array_equal(one, other)
        assert max(abs(a - b).max() for a, b in zip(before, infra.policy.forward(datums), strict=True)) > 1e-3


def test_without_inference_there_is_no_sampler(model: str):
    with setup_infra(config(model), needs_inference=False) as infra:
        with pytest.raises(ArgumentError, match=r"needs_inference=False, .*; call .*needs_inference=True"):
            asyncio.run(infra.sampler.sample_with_tokens("a"))
        assert infra.reference is None


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_deployment_has_its_own_weights(model: str, lora_rank: int):
    deploy = DeployConfig(model, WeightSyncScope.PER_DEPLOYMENT)
    window = WeightSyncConfig(weight_sync_interval=2)
    with setup_infra(config(model, deployment=deploy, lora_rank=lora_rank, weight_sync=window)) as infra:

        def largest_gap() -> float:
            """Between the log-probs of the policy and of the deployment."""
            datums = build_grpo_datums(sample(infra))
            sampled = [np.array(d.sampler_logprobs[1:], dtype=float)[d.loss_mask] for d in datums]
            ours = [values[d.loss_mask] for values, d in zip(infra.policy.forward(datums), datums, strict=True)]
            return max(abs(one - other).max() for one, other in zip(ours, sampled, strict=True))

        assert largest_gap() < 1e-5
        step(infra)
        assert largest_gap() > 1e-3
        asyncio.run(infra.sync_weights())
        assert largest_gap() < 1e-5


def test_running_trainer_is_found_again(model: str, tmp_path: Path):
    named = {"log_path": str(tmp_path), "infra": InfraConfig(trainer_id="carp")}
    with setup_infra(config(model, **named)) as first:
        again = setup_infra(config(model, **named))
        assert again.policy is first.policy
        with pytest.raises(ArgumentError, match=r"setup_infra: 'carp' is running with train.lora False, not True"):
            setup_infra(config(model, lora_rank=4, **named))
    with setup_infra(config(model, **named)) as later:
        assert later.policy is not first.policy


def test_failed_part_keeps_an_attached_trainer_running(model: str, tmp_path: Path):
    named = {"log_path": str(tmp_path), "infra": InfraConfig(trainer_id="carp")}
    with setup_infra(config(model, **named)) as first:
        (tmp_path / "deployments").write_text("no folder")
        deploy = DeployConfig(model, WeightSyncScope.PER_DEPLOYMENT, deployment_id="pond")
        with pytest.raises(StorageError, match="deployments"):
            setup_infra(config(model, deployment=deploy, **named))
        step(first)
        assert setup_infra(config(model, **named)).policy is first.policy


def test_trainer_continues_from_its_newest_good_checkpoint(model: str, tmp_path: Path):
    saving = WeightSyncConfig(dcp_save_interval=2)
    named = {"log_path": str(tmp_path), "infra": InfraConfig(trainer_id="carp"), "weight_sync": saving}
    checkpoints = tmp_path / "trainers" / "carp" / "checkpoints"

    def train(infra: Infra, steps: int) -> None:
        for _ in range(steps):
            infra.policy.forward_backward_custom(datums, _imitate)
            infra.policy.optim_step()

    with setup_infra(config(model, **named)) as first:
        datums = build_grpo_datums(sample(first))
        train(first, 6)
    assert [path.name for path in sorted(checkpoints.glob("step_*"))] == ["step_000004", "step_000006"]
    (checkpoints / "step_000006" / "trainer.safetensors").write_bytes(b"damaged")
    with setup_infra(config(model, **named)) as second:
        assert second.policy.version == second.sampler.version == 4
        with pytest.raises(RunLockedError, match=r"the trainer 'carp' runs in another process"):
            TrainerFolder("carp", second._trainer.run, 0)
        train(second, 1)
        restored = second.policy.forward(datums)
    with setup_infra(config(model)) as undisturbed:
        train(undisturbed, 5)
        for ours, theirs in zip(restored, undisturbed.policy.forward(datums), strict=True):
            np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ArgumentError, match=r"checkpoint of trainer 'carp' has train.lora False, not True"):
        setup_infra(config(model, lora_rank=4, **named))


def test_ids_are_checked_before_anything_starts(model: str):
    for wrong in ("../pond", "pond\n", "", 3):
        with pytest.raises(ArgumentError, match=r"infra.trainer_id: is .*; use at most 64 letters"):
            setup_infra(config(model, infra=InfraConfig(trainer_id=wrong)))  # type: ignore[arg-type]
    for given in (
        {"infra": InfraConfig(ref_trainer_id="ref")},
        {"infra": InfraConfig(ref_trainer_id="ref"), "lora_rank": 4},
    ):
        with pytest.raises(ArgumentError, match=r"infra.ref_trainer_id: needs infra.ref_training_shape_id"):
            setup_infra(config(model, **given))


def test_tokenizers_must_agree(model: str, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(tmp_path)
    AutoModelForCausalLM.from_pretrained(model).save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match=r"tokenizer_model: the chat template .* base_model"):
        setup_infra(config(model, deployment=DeployConfig(str(tmp_path))))


def test_sync_has_a_deadline(model: str):
    never = WeightSyncConfig(weight_sync_timeout=0.05)
    with setup_infra(config(model)) as infra:
        infra.config = config(model, weight_sync=never)
        slow = infra._trainer.sampler.device.executor.submit(__import__("time").sleep, 0.4)
        with pytest.raises(DeadlineError, match=r"the weight sync took longer than 0.05 s"):
            asyncio.run(infra.sync_weights())
        slow.result()


def test_wrong_sampling_arguments_are_named(infra: Infra):
    with pytest.raises(ArgumentError, match=r"sample_with_tokens: n: must be at least 1"):
        asyncio.run(infra.sampler.sample_with_tokens("a", 0))
    with pytest.raises(ArgumentError, match=r"sample_with_tokens: temprature: unknown parameter"):
        asyncio.run(infra.sampler.sample_with_tokens("a", temprature=1.0))
    with pytest.raises(ArgumentError, match=r"sample_with_tokens: prompt: .* tokens exceed 64"):
        asyncio.run(infra.sampler.sample_with_tokens("a" * 99))


def test_custom_loop_learns_and_exports(example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """examples/custom_loop.py, twelve steps on the demo's tiny model."""
    assert len((ROOT / "examples" / "custom_loop.py").read_text().splitlines()) < 100
    from shoal.api import make_model

    make_model("tiny", tmp_path / "tiny", 0)
    given = {"completions_per_prompt": 8, "max_completion_tokens": 12, "learning_rate": 1e-3, "log_path": str(tmp_path)}
    rewards = example.train(config(str(tmp_path / "tiny"), **given), 12)
    assert len(rewards) == 12
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final") is not None
