"""The CUDA device: the only package that talks to cuda-python and to NVIDIA's libraries.

Importing it costs nothing: cuda-python is loaded by the first call. All goes through `cuda.bindings.driver`
(0.08 s to import): `cuda.core` takes 0.24 to 0.6 s, of the 1.0 s that a program has from its start to its
first output. Streams of `cuda.core`, CuPy and others are taken through `__cuda_stream__`.
"""
