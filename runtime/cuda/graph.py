"""CUDA graphs: recorded from enqueued work, replayed as one step, and timed from within."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..backend import Step
from ..errors import DevplanError, ExecutionError
from .driver import check

if TYPE_CHECKING:
    from ..calls.host_io import HostEnd
    from .backend import CudaBackend


@dataclass(frozen=True)
class MovingNode:
    """A copy's node in the graph that is being recorded, and the host end that it shall follow."""

    node: Any
    end: HostEnd
    uploads: bool


class Follower:
    """Sets the host address of one copy in an instantiated graph.

    The node belongs to the graph that was recorded, so that graph has to live as long.
    """

    def __init__(self, backend: CudaBackend, executable: Any, moving: MovingNode) -> None:
        cu = backend.driver
        self._cu, self._executable, self._node = cu, executable, moving.node
        self._context = backend.context
        self._parameters = check(cu.cuGraphMemcpyNodeGetParams(moving.node), "read a copy of a CUDA graph")
        self._field = "srcHost" if moving.uploads else "dstHost"

    def __call__(self, address: int) -> bool:
        """Use this address from now on; whether the graph could take it."""
        setattr(self._parameters, self._field, address)
        update = self._cu.cuGraphExecMemcpyNodeSetParams
        return not update(self._executable, self._node, self._parameters, self._context)[0]


class GraphStep:
    """Enqueues an instantiated graph on whatever stream its backend uses at the time.

    ``nodes`` is the number of nodes; ``nbytes`` the device memory that instantiating it took.
    """

    def __init__(self, backend: CudaBackend, recorded: Recorded, moving: Sequence[MovingNode] = ()) -> None:
        self._backend, self._executable = backend, recorded.executable
        self._launch = backend.driver.cuGraphLaunch
        self.nodes, self.nbytes = recorded.nodes, 0
        self._graph = recorded.graph
        self._followed: list[tuple[HostEnd, Follower]] = []
        for node in moving:
            follower = Follower(backend, recorded.executable, node)
            node.end.followers.append(follower)
            self._followed.append((node.end, follower))
        if not moving:
            self._drop_graph()

    def __call__(self) -> None:
        """Enqueue the graph."""
        if self._executable is None:
            raise ExecutionError("this CUDA graph has been released")
        self._backend.enter()
        result = self._launch(self._executable, self._backend.stream_object)
        if result[0]:
            check(result, "launch a CUDA graph")

    def and_wait(self) -> Step:
        """The graph and the wait for it as one step: for small programs Python's share counts.

        The context is named only where the launch is refused without, as in a thread that is new to the GPU.
        """
        backend, executable, launch = self._backend, self._executable, self._launch
        wait = backend.driver.cuStreamSynchronize

        def run() -> None:
            stream = backend.stream_object
            if launch(executable, stream)[0]:
                self()
            if wait(stream)[0]:
                backend.synchronize()

        return run

    def close(self) -> None:
        """Destroy the graph. Idempotent."""
        for end, follower in self._followed:
            end.followers.remove(follower)
        self._followed.clear()
        self._drop_graph()
        executable, self._executable = self._executable, None
        if executable is not None:
            destroy = self._backend.driver.cuGraphExecDestroy
            self._backend.aside(destroy, executable, "release a CUDA graph")

    def _drop_graph(self) -> None:
        graph, self._graph = self._graph, None
        if graph is not None:
            self._backend.driver.cuGraphDestroy(graph)

    def __del__(self) -> None:
        # Bindings that a cache gives up take their graphs along.
        with contextlib.suppress(DevplanError):
            self.close()


@dataclass(frozen=True)
class Recorded:
    """A graph as recorded, the executable made of it, and how many nodes it has."""

    graph: Any
    executable: Any
    nodes: int


def last_node(cu: Any, stream: Any) -> Any | None:
    """The node that was recorded last on a stream; None when it is not being recorded."""
    result = cu.cuStreamGetCaptureInfo(stream)
    active = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    if result[0] or result[1] != active or not result[4]:
        return None
    return result[4][0]


def separate(cu: Any, stream: Any) -> bool:
    """Let what is recorded next on a stream begin after all before it; False when it is not being recorded.

    An empty node in between leaves no kernel that the next one could overlap with, however it is launched.
    """
    status, recording, _, graph, nodes, *_, count = cu.cuStreamGetCaptureInfo(stream)
    if status or recording != cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        return False
    doing = "separate two kernels of a CUDA graph"
    node = check(cu.cuGraphAddEmptyNode(graph, nodes[:count] if nodes else None, count), doing)
    # cuda-python 12 has edges' types in functions of their own names.
    update = getattr(cu, "cuStreamUpdateCaptureDependencies_v2", None) or cu.cuStreamUpdateCaptureDependencies
    flags = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
    check(update(stream, [node], None, 1, int(flags)), doing)
    return True


def capture(cu: Any, stream: Any, steps: Sequence[Step], join: Callable[[bool], None]) -> Recorded:
    """Record what the steps enqueue on the stream, and instantiate it.

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
    except BaseException:
        cu.cuGraphDestroy(graph)
        raise
    return Recorded(graph, executable, nodes)


def _abandon(cu: Any, stream: Any) -> None:
    """Take a stream out of a capture that failed; its status says only what is already known."""
    ended = cu.cuStreamEndCapture(stream)
    if len(ended) > 1 and not ended[0] and ended[1] is not None and int(ended[1]):
        cu.cuGraphDestroy(ended[1])


def is_out_of_capture(cu: Any, stream: Any) -> bool:
    """Whether a stream can be used again after a capture that failed."""
    result = cu.cuStreamIsCapturing(stream)
    return bool(not result[0] and result[1] == cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def timeline(
    backend: CudaBackend, groups: Sequence[Sequence[Step]], repeat: int, before: Step | None = None
) -> list[list[float]]:
    """See `CudaBackend.timeline`."""
    backend.enter()
    cu = backend.driver
    events = [check(cu.cuEventCreate(0), "make an event") for _ in range(len(groups) + 1)]
    # As nodes of the graph: an ordinary record would only say what depends on what.
    external = cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL

    def record(event: Any) -> Step:
        doing = "record an event"
        return lambda: check(cu.cuEventRecordWithFlags(event, backend.stream_object, external), doing)

    steps = [record(events[0])]
    for group, event in zip(groups, events[1:], strict=True):
        steps += [*group, record(event)]
    times: list[list[float]] = []
    try:
        replay = backend.capture(steps)
        for _ in range(repeat):
            if before is not None:
                before()
            replay()
            backend.synchronize()
            elapsed = [
                check(cu.cuEventElapsedTime(begin, end), "read the time")
                for begin, end in itertools.pairwise(events)
            ]
            times.append([milliseconds * 1e-3 for milliseconds in elapsed])
        replay.close()
    finally:
        for event in events:
            cu.cuEventDestroy(event)
    return times
