"""Coverage-guided fuzzing of the readers with atheris, called by `make fuzz`: python tests/fuzz/run.py TARGET SECONDS.

The seed is fixed. An input that fails is written to crash-* in the working directory.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(  # pyright: ignore[reportAttributeAccessIssue]
    include=["shoal", "gguf", "safetensors", "json"], enable_loader_override=False
):
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import gguf  # noqa: F401  # imported late by transformers, which would leave it without coverage

    from fuzz.targets import TARGETS, seeds


def main() -> None:
    name, seconds = sys.argv[1], sys.argv[2]
    with tempfile.TemporaryDirectory() as corpus:
        for number, data in enumerate(seeds()[name]):
            (Path(corpus) / str(number)).write_bytes(data)
        limits = [f"-max_total_time={seconds}", "-seed=1", "-timeout=30", "-rss_limit_mb=8192", "-max_len=8192"]
        atheris.Setup([sys.argv[0], *limits, corpus], TARGETS[name])
        atheris.Fuzz()


if __name__ == "__main__":
    main()
