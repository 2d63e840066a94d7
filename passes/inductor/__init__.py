"""The one room that touches PyTorch's private interfaces.

`lowering` drives Inductor for the GPU of `described_gpu`, and `read_tape` reads what comes out;
`combine_kernels`, `masked_loads` and `device_guard` serve them. `interfaces` and `overloads` wrap what other
passes need. Nothing outside imports or reads a name that PyTorch spells with an underscore (a test holds it).
Tried with torch 2.11, 2.13 and 2.14.
"""
