"""Recipes: a whole training run as one call, and the pieces to write one's own loop with. Start at rl_loop."""
