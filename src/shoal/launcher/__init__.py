"""The launcher: `python -m shoal.launcher.local script.py --config file.yaml key=value …`.

Translates its files to the schema (read.py has the table) and runs `shoal grpo`. Imports no torch.
"""

from shoal.launcher.script import load_config, run, train

__all__ = ["load_config", "run", "train"]
