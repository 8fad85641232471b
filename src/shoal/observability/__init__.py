"""What a run leaves behind and shows while it lasts: run directory, metrics, events, console, sinks, watchdog, logs.

Called by the orchestrator and by build.py. Imports no torch, and nothing here may stop or slow a training run, except a
run directory that can no longer be written (StorageError).
"""
