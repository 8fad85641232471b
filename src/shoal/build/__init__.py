"""Turns a configuration into objects: first what needs no torch, then the model, then the parts of the loop."""
