"""The `shoal` command. A verb parses its arguments, calls shoal.api and prints; the logic of a run is elsewhere."""

from shoal.cli.entry import main

__all__ = ["main"]
