"""Bringing packs into the arena and into the host tier, in threads beside the steps.

A job is a list of independent parts, one a checksum chunk, in the order of the blob; threads take
parts as they become free. The step thread starts jobs, polls `done` and may cancel; it must not
release a job's target pages before `done`. Errors stay in the job until `result` raises them.

    DiskLoad   file -> arena (in place where the host can reach it), every chunk verified
    HostLoad   host tier -> arena, a memcpy
    HostFill   file -> host tier, every chunk verified

The host tier is filled after the load, from the file (which the page cache still holds), and not on
the way: fresh shared memory takes writes at 2 GB/s on the machine where the load itself runs at 14
(docs/log.md), and nobody waits for a fill. Fills run one part at a time, so that a load that
arrives waits for one chunk at most.

Reading, hashing and copying release the GIL.
"""

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from engine.backend import Backend
from engine.errors import PackError
from engine.pack import BLOB_NAME, CHUNK_BYTES, Chunk, PackIndex
from engine.packs.host_tier import Fill, Slab
from engine.packs.weights import check_files, read_chunk

HOST_PART_BYTES = 64 << 20
"""Of a load from the host tier; a cancelled one ends within the time of one part."""


class ReadJob:
    """Progress of one load or fill; subclasses say what a part does.

    With `files_of`, a pack folder, a last part checks its small files: in a loader thread, for a
    large tokenizer takes longer to read and hash than a step may wait.
    """

    def __init__(self, index: PackIndex, files_of: Path | None = None) -> None:
        self.index = index
        self._files_of = files_of if index.files else None
        self._chunks = self.cut(index)
        self.num_parts = len(self._chunks) + (self._files_of is not None)
        self._lock = threading.Lock()
        self._num_left = self.num_parts
        self._futures: list[Future[None]] = []
        self._cancelled = False
        self._error: BaseException | None = None
        self._started_s = time.monotonic()
        self._ended_s = self._started_s

    @property
    def done(self) -> bool:
        """No thread will touch the job's memory any more."""
        return self._num_left == 0

    @property
    def cancelled(self) -> bool:
        """Whether it was told to stop; its target is then incomplete."""
        return self._cancelled

    @property
    def duration_s(self) -> float:
        """From start to the end of the last part."""
        return self._ended_s - self._started_s

    def cancel(self) -> None:
        """Stop soon. Returns at once: poll `done`."""
        self._cancelled = True
        with self._lock:
            futures = list(self._futures)
        for future in futures:
            future.cancel()

    def result(self) -> None:
        """Raises what went wrong (PackError, OSError); of several errors the first."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Give files and buffers back. The step thread calls it once, after `done`."""

    def run_part(self, number: int) -> None:
        """Called in loader threads."""
        if self._cancelled:
            return
        if number < len(self._chunks):
            self.work(self._chunks[number])
        elif self._files_of is not None:
            check_files(self._files_of, self.index)

    def cut(self, index: PackIndex) -> Sequence[Chunk]:
        """What the parts are: what has a checksum of its own."""
        return index.chunks

    def work(self, chunk: Chunk) -> None:
        """Do one part; return early once `cancelled`."""
        raise NotImplementedError

    def attach(self, future: Future[None]) -> None:
        """Count the part of `future` as done when it has ended, however it did."""
        with self._lock:
            self._futures.append(future)
        future.add_done_callback(self._part_done)
        if self._cancelled:
            future.cancel()

    def abandon(self, num_parts: int) -> None:
        """These parts will never be started."""
        with self._lock:
            self._cancelled = True
            self._finish_parts(num_parts)

    def _part_done(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
                self._cancelled = True
            self._finish_parts(1)

    def _finish_parts(self, count: int) -> None:
        self._ended_s = time.monotonic()
        self._num_left -= count


class _FileJob(ReadJob):
    """A job that reads the blob."""

    def __init__(
        self, index: PackIndex, pack_dir: Path, verify: bool, files_of: Path | None = None
    ) -> None:
        super().__init__(index, files_of)
        self._verify = verify
        try:
            self._blob = os.open(pack_dir / BLOB_NAME, os.O_RDONLY)
        except OSError as error:
            raise PackError(f"the pack {pack_dir} cannot be read ({error})") from error
        # Doubles the kernel's readahead: 1.4 x on a cold pack (docs/log.md).
        os.posix_fadvise(self._blob, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self._staging = threading.local()

    def close(self) -> None:
        """Close the blob."""
        os.close(self._blob)

    def _read(self, chunk: Chunk, target: memoryview) -> bool:
        return read_chunk(
            self._blob, self.index, chunk, target, self._verify, lambda: self._cancelled
        )

    def _buffer(self, num_bytes: int) -> memoryview:
        """This thread's own staging memory."""
        if not hasattr(self._staging, "buffer"):
            self._staging.buffer = memoryview(bytearray(CHUNK_BYTES))
        view: memoryview = self._staging.buffer[:num_bytes]
        return view


class DiskLoad(_FileJob):
    """Cold load. `segment_offsets`: where each segment begins in the arena, in bytes."""

    def __init__(
        self,
        index: PackIndex,
        pack_dir: Path,
        backend: Backend,
        segment_offsets: Sequence[int],
        verify: bool = True,
        files_of: Path | None = None,
    ) -> None:
        super().__init__(index, pack_dir, verify, files_of)
        self._backend = backend
        self._offsets = segment_offsets

    def work(self, chunk: Chunk) -> None:
        """One chunk into the arena."""
        place = self._offsets[chunk.segment] + chunk.offset
        direct = self._backend.host_view(place, chunk.num_bytes)
        if direct is not None:
            self._read(chunk, direct)
            return
        staged = self._buffer(chunk.num_bytes)
        if self._read(chunk, staged):
            self._backend.copy_in(place, staged)


class HostLoad(ReadJob):
    """Warm load, from a slab that the caller has acquired and releases after `done`."""

    def __init__(
        self,
        index: PackIndex,
        slab: Slab,
        backend: Backend,
        segment_offsets: Sequence[int],
        files_of: Path | None = None,
    ) -> None:
        super().__init__(index, files_of)
        self.slab = slab
        self._view: memoryview = slab.view
        self._backend = backend
        self._offsets = segment_offsets

    def cut(self, index: PackIndex) -> Sequence[Chunk]:
        """Neighbours together: to a device a copy of 8 MiB takes less time than starting it."""
        return joined(index.chunks, HOST_PART_BYTES)

    def work(self, chunk: Chunk) -> None:
        """One part into the arena. Its checksum was verified when the tier was filled."""
        start = self.index.segments[chunk.segment].offset + chunk.offset
        self._backend.copy_in(
            self._offsets[chunk.segment] + chunk.offset,
            self._view[start : start + chunk.num_bytes],
        )

    def close(self) -> None:
        """Let go of the mapping."""
        self._view.release()


class HostFill(_FileJob):
    """A pack into the host tier; commit or abandon `fill` after `done`."""

    def __init__(self, index: PackIndex, pack_dir: Path, fill: Fill, verify: bool = True) -> None:
        super().__init__(index, pack_dir, verify)
        self.fill = fill

    def work(self, chunk: Chunk) -> None:
        """One chunk into the tier's file; after the last one, its mapping."""
        staged = self._buffer(chunk.num_bytes)
        if not self._read(chunk, staged):
            return
        start = self.index.segments[chunk.segment].offset + chunk.offset
        done = 0
        while done < chunk.num_bytes:
            done += os.pwrite(self.fill.descriptor, staged[done:], start + done)
        if chunk is self.index.chunks[-1]:
            self.fill.populate()


def joined(chunks: Sequence[Chunk], most_bytes: int) -> list[Chunk]:
    """Runs of neighbours in one segment, up to so many bytes, without a checksum."""
    runs: list[Chunk] = []
    for chunk in chunks:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.segment == chunk.segment
            and last.offset + last.num_bytes == chunk.offset
            and last.num_bytes + chunk.num_bytes <= most_bytes
        ):
            runs[-1] = Chunk(last.segment, last.offset, last.num_bytes + chunk.num_bytes, 0)
        else:
            runs.append(Chunk(chunk.segment, chunk.offset, chunk.num_bytes, 0))
    return runs


class PackLoader:
    """A few threads that work jobs off in the order of their start."""

    def __init__(self, num_threads: int) -> None:
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="loader")
        self._lock = threading.Lock()
        self._closed = False

    def start(self, job: ReadJob) -> None:
        """Every part as soon as a thread is free."""
        for number in range(job.num_parts):
            job.attach(self._executor.submit(job.run_part, number))

    def start_slowly(self, job: ReadJob) -> None:
        """One part at a time, each behind whatever was started meanwhile."""
        self._start_part(job, 0)

    def close(self) -> None:
        """Stop. Jobs must have been cancelled; returns when no thread touches memory any more."""
        with self._lock:
            self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _start_part(self, job: ReadJob, number: int) -> None:
        num_left = job.num_parts - number
        if num_left == 0:
            return
        with self._lock:
            if self._closed or job.cancelled:
                future = None
            else:
                future = self._executor.submit(job.run_part, number)
        if future is None:
            job.abandon(num_left)
            return
        job.attach(future)
        future.add_done_callback(lambda _: self._start_part(job, number + 1))
