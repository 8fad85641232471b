"""The names other ways in use, as tables: each surface's arguments and what they are in the one schema.

A table is data. The surface's own code lives elsewhere (grpo_trainer.py, recipes/, launcher/); errors that name the
user's argument and docs/coming-from.md are made from the tables here. No torch.
"""
