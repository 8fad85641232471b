"""Shared code of the interfaces GRPOTrainer, recipes and launcher: argument declarations, translation, messages.

Also the names of TRL as a table. No torch.
"""
