"""`shoal config-reference`: the configuration page, generated from the schema."""

from __future__ import annotations

from shoal.config.reference import reference_page


def config_reference() -> None:
    """Print every configuration key with its default and meaning, as Markdown."""
    print(reference_page(), end="")
