"""Pools of prepare processes as tests need them."""

import contextlib
from collections.abc import Iterator

from gateway.text.prepare_messages import (
    Failed,
    Job,
    PrepareLimits,
    Reply,
    decode_reply,
    encode_job,
    encode_reply,
)
from gateway.text.prepare_pool import PreparePool, PrepareSpent
from gateway.text.prepare_process import Budget, PrepareProcess


class SharedPool(PreparePool):
    """Outlives the edges that use it: starting a process takes longer than most tests."""

    def close(self) -> None:
        """At the end of the tests its processes see this one's end."""


_pools: list[SharedPool] = []


def shared_pool() -> SharedPool:
    """One for all tests of this process, unless a test has left it at work."""
    if not _pools or not _pools[-1].is_idle:
        _pools.append(SharedPool(2, 256))
    return _pools[-1]


class NoBudget(Budget):
    """Of the tests' own process."""

    def __init__(self) -> None:
        super().__init__(PrepareLimits())

    @contextlib.contextmanager
    def job(self, num_bytes: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        yield


class InlinePool(PreparePool):
    """The same work in this process and at once, where tests can watch it. `jobs`: what was asked;
    `spent`: what the next job's process is ended by."""

    def __init__(self, max_codecs: int = 8) -> None:
        super().__init__(1, 256)
        self._process = PrepareProcess(NoBudget(), max_codecs)
        self.jobs: list[tuple[Job, bool]] = []
        self.spent = ""

    async def ask(self, job: Job, is_long: bool = False, tenant_id: str = "") -> Reply:
        self.jobs.append((job, is_long))
        if self.spent:
            spent, self.spent = self.spent, ""
            raise PrepareSpent(spent)
        reply: Reply = decode_reply(encode_reply(self._process.answer(encode_job(job))))
        assert not isinstance(reply, Failed) or reply.kind != "limit"
        return reply

    def count(self, kind: type[Job]) -> int:
        """How many jobs of that kind were asked for."""
        return sum(isinstance(job, kind) for job, _ in self.jobs)
