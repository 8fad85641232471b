"""Shared by tests of models, engine, rollout and trainer: small random models and short ways to run them."""
