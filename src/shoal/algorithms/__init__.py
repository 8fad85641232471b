"""Advantages, losses, corrections and KL: pure functions, checked against float64 NumPy.

Importing this package loads no torch; `losses`, `terms` and `objective` do.
"""
