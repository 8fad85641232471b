"""The GSM8K surface: `python -m shoal.launcher.local script.py --config file.yaml key=value …`.

A thin translation onto the one schema (keys.py is the table) and onto what `shoal grpo` does. Imports no torch.
"""

from shoal.launcher.run import load_config, run, train

__all__ = ["load_config", "run", "train"]
