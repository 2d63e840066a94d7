"""From placed regions to instructions: decomposition, fusion, library calls, kernels compiled and tuned."""
