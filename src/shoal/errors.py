"""The errors that Shoal raises on purpose, and the exit codes, under their public import path."""

from shoal.core.errors import *  # noqa: F403
