"""A GPU through torch's CUDA API: the one file that calls a driver. Implements `backend.device`.

`check` is the door: it says in one line why a device cannot be used (no driver, one too old for
this build of torch, an unsupported GPU, no such number). Importing this module touches no driver.
"""

import contextlib
import gc
import re
from collections.abc import Callable, Iterator

import torch

from engine.backend.device import Event
from engine.errors import CaptureFailed, CapturesEnded, DeviceLost, DeviceUnusable
from kernels.gate_mul import gate_mul
from kernels.triton_api import HAS_TRITON

OLDEST = (8, 0)
"""Compute capability of the oldest architecture that the kernels are compiled for."""
REGISTER_PORTABLE = 1
NO_ARCHITECTURE = "no kernel image"
CAPTURE_MODE = "thread_local"
"""Other threads may copy, pin and ask for events while steps are recorded."""
MOST_BROKEN_OFF = 32
"""Captures that the driver breaks off each leave memory behind: after so many no other is begun."""


def check(index: int) -> None:
    """Raises DeviceUnusable, in one line, unless device `index` can be used."""
    if torch.version.cuda is None:
        raise DeviceUnusable(
            "this build of torch has no CUDA support: install one that has it, or set device = cpu"
        )
    if not HAS_TRITON:
        raise DeviceUnusable(
            "triton is not installed: install the extra `cuda`, or set device = cpu"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        count = torch.cuda.device_count()
    except (RuntimeError, AssertionError) as error:
        raise DeviceUnusable(driver_problem(str(error))) from error
    if not 0 <= index < count:
        raise DeviceUnusable(f"there is no GPU {index}: the driver shows {count} GPUs")
    major, minor = torch.cuda.get_device_capability(index)
    name = torch.cuda.get_device_name(index)
    if (major, minor) < OLDEST:
        raise DeviceUnusable(
            f"{name} has compute capability {major}.{minor}; at least "
            f"{OLDEST[0]}.{OLDEST[1]} is required (A100, H100, B200 and similar GPUs)"
        )
    try:
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        if NO_ARCHITECTURE in text:
            text = f"torch {torch.__version__} was not built for it: install a build for this GPU"
        raise DeviceUnusable(f"{name} cannot be used: {text}") from error
    try:
        try_kernel(index)
    except Exception as error:  # a compiler, a linker and a driver raise whatever they like
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DeviceUnusable(
            f"Triton cannot compile a kernel for {name}: {text} (it needs a C compiler)"
        ) from error


def try_kernel(index: int) -> None:
    """Compile and launch the smallest there is, for what no first request should find out."""
    with torch.cuda.device(index):
        row = torch.zeros(1, 2, dtype=torch.bfloat16, device=f"cuda:{index}")
        gate_mul(row, "silu").tolist()


def driver_problem(text: str) -> str:
    """What torch says of a driver, in one line that says what to do."""
    line = text.strip().splitlines()[0] if text.strip() else "no response"
    if "too old" in text:
        found = re.search(r"found version (\d+)", text)
        version = f" ({found.group(1)})" if found else ""
        return (
            f"the NVIDIA driver{version} is too old for CUDA {torch.version.cuda}: update it, or "
            "install a build of torch for an older CUDA"
        )
    if "no NVIDIA driver" in text.replace("Found ", "").replace("found ", ""):
        return "there is no NVIDIA driver: install one, or set device = cpu"
    if "No CUDA GPUs" in text:
        return "the NVIDIA driver shows no GPU to this process (CUDA_VISIBLE_DEVICES?)"
    return f"the NVIDIA driver cannot be used: {line}"


def gpu_names() -> list[str]:
    """GPUs that a driver shows, as torch calls them; where there is none nothing is loaded for
    long."""
    count = torch.cuda.device_count() if torch.version.cuda is not None else 0
    return [f"cuda:{number}" for number in range(count)]


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    """Sticky failures of the driver as DeviceLost; a lack of memory passes as it is."""
    try:
        yield
    except torch.AcceleratorError as error:
        line = str(error).splitlines()[0]
        raise DeviceLost(f"the GPU has failed and its memory is lost: {line}") from error


class CudaEvent:
    """Implements `backend.device.Event`."""

    def __init__(self, stream: torch.cuda.Stream, timed: bool) -> None:
        # blocking: whoever waits sleeps, where spinning would take a core from the steps.
        self.event = torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]
        with _device_errors():
            self.event.record(stream)

    def done(self) -> bool:
        """Whether it was reached."""
        with _device_errors():
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Releases the GIL."""
        with _device_errors():
            self.event.synchronize()

    def seconds_since(self, earlier: Event) -> float:
        """Both must be timed."""
        assert isinstance(earlier, CudaEvent)
        with _device_errors():
            return float(earlier.event.elapsed_time(self.event)) / 1e3


class CudaStream:
    """Implements `backend.device.Stream`."""

    def __init__(self, device: torch.device, urgent: bool) -> None:
        self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object]) -> None:
        """`work` launches now; the device follows."""
        with _device_errors(), torch.cuda.stream(self._stream):
            work()

    def record(self, timed: bool = False) -> CudaEvent:
        """A mark."""
        return CudaEvent(self._stream, timed)

    def wait_for(self, event: Event) -> None:
        """On the device; the host goes on."""
        assert isinstance(event, CudaEvent)
        with _device_errors():
            self._stream.wait_event(event.event)


class CudaGraphHandle:
    """Implements `backend.device.Graph`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self._graph = graph
        self.num_bytes = num_bytes

    def replay(self) -> None:
        """Into the current stream."""
        self._graph.replay()


class CudaDevice:
    """Implements `backend.device.Device`."""

    def __init__(self, index: int) -> None:
        """Raises DeviceUnusable."""
        check(index)
        self._device = torch.device("cuda", index)
        torch.cuda.set_device(self._device)
        self._properties = torch.cuda.get_device_properties(self._device)
        # One pool for all graphs: they are replayed one after the other, in one stream, and what
        # one leaves behind is read before the next begins.
        self._pool = torch.cuda.graph_pool_handle()
        self._anchor: torch.cuda.CUDAGraph | None = None
        self._broken_off: list[tuple[torch.cuda.CUDAGraph, torch.cuda.CUDAGraph | None]] = []

    @property
    def name(self) -> str:
        """As the driver names it."""
        return f"{self._device} ({self._properties.name})"

    @property
    def torch_device(self) -> torch.device:
        """With its number."""
        return self._device

    @property
    def num_processors(self) -> int:
        """Streaming multiprocessors."""
        return int(self._properties.multi_processor_count)

    def memory(self) -> tuple[int, int]:
        """As the driver counts, other processes' memory included."""
        with _device_errors():
            free, total = torch.cuda.mem_get_info(self._device)
        return int(free), int(total)

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """One allocation."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            free, total = self.memory()
            raise DeviceUnusable(
                f"{self.name} has {free} of {total} bytes free, but {num_bytes} are needed: "
                "lower device_budget_bytes, or stop other programs that use it"
            ) from error

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """From torch's pool of pinned memory, which keeps it until copies from it have ended.

        Raises RuntimeError while the stream is captured: a graph would copy from it for ever after.
        """
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("no pinned memory is allocated while a stream is captured")
        with torch.cuda.device(self._device):
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def stream(self, urgent: bool = False) -> CudaStream:
        """Not synchronised with the default stream."""
        return CudaStream(self._device, urgent)

    def pin(self, address: int, num_bytes: int) -> None:
        """cudaHostRegister; the GIL is released meanwhile."""
        # A thread begins with device 0, whichever its process uses.
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            status = int(runtime.cudaHostRegister(address, num_bytes, REGISTER_PORTABLE))
        if status:
            raise OSError(f"the driver cannot pin {num_bytes} bytes (CUDA error {status})")

    def unpin(self, address: int) -> None:
        """cudaHostUnregister."""
        with torch.cuda.device(self._device):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            runtime.cudaHostUnregister(address)

    def capture(self, work: Callable[[], torch.Tensor]) -> tuple[CudaGraphHandle, torch.Tensor]:
        """In the current stream. Other threads may go on with copies meanwhile.

        Not through `torch.cuda.graph`, which synchronises the whole device and collects garbage:
        nobody else's steps or loads should wait for a capture.
        """
        if len(self._broken_off) >= MOST_BROKEN_OFF:
            raise CapturesEnded("the driver has broken off too many captures")
        before, _ = self.memory()
        with _no_garbage_collected():
            if self._anchor is None:
                self._anchor, _ = self._recorded(self._anchored)
            graph, result = self._recorded(work)
        after, _ = self.memory()
        return CudaGraphHandle(graph, max(0, before - after)), result

    def _anchored(self) -> torch.Tensor:
        """What keeps the pool: torch forgets one with its last graph, and a handle is good once."""
        return torch.zeros(1, device=self._device)

    def _recorded(
        self, work: Callable[[], torch.Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode=CAPTURE_MODE)
            result = work()
            graph.capture_end()
        except Exception as error:  # operators that cannot be captured raise whatever they like
            self._give_up(graph)
            raise CaptureFailed(f"{type(error).__name__}: {error}".splitlines()[0]) from error
        return graph, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """The stream and the allocator as they were before a capture that came to nothing.

        One that the driver has broken off never ends to torch's allocator: it would refuse the pool
        to all others, and ask the dead graph about each allocation. So both are left behind.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError, AttributeError):  # a name that torch may change
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            self._broken_off.append((graph, self._anchor))
            self._anchor = None
            self._pool = torch.cuda.graph_pool_handle()


@contextlib.contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """What is collected in the midst of a capture may hold pinned memory or graphs.

    To give those back the allocators mark streams, the one that is captured too.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
