"""`shoal shapes`: the layouts that `training_shape_id` may name."""

from __future__ import annotations

from shoal.cli.output import say
from shoal.config.layouts import LAYOUTS


def shapes() -> None:
    """List the shapes: named layouts of devices and precision for shoal.recipes."""
    width = max(len(name) for name in LAYOUTS)
    for layout in LAYOUTS.values():
        keys = ", ".join(f"train.{key}={value}" for key, value in layout.settings)
        say(f"{layout.name:<{width}}  {layout.summary} ({keys})")
    say("")
    say("Unset, the shape is chosen for the machine: bf16 on a GPU, fp32 on a CPU.")
