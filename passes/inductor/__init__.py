"""The one room that touches PyTorch's private interfaces.

`lowering` drives Inductor for a described GPU, `combine_kernels`, `masked_loads` and `device_guard` serve it;
`interfaces` and `overloads` wrap the small things that other passes need. Nothing outside imports or reads a
name that PyTorch spells with an underscore; a test holds that. Tried with torch 2.11, 2.13 and 2.14.
"""
