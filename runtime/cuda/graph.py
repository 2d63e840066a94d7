"""A CUDA graph made of enqueued work, as one step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ..backend import Step
from ..errors import DevplanError, ExecutionError
from .driver import check


class GraphStep:
    """Launches an instantiated graph when called.

    ``nodes`` is the number of nodes; ``nbytes`` the device memory that instantiating it took.
    """

    def __init__(
        self, cu: Any, executable: Any, nodes: int, enter: Step, aside: Callable[[Any, Any, str], None]
    ) -> None:
        self._cu, self._executable, self._enter, self._aside = cu, executable, enter, aside
        self._launch = cu.cuGraphLaunch
        self.nodes, self.nbytes = nodes, 0

    def launch(self, stream: Any) -> None:
        """Enqueue the graph on a stream."""
        if self._executable is None:
            raise ExecutionError("this CUDA graph has been released")
        self._enter()
        result = self._launch(self._executable, stream)
        if result[0]:
            check(result, "launch a CUDA graph")

    def close(self) -> None:
        """Destroy the graph. Idempotent."""
        executable, self._executable = self._executable, None
        if executable is not None:
            self._aside(self._cu.cuGraphExecDestroy, executable, "release a CUDA graph")

    def __del__(self) -> None:
        # Bindings that a cache gives up take their graphs along.
        with contextlib.suppress(DevplanError):
            self.close()


def capture(cu: Any, stream: Any, steps: Sequence[Step], join: Callable[[bool], None]) -> tuple[Any, int]:
    """Record what the steps enqueue on the stream; give (executable graph, number of nodes).

    Nothing is executed. Capture is relaxed: a library may load code meanwhile. ``join(True)`` is called when
    recording has begun and ``join(False)`` before it ends, to draw further streams into the graph and back.

    Raises:
        ExecutionError: a step failed or did what cannot be recorded; the stream is out of capture again.
    """
    mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    check(cu.cuStreamBeginCapture(stream, mode), "begin a CUDA graph")
    try:
        join(True)
        for step in steps:
            step()
        join(False)
    except BaseException as error:
        _abandon(cu, stream)
        if isinstance(error, DevplanError):
            why = f"{error.what}: {error.why}" if error.why else error.what
            raise ExecutionError("could not record a CUDA graph", why=why) from error
        raise
    graph = check(cu.cuStreamEndCapture(stream), "end a CUDA graph")
    try:
        # With no array given, the call only counts.
        nodes = int(check(cu.cuGraphGetNodes(graph, 0), "count a CUDA graph's nodes")[1])
        executable = check(cu.cuGraphInstantiate(graph, 0), "instantiate a CUDA graph")
    finally:
        cu.cuGraphDestroy(graph)
    return executable, nodes


def _abandon(cu: Any, stream: Any) -> None:
    """Take a stream out of a capture that failed; its status says only what is already known."""
    ended = cu.cuStreamEndCapture(stream)
    if len(ended) > 1 and not ended[0] and ended[1] is not None and int(ended[1]):
        cu.cuGraphDestroy(ended[1])
