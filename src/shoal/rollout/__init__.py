"""Rollout engines (embedded, vLLM in this process, remote servers) and the channels that bring them weights."""
