"""Kernels written here, the operators that stand for them, and how they are launched."""
