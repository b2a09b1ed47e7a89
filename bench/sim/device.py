"""A device that is only modelled: no memory, no work, but the time that both would take.

    DeviceClock   the time of one worker; waiting for the device is what moves it
    Roofline      seconds of a step: the larger of what its products and what its bytes take, and
                  the host's share of it (Williams et al., 2009)
    SimBackend    engine.backend.Backend: steps and copies one after the other in modelled time

The work of a step is run when it is handed over, for it knows at once what a model would say; it
tells its price by `spend`. What the engine sees is that of a real device: a step has ended when
its time has come, and not before.

`late_by` holds `last_done` back by so many steps, so that simulations test lifetimes as well.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch

T = TypeVar("T")
Figures: TypeAlias = npt.NDArray[np.float64]

FEW_STEPS = 64
"""Up to so many steps plain arithmetic is quicker than numpy's."""


class DeviceClock:
    """Seconds, as one worker sees them. Never goes back."""

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def wait_until(self, time_s: float) -> None:
        """Nothing happens before `time_s`."""
        if time_s > self.now_s:
            self.now_s = time_s


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer group: what attending costs. window 0: all positions."""

    window: int
    flops_per_pair: float
    bytes_per_position: float


@dataclass(frozen=True, slots=True)
class ModelCost:
    """A model's shape as the roofline needs it.

    flops_per_token  of the products with the layers' weights
    flops_per_row    of the head, for a row that samples
    weight_bytes     read once a step
    num_layers, dtype   where a device has figures for these
    """

    flops_per_token: float
    flops_per_row: float
    weight_bytes: float
    attention: tuple[AttentionCost, ...]
    num_layers: int = 0
    dtype: str = ""


@dataclass(slots=True)
class StepLoad:
    """What a step does. `pairs`, `positions`: by layer group, attended pairs and KV touched.

    `num_chunks`: rows of more than one token, which attend each by itself.
    """

    num_rows: int = 0
    num_chunks: int = 0
    num_tokens: int = 0
    num_sampling: int = 0
    pairs: list[float] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, model: ModelCost, rows: Iterable[tuple[int, int, bool]]) -> "StepLoad":
        """A row is (first position, tokens, whether it samples)."""
        groups = range(len(model.attention))
        load = cls(pairs=[0.0 for _ in groups], positions=[0 for _ in groups])
        for first, tokens, samples in rows:
            load.num_rows += 1
            load.num_chunks += tokens > 1
            load.num_tokens += tokens
            load.num_sampling += samples
            for g in groups:
                window, end = model.attention[g].window, first + tokens
                seen = end if not window else min(end, window + tokens - 1)
                if tokens == 1:
                    pairs = float(seen)
                elif window:
                    pairs = tokens * min(first + tokens / 2, window)
                else:
                    pairs = tokens * (first + (tokens + 1) / 2)
                load.pairs[g] += pairs
                load.positions[g] += seen + tokens
        return load


@dataclass(frozen=True, slots=True)
class Roofline:
    """A device in figures; sizes are bytes. What has a default is for devices that were measured.

    flops_by_dtype   in place of `flops_per_s` for models in these dtypes
    exposed          share of the shorter one of arithmetic and memory time that does not hide
                     behind the longer: 0 as a GPU does it, 1 where one comes after the other
    attention_*      where given, attention is work of its own, its bytes and its arithmetic one
                     after the other (a CPU gathers K and V before it multiplies); 0: part of the
                     roofline
    packing_bytes_per_s   where given, the weights are laid out anew for a step of more than one
                     token (a CPU's matrix product does that, its matrix-vector product does not)
    layer_overhead_s, chunk_overhead_s   per layer of a step; and per layer and chunk of a prompt,
                     for each chunk attends in a call of its own
    """

    flops_per_s: float
    memory_bytes_per_s: float
    copy_bytes_per_s: float
    step_overhead_s: float
    row_overhead_s: float
    flops_by_dtype: Mapping[str, float] = field(default_factory=dict)
    exposed: float = 0.0
    attention_flops_per_s: float = 0.0
    attention_bytes_per_s: float = 0.0
    packing_bytes_per_s: float = 0.0
    layer_overhead_s: float = 0.0
    chunk_overhead_s: float = 0.0

    def step_s(self, model: ModelCost, load: StepLoad) -> float:
        """Seconds of a step."""
        flops = model.flops_per_token * load.num_tokens + model.flops_per_row * load.num_sampling
        pair_flops, kv_bytes = 0.0, 0.0
        for group, pairs, positions in zip(
            model.attention, load.pairs, load.positions, strict=True
        ):
            pair_flops += group.flops_per_pair * pairs
            kv_bytes += group.bytes_per_position * positions
        busy_s = self._busy_s(model, flops, pair_flops, kv_bytes)
        return busy_s + self._beside_s(model, load.num_tokens, load.num_rows, load.num_chunks)

    def decode_steps_s(
        self, model: ModelCost, contexts: Sequence[int], num_steps: int
    ) -> list[float]:
        """Seconds of so many decode steps in a row, to the last bit those that `step_s` gives.

        `contexts`: tokens of each row before the first of them, of which all but the last are
        computed.
        """
        if num_steps <= FEW_STEPS:
            return self._few_steps_s(model, contexts, num_steps)
        num_rows = len(contexts)
        further = np.arange(num_steps, dtype=np.int64)
        flops: Figures = np.full(
            num_steps, model.flops_per_token * num_rows + model.flops_per_row * num_rows
        )
        num_bytes: Figures = np.full(num_steps, model.weight_bytes)
        pair_flops, kv_bytes = np.zeros(num_steps), np.zeros(num_steps)
        for group in model.attention:
            if group.window:
                grown = np.array(contexts, dtype=np.int64)[:, None] + further
                seen = np.minimum(grown, group.window).sum(axis=0)
            else:
                seen = sum(contexts) + num_rows * further
            pair_flops += group.flops_per_pair * seen
            kv_bytes += group.bytes_per_position * (seen + num_rows)
        attention_s = np.zeros(num_steps)
        if self.attention_bytes_per_s:
            attention_s = kv_bytes / self.attention_bytes_per_s
            if self.attention_flops_per_s:
                attention_s = attention_s + pair_flops / self.attention_flops_per_s
        else:
            flops += pair_flops
            num_bytes += kv_bytes
        arithmetic_s = flops / self._flops_per_s(model)
        memory_s = num_bytes / self.memory_bytes_per_s
        busy_s = np.maximum(arithmetic_s, memory_s)
        if self.exposed:
            busy_s += self.exposed * np.minimum(arithmetic_s, memory_s)
        seconds = busy_s + attention_s + self._beside_s(model, num_rows, num_rows, 0)
        found: list[float] = seconds.tolist()
        return found

    def _few_steps_s(
        self, model: ModelCost, contexts: Sequence[int], num_steps: int
    ) -> list[float]:
        """The same, quicker for few."""
        num_rows, total = len(contexts), sum(contexts)
        tokens_flops = model.flops_per_token * num_rows + model.flops_per_row * num_rows
        beside_s = self._beside_s(model, num_rows, num_rows, 0)
        found: list[float] = []
        for further in range(num_steps):
            pair_flops, kv_bytes = 0.0, 0.0
            for group in model.attention:
                if group.window:
                    window = group.window
                    seen = sum([min(context + further, window) for context in contexts])
                else:
                    seen = total + num_rows * further
                pair_flops += group.flops_per_pair * seen
                kv_bytes += group.bytes_per_position * (seen + num_rows)
            found.append(self._busy_s(model, tokens_flops, pair_flops, kv_bytes) + beside_s)
        return found

    def _busy_s(self, model: ModelCost, flops: float, pair_flops: float, kv_bytes: float) -> float:
        """Arithmetic and memory of a step, attention included."""
        num_bytes, attention_s = model.weight_bytes, 0.0
        if self.attention_bytes_per_s:
            attention_s = self._attention_s(pair_flops, kv_bytes)
        else:
            flops += pair_flops
            num_bytes += kv_bytes
        arithmetic_s = flops / self._flops_per_s(model)
        memory_s = num_bytes / self.memory_bytes_per_s
        busy_s = arithmetic_s if arithmetic_s >= memory_s else memory_s
        if self.exposed:
            busy_s += self.exposed * min(arithmetic_s, memory_s)
        return busy_s + attention_s

    def _flops_per_s(self, model: ModelCost) -> float:
        return self.flops_by_dtype.get(model.dtype, self.flops_per_s)

    def _attention_s(self, pair_flops: float, kv_bytes: float) -> float:
        seconds = kv_bytes / self.attention_bytes_per_s
        if self.attention_flops_per_s:
            seconds = seconds + pair_flops / self.attention_flops_per_s
        return seconds

    def _beside_s(self, model: ModelCost, num_tokens: int, num_rows: int, num_chunks: int) -> float:
        """What does not change from one decode step to the next."""
        packing_s = 0.0
        if num_tokens > 1 and self.packing_bytes_per_s:
            packing_s = model.weight_bytes / self.packing_bytes_per_s
        layer_s = self.layer_overhead_s + num_chunks * self.chunk_overhead_s
        rows_s = self.step_overhead_s + num_rows * self.row_overhead_s
        return packing_s + rows_s + model.num_layers * layer_s


class SimPending(Generic[T]):
    """Implements `backend.base.Pending`. Its work was done beforehand; its time was not."""

    def __init__(self, clock: DeviceClock, work: Callable[[], T]) -> None:
        self.device_s = 0.0
        self.ends_s = 0.0
        self._clock = clock
        self._value: T | None = None
        self._error: Exception | None = None
        try:
            self._value = work()
        except Exception as error:  # noqa: BLE001 - `wait` raises it, as a device's work would
            self._error = error

    def value(self) -> T:
        """What the work returned or raised."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]  # T may itself be optional

    def wait(self) -> T:
        """Moves the clock to the end of the step."""
        self._clock.wait_until(self.ends_s)
        return self.value()

    def done(self) -> bool:
        """Whether its time has come."""
        return self.ends_s <= self._clock.now_s


class SimBackend:
    """Implements `engine.backend.Backend` in modelled time."""

    def __init__(
        self,
        clock: DeviceClock,
        roofline: Roofline,
        late_by: Callable[[], int] = lambda: 0,
    ) -> None:
        self.clock = clock
        self.roofline = roofline
        self.busy_s = 0.0
        """Seconds that steps and copies have taken."""
        self.free_s = 0.0
        """When everything handed over so far has ended."""
        self._late_by = late_by
        self._arena = torch.empty(0, dtype=torch.uint8)
        self._spent_s = 0.0
        self._under_way: deque[tuple[float, int]] = deque()  # (end, step)
        self._done = 0
        self._told = 0

    @property
    def name(self) -> str:
        """Device in words."""
        return "simulated"

    @property
    def device(self) -> torch.device:
        """Where step tensors would live."""
        return self._arena.device

    @property
    def arena(self) -> torch.Tensor:
        """Holds nothing."""
        return self._arena

    def spend(self, seconds: float) -> None:
        """The work under way takes so much more of the device."""
        self._spent_s += seconds

    def copy_in(self, offset: int, source: memoryview) -> None:
        """Loads are modelled as a whole."""

    def host_view(self, offset: int, num_bytes: int) -> memoryview | None:
        """There is nothing to see."""
        return None

    def copy_within(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Takes its time in device order."""
        num_bytes = sum(size for _, _, size in moves)
        self._take(num_bytes / self.roofline.copy_bytes_per_s)

    def launch(self, step: int, work: Callable[[], T]) -> SimPending[T]:
        """Ends when the device has come to it and through it."""
        self._spent_s = 0.0
        pending = SimPending(self.clock, work)
        pending.device_s = self._spent_s
        self._take(self._spent_s)
        pending.ends_s = self.free_s
        self._under_way.append((self.free_s, step))
        return pending

    def fast_forward(self, seconds: Iterable[float], end_s: float) -> None:
        """Steps of so many seconds have run, the last of which ended at `end_s`."""
        for step_s in seconds:
            self.busy_s += step_s
        self.free_s = end_s

    def launched(self, step: int) -> None:
        """Ends with what was handed over before."""
        self._under_way.append((max(self.free_s, self.clock.now_s), step))

    def last_done(self) -> int:
        """The last step whose time has come, less what `late_by` asks for."""
        while self._under_way and self._under_way[0][0] <= self.clock.now_s:
            self._done = self._under_way.popleft()[1]
        self._told = max(self._told, self._done - self._late_by())
        return self._told

    def close(self) -> None:
        """Nothing runs."""

    def _take(self, seconds: float) -> None:
        self.free_s = max(self.free_s, self.clock.now_s) + seconds
        self.busy_s += seconds
