"""Files of a run on disk: run directory, checkpoints, journal, events. The only package that writes run directories."""
