"""Run by `test_peer.py` in a process of its own: what ExecuTorch's own reader and runtime make of a file.

It answers requests, each a line of JSON, with a line of JSON after the word `reply`:

- ``["read", FILE]``: what the reader sees;
- ``["data", FILE]``: by name, the layout of a data file's tensors and the digest of their bytes;
- ``["run", FILE, IN, OUT, DATA]``: null, after executing `forward` on the arrays of IN.npz and saving OUT.npz;
  the data file may be left out.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any


def _tensor(value: Any) -> dict[str, Any] | None:
    if type(value).__name__ != "Tensor":
        return None
    place, extra = value.allocation_info, value.extra_tensor_info
    return {
        "scalar_type": int(value.scalar_type),
        "sizes": list(value.sizes),
        "dim_order": [int(dim) for dim in value.dim_order],
        "data_index": value.data_buffer_idx,
        "allocation": place and [place.memory_id, place.memory_offset_low + (place.memory_offset_high << 32)],
        "is_dynamic": int(value.shape_dynamism) == 1,
        "device": _device(extra) if extra else "cpu",
    }


def _device(entry: Any) -> str:
    return "cpu" if int(entry.device_type) == 0 else f"cuda:{entry.device_index}"


def read(path: str) -> dict[str, Any]:
    """The reader's view, in plain types."""
    from executorch.exir._serialize._program import deserialize_pte_binary

    file = deserialize_pte_binary(Path(path).read_bytes())
    plans = []
    for plan in file.program.execution_plan:
        (chain,) = plan.chains
        calls = [call.instr_args for call in chain.instructions]
        plans.append(
            {
                "name": plan.name,
                "values": [_tensor(value.val) for value in plan.values],
                "inputs": list(plan.inputs),
                "outputs": list(plan.outputs),
                "calls": [type(call).__name__ for call in calls],
                "operators": [f"{item.name}.{item.overload}" for item in plan.operators],
                "delegates": [item.id for item in plan.delegates],
                "buffer_sizes": list(plan.non_const_buffer_sizes),
                "buffer_devices": {
                    item.buffer_idx: _device(item) for item in plan.non_const_buffer_device or ()
                },
                "trees": [plan.container_meta_type.encoded_inp_str, plan.container_meta_type.encoded_out_str],
            }
        )
    constants = [hashlib.sha256(bytes(item.storage)).hexdigest() for item in file.program.constant_buffer]
    named = sorted(file.named_data.pte_data) if file.named_data else []
    return {"plans": plans, "constants": constants, "named": named}


def data(path: str) -> dict[str, Any]:
    """The tensors of a data file."""
    from executorch.exir._serialize._cord import Cord
    from executorch.extension.flat_tensor.serialize.serialize import FlatTensorSerializer

    payload = FlatTensorSerializer().deserialize(Cord(Path(path).read_bytes()))
    return {
        name: {
            "scalar_type": int(entry.tensor_layout.scalar_type),
            "sizes": list(entry.tensor_layout.sizes),
            "dim_order": [int(dim) for dim in entry.tensor_layout.dim_order],
            "sha256": hashlib.sha256(bytes(payload.buffers[entry.buffer_index])).hexdigest(),
        }
        for name, entry in payload.named_data.items()
    }


def run(path: str, source: str, destination: str, data_path: str | None = None) -> None:
    """Execute on the portable kernels of the wheel."""
    import numpy as np
    import torch
    from executorch.runtime import Runtime, Verification

    program = Runtime.get().load_program(
        path, verification=Verification.InternalConsistency, data_path=data_path
    )
    method = program.load_method("forward")
    with np.load(source) as arrays:
        inputs = [torch.from_numpy(arrays[name]) for name in arrays.files]
    outputs = method.execute(inputs)
    np.savez(destination, *[output.numpy() for output in outputs])


def answer(request: list[str]) -> Any:
    """The reply; an error's text under the key `error`."""
    try:
        return {"read": read, "data": data, "run": run}[request[0]](*request[1:])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    import executorch.exir
    import executorch.runtime  # noqa: F401

    print("reply true", flush=True)
    for line in sys.stdin:
        print("reply", json.dumps(answer(json.loads(line))), flush=True)
