"""The verbs on cached answers: over the sockets of gateway processes, by role, and in the audit
log."""

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from admin.context.operator_context import OperatorContext, open_context
from admin.context.policy.permissions import INSTALLATION
from admin.operations import cache as service_cache
from admin.operations import keys as service_keys
from admin.operations import tenants as service_tenants
from gateway.cache.cache_handler import CacheHandler, cache_socket_path, cache_socket_paths
from gateway.cache.calibrations import CalibrationFiles, Calibrations, calibration_folder
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.policy.cache_confidence import Calibration, recorded
from gateway.cache.types import Selector, StoreUnavailable
from gateway.ipc.control_socket import listening
from gateway.settings.settings import Settings
from registry import audit, locks
from registry.errors import Forbidden, InvalidValue, NotFound, RegistryError
from tests.gateway.cache.answers_kit import BEGAN_AT, Now, entry_of, scope_of
from tests.migrated import migrated


@pytest.fixture
def context(tmp_path: Path) -> Iterator[OperatorContext]:
    settings = Settings(data_dir=str(tmp_path / "data"))
    settings.data_path.mkdir()
    migrated(settings.registry_url)
    with open_context(settings, "cli:ann") as context:
        service_tenants.create_tenant(context, "acme")
        service_tenants.create_tenant(context, "crowd")
        yield context


class Gateway:
    """A process' answers behind a socket."""

    def __init__(self) -> None:
        self.store = MemoryAnswers(1 << 20, 1 << 20, Now())
        self.num_told = 0

    def told(self) -> None:
        self.num_told += 1

    async def keep(self, tenant_id: str, question: str, model: str = "m") -> str:
        """An answer; its id."""
        scope = scope_of(tenant_id, model)
        found = await self.store.exact(scope, b"x" * 32)
        entry = entry_of(scope, question, found.epoch)
        await self.store.keep(entry)
        return entry.entry_id

    async def size(self) -> int:
        return (await self.store.size()).num_entries


@contextlib.asynccontextmanager
async def two_gateways(context: OperatorContext) -> AsyncIterator[tuple[Gateway, Gateway]]:
    pair = Gateway(), Gateway()
    async with contextlib.AsyncExitStack() as stack:
        for number, gateway in enumerate(pair):
            path = cache_socket_path(context.settings.data_path, f"gateway-{number}")
            await stack.enter_async_context(
                listening(path, CacheHandler(gateway.store, gateway.told, lambda: BEGAN_AT))
            )
        yield pair


def tenant_id(context: OperatorContext, name: str) -> str:
    return next(t.id for t in service_tenants.list_tenants(context) if t.name == name)


async def test_all_processes_are_asked_and_purged(context: OperatorContext) -> None:
    acme, crowd = tenant_id(context, "acme"), tenant_id(context, "crowd")
    async with two_gateways(context) as (first, second):
        await first.keep(acme, "one")
        await second.keep(acme, "one")
        await second.keep(crowd, "two")
        rows = await asyncio.to_thread(service_cache.cache_stats, context)
        assert [(row["gateway"], row["num_entries"]) for row in rows] == [
            ("gateway-0", 1),
            ("gateway-1", 2),
        ]
        assert await asyncio.to_thread(service_cache.purge_cache, context, "", "", "", "one") == 2
        assert (await first.size(), await second.size()) == (0, 1)
        await first.keep(acme, "one")
        assert await asyncio.to_thread(service_cache.purge_cache, context, "acme") is None
        scope = scope_of(acme, "m")
        assert (await first.store.exact(scope, b"x" * 32)).entry is None
        assert first.num_told == second.num_told == 4, "before and behind each"
        assert await second.size() == 1


async def test_an_answer_is_shown_with_where_it_is_from(context: OperatorContext) -> None:
    acme = tenant_id(context, "acme")
    async with two_gateways(context) as (_, second):
        entry_id = await second.keep(acme, "what is it")
        for tenant in ("", "acme"):
            shown = await asyncio.to_thread(service_cache.show_entry, context, entry_id, tenant)
            assert shown["question"] == "what is it"
            assert shown["tenant_id"] == acme
        with pytest.raises(NotFound, match="no cached answer"):
            await asyncio.to_thread(service_cache.show_entry, context, entry_id, "crowd")


async def test_answers_of_a_tenant_are_listed(context: OperatorContext) -> None:
    acme = tenant_id(context, "acme")
    async with two_gateways(context) as processes:
        first = await processes[0].keep(acme, "why?" * 100)
        second = await processes[1].keep(acme, "how?", "n")
        await processes[0].keep(tenant_id(context, "crowd"), "when?")
        rows = await asyncio.to_thread(service_cache.list_entries, context, "acme")
        assert {row["request_id"] for row in rows} == {first, second}
        assert {len(row["question"]) for row in rows} == {120, 4}
        rows = await asyncio.to_thread(service_cache.list_entries, context, "acme", "n")
        assert [row["request_id"] for row in rows] == [second]
        rows = await asyncio.to_thread(service_cache.list_entries, context, "acme", "", 1)
        assert len(rows) == 1
        with pytest.raises(InvalidValue, match="must be 1 or more"):
            service_cache.list_entries(context, "acme", limit=0)
        with pytest.raises(NotFound):
            service_cache.list_entries(context, "nobody")


async def test_roles_are_asked(context: OperatorContext) -> None:
    acme = tenant_id(context, "acme")
    key, _ = service_keys.create_key(context, "crowd", "theirs")
    async with two_gateways(context) as (first, _):
        entry_id = await first.keep(acme, "secret")
        own = replace(context, grants={acme: "admin"})
        assert (await asyncio.to_thread(service_cache.show_entry, own, entry_id, "acme"))["answer"]
        refused: list[tuple[Any, ...]] = [
            ("crowd",),
            ("", "m"),
            ("", "", key.id),
            ("", "", "", "x"),
        ]
        for arguments in refused:
            with pytest.raises(Forbidden):
                await asyncio.to_thread(service_cache.purge_cache, own, *arguments)
        for grants in ({acme: "viewer"}, {INSTALLATION: "viewer"}):
            viewer = replace(context, grants=grants)
            with pytest.raises(Forbidden):
                await asyncio.to_thread(service_cache.show_entry, viewer, entry_id, "acme")
            with pytest.raises(Forbidden):
                await asyncio.to_thread(service_cache.list_entries, viewer, "acme")
            with pytest.raises(Forbidden):
                await asyncio.to_thread(service_cache.purge_cache, viewer, "acme")
        with pytest.raises(Forbidden):
            await asyncio.to_thread(service_cache.cache_stats, own)
        assert first.num_told == 0
        assert await asyncio.to_thread(service_cache.purge_cache, own, "acme") is None


async def test_who_reads_kept_answers_is_in_the_audit_log_without_their_text(
    context: OperatorContext,
) -> None:
    acme = tenant_id(context, "acme")
    async with two_gateways(context) as (first, _):
        entry_id = await first.keep(acme, "a private question")
        await asyncio.to_thread(service_cache.list_entries, context, "acme", "m")
        await asyncio.to_thread(service_cache.show_entry, context, entry_id)
    with context.reading() as session:
        shown, listed = audit.latest(session, 2)
    assert (listed.action, listed.target, listed.after) == ("cache.read", acme, {"model": "m"})
    assert (shown.action, shown.target) == ("cache.read", entry_id)
    assert (shown.before, shown.after) == (None, {"request_id": entry_id}), "and no text"
    assert shown.actor == listed.actor == context.actor


async def test_a_purge_is_audited_without_its_text(context: OperatorContext) -> None:
    async with two_gateways(context):
        await asyncio.to_thread(service_cache.purge_cache, context, "acme", "", "", "my secret")
    with context.reading() as session:
        [entry, *_] = audit.latest(session)
    assert (entry.action, entry.actor) == ("cache.purge", "cli:ann")
    assert "my secret" not in json.dumps(entry.after)
    assert entry.after is not None
    assert entry.after["tenant_id"] == tenant_id(context, "acme")


async def test_nothing_named_or_nobody_there(context: OperatorContext) -> None:
    with pytest.raises(InvalidValue, match="name what to purge"):
        service_cache.purge_cache(context)
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.purge_cache, context, "acme")
    data_path = context.settings.data_path
    with (
        locks.hold(data_path / locks.SERVER_LOCK),
        pytest.raises(RegistryError, match="a server is running on"),
    ):
        await asyncio.to_thread(service_cache.purge_cache, context, "acme")
    # What a killed process left behind is passed over.
    path = cache_socket_path(context.settings.data_path, "gateway-0")
    async with two_gateways(context):
        os.link(path, path.with_name("cache-killed.sock"))
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.cache_stats, context)


class Unreachable(MemoryAnswers):
    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        raise StoreUnavailable("it is gone")


async def test_what_was_learnt_is_forgotten_with_a_tenant_or_a_model(
    context: OperatorContext,
) -> None:
    acme, crowd = tenant_id(context, "acme"), tenant_id(context, "crowd")
    once = recorded(Calibration(), 0, 1.0, True)
    store = CalibrationFiles(calibration_folder(context.settings.data_path))
    learnt, answers = Calibrations(store), MemoryAnswers(1 << 20, 1 << 20, Now())
    scopes = [scope_of(acme, "m"), scope_of(acme, "other"), scope_of(crowd, "m")]

    async def known(learnt: Calibrations) -> list[bool]:
        """Of each scope, whether anything is."""
        epochs = [(await answers.exact(scope, b"x" * 32)).epoch for scope in scopes]
        pairs = list(zip(scopes, epochs, strict=True))
        for _ in range(2):
            found = [bool(learnt.of(scope, epoch, "rev").right) for scope, epoch in pairs]
            await learnt.settle()
        return found

    await known(learnt)
    for scope in scopes:
        learnt.add(scope, (await answers.exact(scope, b"x" * 32)).epoch, "rev", once)
    await learnt.close()
    path = cache_socket_path(context.settings.data_path, "gateway-0")
    handler = CacheHandler(answers, forget=learnt.forget)
    async with listening(path, handler):
        await asyncio.to_thread(service_cache.purge_cache, context, "", "", "", "a text")
        assert await known(learnt) == await known(Calibrations(store)) == [True, True, True]
        await asyncio.to_thread(service_cache.purge_cache, context, "acme", "m")
        assert await known(learnt) == await known(Calibrations(store)) == [False, True, True]
        await asyncio.to_thread(service_cache.purge_cache, context, "", "m")
        assert await known(learnt) == [False, True, False]
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.purge_cache, context, "acme")
    assert await known(Calibrations(store)) == [False, False, False]


@pytest.mark.parametrize("place", range(4))
def test_bytes_that_are_no_text_are_refused(context: OperatorContext, place: int) -> None:
    arguments = ["", "", "", ""]
    arguments[place] = "\udcff"
    with pytest.raises(InvalidValue, match="UTF-8"):
        service_cache.purge_cache(context, *arguments)


class Noting(MemoryAnswers):
    """Notes what was asked of it."""

    def __init__(self, notes: list[str], fails: bool) -> None:
        super().__init__(1 << 20, 1 << 20, Now())
        self._notes, self._fails = notes, fails

    async def purge(self, selector: Selector) -> int:
        self._notes.append("drop")
        if self._fails:
            raise StoreUnavailable("away in the middle of it")
        return await super().purge(selector)


@pytest.mark.parametrize("fails", [False, True])
async def test_a_purge_is_told_before_it_and_behind_it(fails: bool) -> None:
    """Look-ups go on meanwhile: what they remember of it must go once more."""
    notes: list[str] = []
    handler = CacheHandler(Noting(notes, fails), lambda: notes.append("told"))
    await handler.answer(b'{"ask": "purge", "question": "a text"}')
    assert notes == ["told", "drop", "told"]


async def test_a_purge_that_one_cannot_do_is_not_done(context: OperatorContext) -> None:
    async with two_gateways(context):
        broken = CacheHandler(Unreachable(1, 1, Now()), lambda: None)
        path = cache_socket_path(context.settings.data_path, "gateway-2")
        async with listening(path, broken):
            with pytest.raises(RegistryError, match="gateway-2: the cache store did not answer"):
                await asyncio.to_thread(service_cache.purge_cache, context, "acme")


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"ask": "all"}', b'{"ask": "purge"}', b"\xff", b"["]
)
async def test_questions_that_are_none(line: bytes) -> None:
    answer = await CacheHandler(MemoryAnswers(1, 1, Now())).answer(line)
    assert "error" in answer


def test_sockets_are_found_however_long_the_folders_name_is(tmp_path: Path) -> None:
    for length in range(20, 110, 3):
        folder = tmp_path / ("x" * length)
        paths = [cache_socket_path(folder, name) for name in ("gateway-0", "gateway-31")]
        for path in paths:
            path.touch()
        assert cache_socket_paths(folder) == paths
