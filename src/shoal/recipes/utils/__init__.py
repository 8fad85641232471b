"""The import paths of the cookbook: `shoal.recipes.utils.rl`."""
