"""Triton kernels of the decode step, imported only where Triton is; each is tested against a plain torch equal."""
