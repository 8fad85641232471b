"""OpenAI-compatible HTTP over any RolloutEngine.

completions.py answers requests, sessions.py keeps a rollout in exact ids, local.py serves both inside a process.
"""
