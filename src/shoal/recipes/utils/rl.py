"""The cookbook imports these names from `training.utils.rl`; here they are in shoal.recipes.rl_loop."""

from shoal.recipes.rl_loop import Infra, WeightSyncScope, build_grpo_datums, make_grpo_loss_fn, setup_infra

__all__ = ["Infra", "WeightSyncScope", "build_grpo_datums", "make_grpo_loss_fn", "setup_infra"]
