"""The decoding step of `configs/models/llama_decode.py`, as many sequences at once as DEVPLAN_BENCH_BATCH says.

All are at one position; each has a key-value cache of its own. `batched_inputs` stands for repeated example inputs.
"""

import importlib.util
import os
import sys
from pathlib import Path

BATCH = int(os.environ.get("DEVPLAN_BENCH_BATCH", "1"))
_path = Path(__file__).parents[3] / "configs/models/llama_decode.py"
_spec = importlib.util.spec_from_file_location("llama_decode_model", _path)
_file = importlib.util.module_from_spec(_spec)
sys.modules["llama_decode_model"] = _file
_spec.loader.exec_module(_file)


def model():
    for layer in _file.model.layers:
        layer.attention.keys = layer.attention.keys.repeat(BATCH, 1, 1, 1)
        layer.attention.values = layer.attention.values.repeat(BATCH, 1, 1, 1)
    return _file.model


def batched_inputs():
    given = _file.tokens(1, _file.PROMPT)
    return {"token": given["token"].repeat(BATCH, 1), "position": given["position"]}
