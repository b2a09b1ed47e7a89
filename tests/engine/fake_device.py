"""A device with streams on the CPU: late, in any order that streams leave open, full of NaN.

What is handed to a stream is kept and carried out at some later moment, by whoever asks the device
for anything: a few pieces of any streams at random, and what an event that is waited for needs. So
whatever is read before somebody has waited for it is still what it was before. Memory begins as
0xFF (NaN in every float type), and pinned memory likewise.

A graph is recorded below the dispatcher: what comes of operators is kept by its address and written
anew at a replay, python's numbers stay what they were, views cost nothing. `opaque` makes one piece
of a call that torch does not see (a launched kernel, or its reference). What a capture refuses on a
GPU is refused here: reading a value on the host, bringing one from the host, asking how many.

With `seed` None everything runs at once: for dry runs, where the plumbing is what is looked at.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten

from engine.backend.device import Event
from engine.errors import CaptureFailed, DeviceLost, DeviceUnusable

F = TypeVar("F", bound=Callable[..., Any])

FORBIDDEN = (
    *("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "unique"),
    *("lift_fresh", "one_hot"),
)
"""Operators that wait for the device or copy from the host: no capture takes them. In inference
mode they come whole, elsewhere in pieces."""
POISON = 0xFF
MOST_ASKED = 50
"""So often an event may be asked for before it is reached, however lazy the device is."""


class FakeEvent:
    """Implements `backend.device.Event`."""

    def __init__(self, device: "FakeDevice", timed: bool) -> None:
        self.reached_s: float | None = None
        self.timed = timed
        self._device = device
        self._num_asked = 0

    def done(self) -> bool:
        """Asking lets a little happen, perhaps; a device comes to everything in the end."""
        self._num_asked += 1
        if self._num_asked > MOST_ASKED:
            self._device.reach(self)
        self._device.stir()
        return self.reached_s is not None

    def wait(self) -> None:
        """What it needs happens, and perhaps more."""
        self._device.reach(self)

    def seconds_since(self, earlier: Event) -> float:
        """Pieces of work in between, as milliseconds."""
        assert isinstance(earlier, FakeEvent)
        if not (self.timed and earlier.timed):
            raise RuntimeError("events without timing")
        if self.reached_s is None or earlier.reached_s is None:
            raise RuntimeError("the device has not come to these events")
        return self.reached_s - earlier.reached_s


class FakeStream:
    """Implements `backend.device.Stream`. Its queue holds work, marks, and events to wait for."""

    def __init__(self, device: "FakeDevice") -> None:
        self._device = device
        self.queue: deque[Callable[[], object] | tuple[str, FakeEvent]] = deque()

    def run(self, work: Callable[[], object]) -> None:
        """Some time later."""
        self._device.add(self, work)

    def record(self, timed: bool = False) -> FakeEvent:
        """A mark."""
        event = FakeEvent(self._device, timed)
        self._device.add(self, ("mark", event))
        return event

    def wait_for(self, event: Event) -> None:
        """Nothing behind this runs before."""
        assert isinstance(event, FakeEvent)
        self._device.add(self, ("wait", event))

    @property
    def blocked_by(self) -> FakeEvent | None:
        """The event that its next piece waits for."""
        piece = self.queue[0]
        if isinstance(piece, tuple) and piece[0] == "wait" and piece[1].reached_s is None:
            return piece[1]
        return None


class FakeDevice:
    """Implements `backend.device.Device`.

    lazy: how seldom work is done before somebody waits for it, 0 to 1.
    """

    def __init__(
        self, seed: int | None = None, memory_bytes: int = 1 << 30, lazy: float = 0.8
    ) -> None:
        self._rng = None if seed is None else random.Random(seed)
        self._memory_bytes = memory_bytes
        self._taken_bytes = 0
        self._lazy = lazy
        self._lock = threading.RLock()
        self._streams: list[FakeStream] = []
        self._clock_s = 0.0
        self._running = False
        self.pinned: dict[int, int] = {}
        self.lost = False
        self.num_captures = 0
        self.num_replays = 0

    @property
    def name(self) -> str:
        """In words."""
        return "fake device"

    @property
    def torch_device(self) -> torch.device:
        """Tensors are the CPU's."""
        return torch.device("cpu")

    @property
    def num_processors(self) -> int:
        """Few, so that contexts are split in tests too."""
        return 2

    def memory(self) -> tuple[int, int]:
        """What `buffer` has given out is taken."""
        return self._memory_bytes - self._taken_bytes, self._memory_bytes

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Poisoned. Raises DeviceUnusable."""
        free, total = self.memory()
        if num_bytes > free:
            raise DeviceUnusable(f"the device has {free} of {total} bytes free")
        self._taken_bytes += num_bytes
        return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Poisoned. Raises RuntimeError in a capture."""
        with _disable_current_modes() as modes:
            if any(isinstance(mode, _Recorder) for mode in modes):
                raise RuntimeError("no pinned memory is allocated while a stream is captured")
            return torch.full((num_bytes,), POISON, dtype=torch.uint8)

    def stream(self, urgent: bool = False) -> FakeStream:
        """One more."""
        del urgent
        stream = FakeStream(self)
        with self._lock:
            self._streams.append(stream)
        return stream

    def pin(self, address: int, num_bytes: int) -> None:
        """Raises OSError where some of it is pinned already, as a driver would."""
        with self._lock:
            for start, size in self.pinned.items():
                if start < address + num_bytes and address < start + size:
                    raise OSError("this memory is pinned already")
            self.pinned[address] = num_bytes

    def unpin(self, address: int) -> None:
        """Raises KeyError for what is not pinned."""
        with self._lock:
            del self.pinned[address]

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple["FakeGraph", torch.Tensor]:
        """Records; what it computes on the way is overwritten with NaN."""
        graph = FakeGraph(self)
        try:
            with _no_lists(), graph.recorder:
                result = work()
        except Exception as error:  # as the real one does
            raise CaptureFailed(f"{type(error).__name__}: {error}") from error
        graph.spoil()
        self.num_captures += 1
        return graph, result

    # What happens when ------------------------------------------------------------------------

    def add(self, stream: FakeStream, piece: Any) -> None:
        """Hand a piece over."""
        with self._lock:
            self._check()
            stream.queue.append(piece)
            if self._rng is None:
                self._drain()
        self.stir()

    def stir(self) -> None:
        """Perhaps a few pieces of some streams."""
        with self._lock:
            self._check()
            if self._running or self._rng is None:
                return
            while self._rng.random() > self._lazy:
                ready = [s for s in self._streams if s.queue and s.blocked_by is None]
                if not ready:
                    return
                self._run_next(self._rng.choice(ready))

    def reach(self, event: FakeEvent) -> None:
        """Until the event: what it needs, perhaps with pieces of others in between."""
        with self._lock:
            while event.reached_s is None:
                self._check()
                self._run_next(self._leading_to(event))
                self.stir()

    def lose(self) -> None:
        """From now on every call fails."""
        self.lost = True

    def _check(self) -> None:
        if self.lost:
            raise DeviceLost("the device has failed and its memory is lost")

    def _drain(self) -> None:
        while ready := [s for s in self._streams if s.queue and s.blocked_by is None]:
            if self._running:
                return
            self._run_next(ready[0])

    def _leading_to(self, event: FakeEvent) -> FakeStream:
        """The stream whose next piece has to run before the event."""
        stream = next(s for s in self._streams if ("mark", event) in s.queue)
        awaited = stream.blocked_by
        return stream if awaited is None else self._leading_to(awaited)

    def _run_next(self, stream: FakeStream) -> None:
        piece = stream.queue.popleft()
        self._clock_s += 0.001
        if isinstance(piece, tuple):
            if piece[0] == "mark":
                piece[1].reached_s = self._clock_s
            return
        self._running = True
        try:
            piece()
        finally:
            self._running = False


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what operators do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []
        self.written: list[torch.Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__.split(".")[0]
        if name.strip("_") in [word.strip("_") for word in FORBIDDEN]:
            raise RuntimeError(f"{name} is not permitted while a stream is captured")
        if name == "where" and len(args) == 1:
            raise RuntimeError("where is not permitted to find places while a stream is captured")
        if name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1]):
            raise RuntimeError("an index of booleans is not permitted while a stream is captured")
        out = func(*args, **kwargs)
        if func._schema.is_mutable:
            self.calls.append(lambda: func(*args, **kwargs))
        # By where it lies: `to` and `reshape` say they give views, and often give copies.
        elif not _storages(out) <= _storages((args, kwargs)):
            self.note(lambda: func(*args, **kwargs), out)
        return out

    def note(self, call: Callable[[], Any], out: Any) -> None:
        """At a replay the results go where `out` lies."""
        kept = [leaf for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor)]
        self.written += kept

        def again() -> None:
            fresh = [leaf for leaf in tree_flatten(call())[0] if isinstance(leaf, torch.Tensor)]
            for old, new in zip(kept, fresh, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

        self.calls.append(again)


@contextmanager
def _no_lists() -> Iterator[None]:
    """A tensor of the processor becomes a list without an operator; one of a GPU waits for it."""
    tolist = torch.Tensor.tolist

    def watched(self: torch.Tensor) -> Any:
        if _current_recorder() is not None:
            raise RuntimeError("tolist is not permitted while a stream is captured")
        return tolist(self)

    with mock.patch.object(torch.Tensor, "tolist", watched):
        yield


def _storages(values: Any) -> set[int]:
    """Where the tensors among them lie."""
    leaves = tree_flatten(values)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class FakeGraph:
    """Implements `backend.device.Graph`."""

    def __init__(self, device: FakeDevice) -> None:
        self.recorder = _Recorder()
        self._device = device

    @property
    def num_bytes(self) -> int:
        """Of its results."""
        return sum(tensor.nbytes for tensor in self.recorder.written)

    def spoil(self) -> None:
        """A capture computes nothing."""
        for tensor in self.recorder.written:
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))

    def replay(self) -> None:
        """The same calls over what lies at the same addresses now."""
        self._device.num_replays += 1
        for call in self.recorder.calls:
            call()


def opaque(call: F) -> F:
    """One piece of a graph, whatever it does inside; what it changes in place it changes again."""

    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder = _current_recorder()
        if recorder is None:
            return call(*args, **kwargs)

        def run() -> Any:
            with _disable_current_modes():
                return call(*args, **kwargs)

        out = run()
        recorder.note(run, out)
        return out

    return recorded  # type: ignore[return-value]


def _current_recorder() -> _Recorder | None:
    found = torch.utils._python_dispatch._get_current_dispatch_mode()
    return found if isinstance(found, _Recorder) else None
