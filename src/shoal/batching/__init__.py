"""From rollouts to samples to packed rows whose denominators are fixed. NumPy only."""
