"""Gradients and weights: the policy, its optimizer, its files. Knows no algorithm and no rollout engine."""
