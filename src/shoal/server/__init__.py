"""OpenAI-compatible HTTP over any RolloutEngine: completions.py answers requests, sessions.py keeps exact ids, local.py serves."""
