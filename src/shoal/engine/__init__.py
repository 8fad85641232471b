"""The embedded engine: continuous batching on the trainer's own parameters. Independent of RL."""
