"""The library functions that `LibraryCall` may name, with their operands and attributes.

=============  ===========================================  ===============================================
function       reads -> writes                              attributes
=============  ===========================================  ===============================================
matmul         a, b[, bias][, c] -> out                     epilogue, has_bias, has_c, alpha, beta, allow_tf32
convolution    x, weight[, bias][, added] -> out            stride, padding, dilation, transposed,
                                                            output_padding, groups, has_bias, has_added,
                                                            activation, allow_tf32
attention      query, key, value[, mask] -> out             scale, is_causal, has_mask
fill           -> out                                       value
=============  ===========================================  ===============================================

``matmul``: ``out = epilogue(alpha * a @ b + beta * c + bias)``; a is [m, k] or [batch, m, k], b and out
likewise; any operand may be strided (one of its last two strides is 1); bias is [n]; epilogue is ``none``,
``relu``, ``gelu_tanh`` or ``gelu_erf``. Accumulation is float32 at least.
``convolution``: ``out = activation(x * weight + bias + added)``; x is [N, C, *spatial] with any dense
strides (channels-last included), weight [K, C // groups, *spatial]; stride, padding, dilation and
output_padding are tuples, one number per spatial dimension; added is like out; activation is ``none``,
``relu`` or ``relu6`` (limited to 0 and 6).
``attention``: query [B, H, M, D], key and value [B, Hkv, N, D] with H a multiple of Hkv; mask is boolean or
additive and broadcasts to [B, H, M, N].
"""

from __future__ import annotations

FUNCTIONS = ("matmul", "convolution", "attention", "fill")
TUNED = {"matmul": "cublaslt", "convolution": "cudnn"}
"""The functions whose algorithms are measured by `devplan tune`, and the libraries that have them."""
EPILOGUES = ("none", "relu", "gelu_tanh", "gelu_erf")
