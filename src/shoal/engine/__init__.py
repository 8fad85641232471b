"""The embedded engine: continuous batching on the trainer's own parameters. Knows tokens, nothing of RL."""
