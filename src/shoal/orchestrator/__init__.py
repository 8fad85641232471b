"""The one loop. Sees protocols only, imports no torch, and reads as prose."""
