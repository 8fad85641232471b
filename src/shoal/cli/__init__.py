"""The `shoal` command: one file a verb. A verb parses, calls shoal.api and prints; it holds no logic of a run."""

from shoal.cli.entry import main

__all__ = ["main"]
