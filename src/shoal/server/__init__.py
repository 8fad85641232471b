"""The OpenAI-compatible HTTP server over any RolloutEngine. Imports no torch.

app.py defines the routes, access.py authentication, limits and the listener, request_schema.py the request bodies.
completions.py and streaming.py produce responses, control.py loads weights, sessions.py tracks one rollout's turns.
"""
