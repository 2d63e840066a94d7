"""The fresh process of a cold start's measurement, which imports what a user's program would and no more.

`python -m devplan.runtime.measure.cold_start ARTIFACT METHOD INPUTS.npz OPTIONS STARTED` prints the
seconds since ``STARTED`` (a wall clock time) after importing, loading and the first result, as JSON.
"""

from __future__ import annotations

import json
import sys
import time


def main(artifact: str, method: str, inputs: str, options: str, started: str) -> None:
    """Load, run once, print."""
    begin, marks = float(started), dict[str, float]()

    def mark(name: str) -> None:
        marks[name] = time.time() - begin

    from .. import load  # what a user's program does

    mark("import")
    program = load(artifact, **json.loads(options), notify=lambda line: None)
    mark("load")
    from .bench_inputs import place_inputs, read_inputs

    called = program.method(method)
    called.run(place_inputs(program, called, read_inputs(inputs)))
    mark("first_result")
    print(json.dumps(marks))


def told_main(*arguments: str) -> int:
    """The same; an error that a user can act on is printed as JSON, and its code given."""
    try:
        main(*arguments)
    except Exception as error:
        from ..errors import DevplanError

        if not isinstance(error, DevplanError):
            raise
        print(json.dumps([error.kind, error.what, error.why, error.hint]))
        return error.code
    return 0


if __name__ == "__main__":
    sys.exit(told_main(*sys.argv[1:]))
