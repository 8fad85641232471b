"""Triton kernels of the decode step, imported only if Triton is installed. Tests compare each with plain torch."""
