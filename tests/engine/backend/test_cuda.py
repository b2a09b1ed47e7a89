"""The GPU's backend over a device that delays, reorders and poisons: order, fences, copies.

Whatever is done here with a wait left out has to fail: `PLANTED` leaves them out one by one.
"""

import mmap
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.backend import cuda, pinning
from engine.backend.cuda import CudaBackend, HostCopies
from engine.backend.pinning import Pinner
from engine.errors import DeviceLost, DeviceUnusable, IntegrityError
from kernels.page_copy import page_copy_ref
from tests.engine.fake_device import FakeDevice, FakeEvent

PAGE = 4096
NUM_PAGES = 16
LIVES = 40


def backend_on(device: FakeDevice, slot_bytes: int = 1000, slice_bytes: int = 3000) -> CudaBackend:
    """Small slots and slices, so that every copy has borders to cross."""
    backend = CudaBackend(
        device, NUM_PAGES * PAGE, page_copy_ref, Pinner(device, slice_bytes=slice_bytes)
    )
    backend._copies = HostCopies(device, backend.arena, backend.pinner, slot_bytes=slot_bytes)
    return backend


class Mapping:
    """Shared memory as the host tier has it, full of one seed's bytes."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        path = folder / f"map-{seed}-{size}"
        path.write_bytes(np.random.default_rng(seed).bytes(size))
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), size)


def live(seed: int, folder: Path) -> None:
    """A life of pages: loaded, read by steps, moved, given back, poisoned, loaded anew.

    Every step's result is compared with what the host says it must be.
    """
    rng = random.Random(seed)
    device = FakeDevice(seed, lazy=rng.choice((0.3, 0.8, 0.98)))
    backend = backend_on(device)
    mapping = Mapping(folder, 2 * PAGE + 100, seed % 4)
    backend.pinner.hold(mapping.map)
    expected = [bytes([0xFF]) * PAGE for _ in range(NUM_PAGES)]
    fenced: dict[int, int] = {}
    pending: list[tuple[Any, list[bytes], list[int]]] = []
    step = 0

    def loaded(page: int) -> None:
        if rng.random() < 0.5:
            source = (
                memoryview(rng.randbytes(PAGE))
                if rng.random() < 0.5
                else memoryview(bytearray(rng.randbytes(PAGE)))
            )
        else:
            start = rng.randrange(PAGE)
            source = memoryview(mapping.map)[start : start + PAGE]
        content = bytes(source)
        thread = threading.Thread(target=backend.copy_in, args=(page * PAGE, source))
        thread.start()
        thread.join()
        if not source.readonly and not isinstance(source.obj, mmap.mmap):
            source[:] = bytes(PAGE)  # it may be used again at once
        expected[page] = content

    for _ in range(30):
        choice = rng.random()
        ripe = [page for page in range(NUM_PAGES) if page not in fenced]
        if choice < 0.35 and ripe:
            loaded(rng.choice(ripe))
        elif choice < 0.55 and len(ripe) > 1:
            source, target = rng.sample(ripe, 2)
            backend.copy_within([(source * PAGE, target * PAGE, PAGE)])
            expected[target] = expected[source]
            # What was read, and what was written beside the steps, is behind the next step only.
            fenced[source] = fenced[target] = step + 1
        elif choice < 0.9:
            step += 1
            pages = rng.sample(range(NUM_PAGES), 3)
            pending.append(read_step(backend, step, pages, expected))
            for page in pages:
                fenced[page] = max(step, fenced.get(page, 0))
        else:
            step += 1
            backend.launched(step)
        done = backend.last_done()
        for page, last in list(fenced.items()):
            if last <= done:
                del fenced[page]
                if rng.random() < 0.3:
                    backend.arena[page * PAGE : (page + 1) * PAGE].fill_(0xFF)
                    expected[page] = bytes([0xFF]) * PAGE
        if len(pending) > 2:
            check(pending.pop(0))
    for one in pending:
        check(one)
    backend.close()


def lives(seeds: range, folder: Path) -> None:
    for seed in seeds:
        live(seed, folder)


def lives_and_fences(seeds: range, folder: Path) -> None:
    """And what a random life meets too seldom: an empty step behind copies."""
    lives(seeds, folder)
    test_empty_steps_end_with_what_was_before_them()


def read_step(
    backend: CudaBackend, step: int, pages: list[int], expected: list[bytes]
) -> tuple[Any, list[bytes], list[int]]:
    """A step that reads pages."""

    def work() -> torch.Tensor:
        return torch.cat([backend.arena[page * PAGE : (page + 1) * PAGE] for page in pages])

    return backend.launch(step, work), [expected[page] for page in pages], pages


def check(one: tuple[Any, list[bytes], list[int]]) -> None:
    handle, wanted, pages = one
    got = bytes(handle.wait().numpy().tobytes())
    assert handle.done()
    assert handle.device_s > 0
    assert got == b"".join(wanted), f"pages {pages} are not what they were when the step was given"


@pytest.mark.parametrize("seeds", [range(0, LIVES), range(LIVES, 2 * LIVES)])
def test_random_lives(seeds: range, tmp_path: Path) -> None:
    lives(seeds, tmp_path)


def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """copy_in returns before its bytes have arrived."""

    def copy_in(self: HostCopies, offset: int, source: memoryview) -> None:
        data = np.frombuffer(source, dtype=np.uint8)
        with self._lane() as lane:
            for start, size, pinned in self._pinner.pieces(int(data.ctypes.data), len(data)):
                piece = data[start : start + size]
                if pinned and data.flags.writeable:
                    self._send(lane, offset + start, torch.from_numpy(piece))
                else:
                    self._stage(lane, offset + start, piece)

    monkeypatch.setattr(HostCopies, "copy_in", copy_in)


def _slot_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot is filled anew while its last copy is under way."""
    stage = HostCopies._stage

    def hasty(self: HostCopies, lane: Any, offset: int, data: Any) -> None:
        for start in range(0, len(data), self._slot_bytes):
            for slot in lane.slots:
                slot.busy = None
            lane.slots = lane.slots[:1] * 2
            stage(self, lane, offset + start, data[start : start + self._slot_bytes])

    monkeypatch.setattr(HostCopies, "_stage", hasty)


def _fence_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has ended as soon as it was launched."""
    monkeypatch.setattr(CudaBackend, "last_done", lambda self: self._last_launched)


def _copies_unfenced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies count as the step before them."""

    def copy_within(self: CudaBackend, moves: Any) -> None:
        moves = tuple(moves)
        self._hand_over(cuda.CudaPending(self._last_launched, lambda: self._carry_out(moves)))
        self._under_way.pop()

    monkeypatch.setattr(CudaBackend, "copy_within", copy_within)


def _copies_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies inside the arena run in a stream of their own."""

    def copy_within(self: CudaBackend, moves: Any) -> None:
        moves = tuple(moves)
        self._device.stream().run(lambda: self._carry_out(moves))

    monkeypatch.setattr(CudaBackend, "copy_within", copy_within)


def _result_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a step's end."""

    def wait(self: Any) -> Any:
        return self._value if self._handed_over else torch.zeros(3 * PAGE, dtype=torch.uint8)

    monkeypatch.setattr(cuda.CudaPending, "wait", wait)


PLANTED: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    _no_wait,
    _slot_reused,
    _fence_early,
    _copies_unfenced,
    _copies_elsewhere,
    _result_early,
)


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_missing_wait_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError)):
        lives_and_fences(range(LIVES), tmp_path)


def test_an_error_of_a_step_comes_to_whoever_waits_and_to_nobody_else() -> None:
    backend = backend_on(FakeDevice(1))

    def fail() -> int:
        raise ValueError("shape")

    failed = backend.launch(1, fail)
    after = backend.launch(2, lambda: failed.value() + 1)
    for one in (failed, after):
        with pytest.raises(ValueError, match="shape"):
            one.wait()
    assert backend.launch(3, lambda: 5).wait() == 5
    assert backend.last_done() == 3
    backend.close()


def test_a_value_is_not_read_before_the_step_was_handed_over() -> None:
    backend = backend_on(FakeDevice(1, lazy=1.0))
    late = backend.launch(1, lambda: 5)
    with pytest.raises(IntegrityError, match="before it was handed over"):
        late.value()
    assert late.wait() == late.value() == 5


def test_empty_steps_end_with_what_was_before_them() -> None:
    backend = backend_on(FakeDevice(3, lazy=1.0))
    assert backend.last_done() == 0
    first = backend.launch(1, lambda: None)
    backend.launched(2)
    assert backend.last_done() == 0
    first.wait()
    assert backend.last_done() == 2
    backend.copy_within([(0, PAGE, PAGE)])
    backend.launched(3)  # what is given back now waits for the copies
    assert backend.last_done() == 2
    backend.launch(4, lambda: None).wait()
    assert backend.last_done() == 4


def test_a_step_keeps_what_it_reads_until_it_has_ended() -> None:
    backend = backend_on(FakeDevice(4, lazy=1.0))
    pending = backend.launch(1, lambda: None)
    assert pending.work is not None
    pending.wait()
    assert pending.work is None


def test_a_device_that_failed_ends_whoever_asks_it(tmp_path: Path) -> None:
    device = FakeDevice(5, lazy=1.0)
    backend = backend_on(device)
    pending = backend.launch(1, lambda: 1)
    device.lose()
    for ask in (pending.wait, backend.last_done, lambda: backend.copy_in(0, memoryview(b"abc"))):
        with pytest.raises(DeviceLost, match="memory is lost"):
            ask()


def test_too_little_memory_is_said_in_one_line() -> None:
    with pytest.raises(DeviceUnusable, match="free") as refused:
        backend_on(FakeDevice(memory_bytes=PAGE))
    assert "\n" not in str(refused.value)


class TestPinning:
    """Shared memory is pinned behind everybody's back."""

    @pytest.fixture
    def device(self) -> Iterator[FakeDevice]:
        device = FakeDevice()
        yield device
        assert not device.pinned, "memory is still pinned"

    def test_slices_come_one_by_one_and_go_together(
        self, device: FakeDevice, tmp_path: Path
    ) -> None:
        pinner = Pinner(device, slice_bytes=PAGE)
        mapping = Mapping(tmp_path, 3 * PAGE + 5, 0).map
        address = pinning.address_of(mapping)
        assert list(pinner.pieces(address, 10)) == [(0, 10, False)]
        pinner.hold(mapping)
        wait_until(lambda: pinner.pinned_bytes == len(mapping))
        assert sorted(device.pinned.values()) == [5, PAGE, PAGE, PAGE]
        pieces = list(pinner.pieces(address + 100, 2 * PAGE))
        assert pieces == [
            (0, PAGE - 100, True),
            (PAGE - 100, PAGE, True),
            (2 * PAGE - 100, 100, True),
        ]
        pinner.let_go(mapping)
        pinner.let_go(mapping)
        assert list(pinner.pieces(address, 10)) == [(0, 10, False)]
        mapping.close()
        pinner.close()

    def test_what_is_not_pinned_yet_is_told(
        self, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pinner = Pinner(device, slice_bytes=PAGE)
        mapping = Mapping(tmp_path, 3 * PAGE, 1).map
        address = pinning.address_of(mapping)
        reached, go_on = threading.Event(), threading.Event()
        pin = device.pin

        def slow(address: int, size: int) -> None:
            if device.pinned:
                reached.set()
                go_on.wait()
            pin(address, size)

        monkeypatch.setattr(device, "pin", slow)
        pinner.hold(mapping)
        reached.wait()
        assert list(pinner.pieces(address, 2 * PAGE)) == [(0, PAGE, True), (PAGE, PAGE, False)]
        go_on.set()
        pinner.let_go(mapping)
        pinner.close()

    def test_a_driver_that_pins_nothing_costs_speed_only(
        self, device: FakeDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(address: int, size: int) -> None:
            raise OSError("no")

        monkeypatch.setattr(device, "pin", refuse)
        backend = backend_on(device)
        mapping = Mapping(tmp_path, PAGE, 2).map
        backend.pinner.hold(mapping)
        backend.copy_in(0, memoryview(mapping))
        assert bytes(backend.arena[:PAGE].numpy().tobytes()) == mapping[:]
        backend.close()


def wait_until(reached: Callable[[], bool]) -> None:
    patience = threading.Event()
    for _ in range(2000):
        if reached():
            return
        patience.wait(0.005)
    raise AssertionError("not reached")


def test_streams_of_the_fake_leave_open_what_streams_leave_open() -> None:
    """Two streams in any order, each in its own; an event orders them."""
    orders, ordered = set(), set()
    for seed in range(60):
        device = FakeDevice(seed, lazy=0.5)
        one, two = device.stream(), device.stream()
        said: list[str] = []
        for stream, letter in ((one, "a"), (one, "b"), (two, "x")):
            stream.run(partial(said.append, letter))
        marks: list[FakeEvent] = [one.record(), two.record()]
        for mark in marks:
            mark.wait()
        orders.add("".join(said))
        said.clear()
        one.run(partial(said.append, "a"))
        two.wait_for(one.record())
        two.run(partial(said.append, "x"))
        two.record().wait()
        ordered.add("".join(said))
    assert orders == {"abx", "axb", "xab"}
    assert ordered == {"ax"}


def test_slots_and_lanes_are_bounded() -> None:
    assert cuda.NUM_LANES * cuda.NUM_SLOTS * cuda.SLOT_BYTES <= 64 << 20
