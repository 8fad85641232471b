"""The one place where a configuration becomes objects.

`prepare` builds what needs no torch; `assemble` loads the model and puts the loop together.
"""

from shoal.build.evaluation import evaluate_once, evaluation_config
from shoal.build.given import Given
from shoal.build.launch import Start, as_rank, is_main, launch, launch_command, ranks_to_start
from shoal.build.model import Model, PolicyFiles, load, make_objective, make_policy
from shoal.build.plan import make_plan
from shoal.build.prepare import Prepared, binding, join_ranks, leave_ranks, open_run_dir, prepare
from shoal.build.run import Assembled, Watching, assemble, make_advantages, make_sinks
from shoal.build.sampler import load_model, make_sampler, sampling_params
from shoal.build.schedule import total_steps
from shoal.build.scoring import EvalTask, Scores, score
from shoal.build.supervised import train_on_completions

__all__ = [
    "Assembled",
    "EvalTask",
    "Given",
    "Model",
    "PolicyFiles",
    "Prepared",
    "Scores",
    "Start",
    "Watching",
    "as_rank",
    "assemble",
    "binding",
    "evaluate_once",
    "evaluation_config",
    "is_main",
    "join_ranks",
    "launch",
    "launch_command",
    "leave_ranks",
    "load",
    "load_model",
    "make_advantages",
    "make_objective",
    "make_plan",
    "make_policy",
    "make_sampler",
    "make_sinks",
    "open_run_dir",
    "prepare",
    "ranks_to_start",
    "sampling_params",
    "score",
    "total_steps",
    "train_on_completions",
]
