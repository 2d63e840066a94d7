"""Weights in 8 or 4 bits: rounded, packed, and multiplied by kernels that read them so."""
