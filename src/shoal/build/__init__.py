"""The one place where a configuration becomes objects.

`prepare` builds what needs no torch; `assemble` loads the model and puts the loop together.
"""

from shoal.build.model import Model, PolicyFiles, load, make_objective, make_policy
from shoal.build.prepare import Prepared, binding, open_run_dir, prepare
from shoal.build.run import Assembled, Watching, assemble, make_sinks, total_steps
from shoal.build.sampler import evaluate_once, evaluation_config, make_sampler

__all__ = [
    "Assembled",
    "Model",
    "PolicyFiles",
    "Prepared",
    "Watching",
    "assemble",
    "binding",
    "evaluate_once",
    "evaluation_config",
    "load",
    "make_objective",
    "make_policy",
    "make_sampler",
    "make_sinks",
    "open_run_dir",
    "prepare",
    "total_steps",
]
