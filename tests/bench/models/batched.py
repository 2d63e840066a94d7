"""Another model file with its example inputs repeated: DEVPLAN_BENCH_MODEL names it, DEVPLAN_BENCH_BATCH how often.

A file whose inputs are not all batched says so with a `batched_inputs` of its own.
"""

import importlib.util
import os
import sys

BATCH = int(os.environ.get("DEVPLAN_BENCH_BATCH", "1"))
_spec = importlib.util.spec_from_file_location("batched_model", os.environ["DEVPLAN_BENCH_MODEL"])
_file = importlib.util.module_from_spec(_spec)
sys.modules["batched_model"] = _file  # whoever compiles a model looks its modules up by name
_spec.loader.exec_module(_file)


def model():
    return _file.model() if not hasattr(_file.model, "forward") else _file.model


def _repeat(x):
    return x.repeat(BATCH, *[1] * (x.dim() - 1)).contiguous()


def example_inputs():
    if hasattr(_file, "batched_inputs"):
        return _file.batched_inputs()
    given = _file.example_inputs() if callable(_file.example_inputs) else _file.example_inputs
    return (
        {k: _repeat(v) for k, v in given.items()} if isinstance(given, dict) else tuple(map(_repeat, given))
    )
