"""`shoal grpo-infer`: the inference server of the split layout, and of whoever wants one."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from shoal.cli.output import say
from shoal.cli.split import read_section
from shoal.config.load import Loaded
from shoal.config.schema import InferConfig


def grpo_infer(file: str, *overrides: str, dry_run: Annotated[bool, Parameter(negative=())] = False) -> None:
    """Serve the model over HTTP, as OpenAI's clients and the other processes of the split layout ask for it.

    Parameters
    ----------
    file
        File with the infer section.
    overrides
        Such as infer.port=8001.
    dry_run
        Check everything, print the configuration, and stop.
    """
    loaded = read_section("infer", file, overrides, dry_run)
    if loaded is not None:
        _serve(loaded)


def _serve(loaded: Loaded[InferConfig]) -> None:
    from shoal import split

    split.serve_inference(loaded.config, loaded.origins, _tell)


def _tell(line: str) -> None:
    say(line)
    sys.stdout.flush()  # whoever started the server waits for this line
