"""Predicts step time, memory and cost of a run from the shape of a model, without torch: `shoal plan`."""
