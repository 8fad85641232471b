"""Driving environments against an engine, and the engines behind the RolloutEngine seam."""
