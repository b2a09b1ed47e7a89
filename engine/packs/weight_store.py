"""Where a model's bytes come from: the host tier if it has them, else the disk; and how fast.

Starts loads, closes them, fills the host tier behind them and measures each tier, so that the
residency table above deals in states only. Only the step thread calls it.
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from engine.backend import Backend
from engine.errors import PackError
from engine.pack import PackIndex
from engine.packs.host_tier import HostTier
from engine.packs.loader import DiskLoad, HostFill, HostLoad, PackLoader

logger = logging.getLogger(__name__)

Tier = Literal["disk", "host"]

# Bytes/s until a load has been measured, and how much of the old figure each new one keeps.
FIRST_RATES: dict[Tier, float] = {"disk": 1e9, "host": 5e9}
RATE_MEMORY = 0.7


class TierRates:
    """How fast each tier has been: bytes a second, the newest loads counting most."""

    def __init__(self) -> None:
        self._rates = dict(FIRST_RATES)

    def bytes_per_s(self, tier: Tier) -> float:
        """As of now."""
        return self._rates[tier]

    def estimate_s(self, num_bytes: int, tier: Tier) -> float:
        """Seconds that a load would take."""
        return num_bytes / self._rates[tier]

    def learn(self, tier: Tier, num_bytes: int, duration_s: float) -> None:
        """A load has ended."""
        if duration_s > 0 and num_bytes:
            rate = num_bytes / duration_s
            self._rates[tier] = RATE_MEMORY * self._rates[tier] + (1 - RATE_MEMORY) * rate


class LoadJob(Protocol):
    """A load under way, as the residency table sees it."""

    @property
    def done(self) -> bool:
        """Nobody touches its target any more."""

    @property
    def duration_s(self) -> float:
        """From start to end."""

    def cancel(self) -> None:
        """Stop soon: poll `done`."""


class WeightStore(Protocol):
    """What residency asks of what lies below the device; `DiskWeightStore` is the real one.

    A job is given back, by `finish`, to who started it. `copies`: whether a load from the disk is
    followed by a copy in the host tier.
    """

    copies: bool

    @property
    def num_changes(self) -> int:
        """Rises whenever `is_warm` may answer otherwise than before."""

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast loads from the disk are."""

    def is_warm(self, index: PackIndex) -> bool:
        """Whether a load would come from the host tier."""

    def estimate_s(self, index: PackIndex) -> float:
        """Seconds a load would take now, from the tier it would come from."""

    def start(
        self,
        index: PackIndex,
        pack_dir: Path,
        segment_offsets: Sequence[int],
        check_files: bool = True,
    ) -> LoadJob:
        """Begin to fill the arena. Raises PackError."""

    def finish(self, job: Any, pack_dir: Path) -> Tier:
        """Close a job that is done. Raises PackError or OSError where it failed."""

    def warm(self, index: PackIndex, pack_dir: Path) -> None:
        """Bring a pack into the host tier ahead of need, if it is worth its room."""

    def value_by(self, worth: Callable[[str], float]) -> None:
        """By revision, what keeping a pack in the host tier is worth, a byte."""

    def poll(self) -> None:
        """Whatever goes on in the background."""

    def keep_only(self, revisions: Collection[str]) -> None:
        """Forget packs that no hosted model has."""

    def check_integrity(self) -> None:
        """Raises IntegrityError where the books are wrong."""

    def close(self, keep_host_tier: bool) -> None:
        """Cancel everything and wait until no thread touches memory any more."""


class DiskWeightStore:
    """The disk and the host tier below one device."""

    def __init__(
        self, backend: Backend, host: HostTier, num_threads: int, verify: bool = True
    ) -> None:
        self._backend = backend
        self._host = host
        self._verify = verify
        self._loader = PackLoader(num_threads)
        self._loads: list[DiskLoad | HostLoad] = []
        self._fills: list[HostFill] = []
        self._held_back: list[HostFill] = []  # of these, what has not been started
        self._rates = TierRates()
        self.copies = True

    @property
    def num_changes(self) -> int:
        """Rises whenever `is_warm` may answer otherwise than before."""
        return self._host.num_changes

    @property
    def cold_bytes_per_s(self) -> float:
        """How fast loads from the disk are."""
        return self._rates.bytes_per_s("disk")

    def is_warm(self, index: PackIndex) -> bool:
        """Whether a load would come from the host tier."""
        return self._host.has(index.revision)

    def estimate_s(self, index: PackIndex) -> float:
        """Seconds a load would take now, from the tier it would come from."""
        return self._rates.estimate_s(index.total_bytes, "host" if self.is_warm(index) else "disk")

    def start(
        self,
        index: PackIndex,
        pack_dir: Path,
        segment_offsets: Sequence[int],
        check_files: bool = True,
    ) -> DiskLoad | HostLoad:
        """Begin to fill the arena, and perhaps check the pack's small files on the way.

        Raises PackError where the blob cannot be opened.
        """
        files_of = pack_dir if check_files else None
        job: DiskLoad | HostLoad
        slab = self._host.acquire(index.revision, index.total_bytes)
        if slab is not None:
            job = HostLoad(index, slab, self._backend, segment_offsets, files_of)
        else:
            job = DiskLoad(index, pack_dir, self._backend, segment_offsets, self._verify, files_of)
        self._loads.append(job)
        self._loader.start(job)
        return job

    def finish(self, job: DiskLoad | HostLoad, pack_dir: Path) -> Tier:
        """Close a job that is done. Raises PackError or OSError where it failed.

        A load from the disk that came to its end is followed by a fill of the host tier, where
        that is to have copies.
        """
        self._loads.remove(job)
        job.close()
        tier: Tier = "disk"
        if isinstance(job, HostLoad):
            self._host.release(job.slab)
            tier = "host"
        job.result()
        if not job.cancelled:
            self._rates.learn(tier, job.index.total_bytes, job.duration_s)
            if tier == "disk" and self.copies:
                self._start_fill(job.index, pack_dir)
        return tier

    def warm(self, index: PackIndex, pack_dir: Path) -> None:
        """Bring a pack into the host tier ahead of need, if it is worth its room."""
        self._start_fill(index, pack_dir)

    def value_by(self, worth: Callable[[str], float]) -> None:
        """By revision, what keeping a pack in the host tier is worth, a byte."""
        self._host.worth = worth

    def poll(self) -> None:
        """Start the fills that wait for memory, commit those that have ended; see what the host
        tier's other workers have done, and report to them what packs are worth here."""
        self._host.look()
        self._host.report_worth(time.monotonic())
        if self._held_back and not self._host.is_deleting:
            for job in self._held_back:
                self._loader.start_slowly(job)
            self._held_back.clear()
        for job in [job for job in self._fills if job.done]:
            self._fills.remove(job)
            job.close()
            try:
                job.result()
                if job.cancelled:
                    self._host.abandon(job.fill)
                else:
                    self._host.commit(job.fill)
            except (OSError, PackError) as error:
                # The model itself is served all the same: it was verified when it was loaded.
                logger.warning(
                    "host tier: cannot keep a copy of pack %s: %s", job.index.revision, error
                )
                self._host.abandon(job.fill)

    def keep_only(self, revisions: Collection[str]) -> None:
        """Forget packs that no hosted model has."""
        for job in self._fills:
            if job.index.revision not in revisions:
                job.cancel()
        self._host.keep_only(revisions)

    def check_integrity(self) -> None:
        """Raises IntegrityError where the host tier's books are wrong."""
        self._host.check_integrity()

    def close(self, keep_host_tier: bool) -> None:
        """Cancel everything and wait until no thread touches memory any more."""
        jobs = [*self._loads, *self._fills]
        for job in jobs:
            job.cancel()
        self._loader.close()
        for job in jobs:
            job.close()
            if isinstance(job, HostLoad):
                self._host.release(job.slab)
        self._loads.clear()
        self._fills.clear()
        self._held_back.clear()
        self._host.close(keep_host_tier)

    def _start_fill(self, index: PackIndex, pack_dir: Path) -> None:
        fill = self._host.begin_fill(index.revision, index.total_bytes)
        if fill is None:
            return
        try:
            job = HostFill(index, pack_dir, fill, self._verify)
        except PackError as error:
            logger.warning("host tier: cannot keep a copy of pack %s: %s", index.revision, error)
            self._host.abandon(fill)
            return
        self._fills.append(job)
        # Not before the packs it takes the place of are gone: together they might exceed memory.
        self._held_back.append(job)
