"""What tests of models, engine, rollout and trainer share: small random models and short ways to run them."""
