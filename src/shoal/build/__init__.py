"""The one place where a configuration becomes objects.

`prepare` builds what needs no torch; `assemble` loads the model and puts the loop together.
"""

from shoal.build.model import Model, PolicyFiles, load, make_objective, make_policy
from shoal.build.prepare import Prepared, binding, open_run_dir, prepare
from shoal.build.run import Assembled, Watching, assemble, make_sinks, total_steps
from shoal.build.sampler import evaluation_config, make_sampler
from shoal.build.scoring import EvalTask, Scores, score

__all__ = [
    "Assembled",
    "EvalTask",
    "Model",
    "PolicyFiles",
    "Prepared",
    "Scores",
    "Watching",
    "assemble",
    "binding",
    "evaluation_config",
    "load",
    "make_objective",
    "make_policy",
    "make_sampler",
    "make_sinks",
    "open_run_dir",
    "prepare",
    "score",
    "total_steps",
]
