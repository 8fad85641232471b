"""OpenAI-compatible HTTP over any RolloutEngine: asked.py reads requests, completions.py and streaming.py answer them.

app.py has the routes, guard.py stands before them, control.py steers weights, sessions.py keeps a rollout in exact ids,
local.py serves all that inside a training process. No torch.
"""
