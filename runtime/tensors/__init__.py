"""Tensors in memory of the host and of devices, shared with other libraries in place."""
