"""Graders for numbers and mathematics, and `pool.RewardPool`, which runs reward functions in killable processes.

This package does not import torch.
"""
