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

from gateway.cache.calibration_files import CalibrationFiles, calibration_folder
from gateway.cache.calibrations import Calibrations
from gateway.cache.desk import CacheDesk, desk_socket, desk_sockets
from gateway.cache.memory_store import MemoryAnswers
from gateway.cache.store import StoreUnavailable
from gateway.cache.types import Selector
from gateway.dispatch.operator_socket import listening
from gateway.policy.cache_confidence import Calibration, recorded
from gateway.policy.permissions import INSTALLATION
from gateway.service import cache as service_cache
from gateway.service import keys as service_keys
from gateway.service import tenants as service_tenants
from gateway.service.control import Control, open_control
from gateway.settings import Settings
from registry import audit
from registry.errors import Forbidden, InvalidValue, NotFound, RegistryError
from registry.session import upgrade
from tests.gateway.cache.answers_kit import BEGAN_AT, Now, entry_of, scope_of


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    settings = Settings(data_dir=str(tmp_path / "data"))
    settings.data_path.mkdir()
    upgrade(settings.registry_url)
    with open_control(settings, "cli:ann") as control:
        service_tenants.create_tenant(control, "acme")
        service_tenants.create_tenant(control, "crowd")
        yield control


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
async def two_gateways(control: Control) -> AsyncIterator[tuple[Gateway, Gateway]]:
    pair = Gateway(), Gateway()
    async with contextlib.AsyncExitStack() as stack:
        for number, gateway in enumerate(pair):
            path = desk_socket(control.settings.data_path, f"gateway-{number}")
            await stack.enter_async_context(
                listening(path, CacheDesk(gateway.store, gateway.told, lambda: BEGAN_AT))
            )
        yield pair


def tenant_id(control: Control, name: str) -> str:
    return next(t.id for t in service_tenants.list_tenants(control) if t.name == name)


async def test_all_processes_are_asked_and_purged(control: Control) -> None:
    acme, crowd = tenant_id(control, "acme"), tenant_id(control, "crowd")
    async with two_gateways(control) as (first, second):
        await first.keep(acme, "one")
        await second.keep(acme, "one")
        await second.keep(crowd, "two")
        rows = await asyncio.to_thread(service_cache.cache_stats, control)
        assert [(row["gateway"], row["num_entries"]) for row in rows] == [
            ("gateway-0", 1),
            ("gateway-1", 2),
        ]
        assert await asyncio.to_thread(service_cache.purge_cache, control, "", "", "", "one") == 2
        assert (await first.size(), await second.size()) == (0, 1)
        await first.keep(acme, "one")
        assert await asyncio.to_thread(service_cache.purge_cache, control, "acme") is None
        scope = scope_of(acme, "m")
        assert (await first.store.exact(scope, b"x" * 32)).entry is None
        assert first.num_told == second.num_told == 4, "before and behind each"
        assert await second.size() == 1


async def test_an_answer_is_shown_with_where_it_is_from(control: Control) -> None:
    acme = tenant_id(control, "acme")
    async with two_gateways(control) as (_, second):
        entry_id = await second.keep(acme, "what is it")
        for tenant in ("", "acme"):
            shown = await asyncio.to_thread(service_cache.show_entry, control, entry_id, tenant)
            assert shown["question"] == "what is it"
            assert shown["tenant_id"] == acme
        with pytest.raises(NotFound, match="no answer is kept"):
            await asyncio.to_thread(service_cache.show_entry, control, entry_id, "crowd")


async def test_answers_of_a_tenant_are_listed(control: Control) -> None:
    acme = tenant_id(control, "acme")
    async with two_gateways(control) as processes:
        first = await processes[0].keep(acme, "why?" * 100)
        second = await processes[1].keep(acme, "how?", "n")
        await processes[0].keep(tenant_id(control, "crowd"), "when?")
        rows = await asyncio.to_thread(service_cache.list_entries, control, "acme")
        assert {row["request_id"] for row in rows} == {first, second}
        assert {len(row["question"]) for row in rows} == {120, 4}
        rows = await asyncio.to_thread(service_cache.list_entries, control, "acme", "n")
        assert [row["request_id"] for row in rows] == [second]
        rows = await asyncio.to_thread(service_cache.list_entries, control, "acme", "", 1)
        assert len(rows) == 1
        with pytest.raises(InvalidValue, match="how many"):
            service_cache.list_entries(control, "acme", limit=0)
        with pytest.raises(NotFound):
            service_cache.list_entries(control, "nobody")


async def test_roles_are_asked(control: Control) -> None:
    acme = tenant_id(control, "acme")
    key, _ = service_keys.create_key(control, "crowd", "theirs")
    async with two_gateways(control) as (first, _):
        entry_id = await first.keep(acme, "secret")
        own = replace(control, grants={acme: "admin"})
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
            viewer = replace(control, grants=grants)
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


async def test_a_purge_is_audited_without_its_text(control: Control) -> None:
    async with two_gateways(control):
        await asyncio.to_thread(service_cache.purge_cache, control, "acme", "", "", "my secret")
    with control.reading() as session:
        [entry, *_] = audit.latest(session)
    assert (entry.action, entry.actor) == ("cache.purge", "cli:ann")
    assert "my secret" not in json.dumps(entry.after)
    assert entry.after is not None
    assert entry.after["tenant_id"] == tenant_id(control, "acme")


async def test_nothing_named_or_nobody_there(control: Control) -> None:
    with pytest.raises(InvalidValue, match="say what to purge"):
        service_cache.purge_cache(control)
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.purge_cache, control, "acme")
    # What a killed process left behind is passed over.
    path = desk_socket(control.settings.data_path, "gateway-0")
    async with two_gateways(control):
        os.link(path, path.with_name("cache-killed.sock"))
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.cache_stats, control)


class Unreachable(MemoryAnswers):
    async def invalidate(self, tenant_id: str = "", model_name: str = "") -> None:
        raise StoreUnavailable("it is gone")


async def test_what_was_learnt_is_forgotten_with_a_tenant_or_a_model(control: Control) -> None:
    acme, crowd = tenant_id(control, "acme"), tenant_id(control, "crowd")
    once = recorded(Calibration(), 0, 1.0, True)
    store = CalibrationFiles(calibration_folder(control.settings.data_path))
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
    path = desk_socket(control.settings.data_path, "gateway-0")
    desk = CacheDesk(answers, forget=learnt.forget)
    async with listening(path, desk):
        await asyncio.to_thread(service_cache.purge_cache, control, "", "", "", "a text")
        assert await known(learnt) == await known(Calibrations(store)) == [True, True, True]
        await asyncio.to_thread(service_cache.purge_cache, control, "acme", "m")
        assert await known(learnt) == await known(Calibrations(store)) == [False, True, True]
        await asyncio.to_thread(service_cache.purge_cache, control, "", "m")
        assert await known(learnt) == [False, True, False]
    with pytest.raises(RegistryError, match="no server is running"):
        await asyncio.to_thread(service_cache.purge_cache, control, "acme")
    assert await known(Calibrations(store)) == [False, False, False]


@pytest.mark.parametrize("place", range(4))
def test_bytes_that_are_no_text_are_refused(control: Control, place: int) -> None:
    arguments = ["", "", "", ""]
    arguments[place] = "\udcff"
    with pytest.raises(InvalidValue, match="UTF-8"):
        service_cache.purge_cache(control, *arguments)


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
    desk = CacheDesk(Noting(notes, fails), lambda: notes.append("told"))
    await desk.answer(b'{"ask": "purge", "question": "a text"}')
    assert notes == ["told", "drop", "told"]


async def test_a_purge_that_one_cannot_do_is_not_done(control: Control) -> None:
    async with two_gateways(control):
        broken = CacheDesk(Unreachable(1, 1, Now()), lambda: None)
        path = desk_socket(control.settings.data_path, "gateway-2")
        async with listening(path, broken):
            with pytest.raises(RegistryError, match="gateway-2: the cache's store did not answer"):
                await asyncio.to_thread(service_cache.purge_cache, control, "acme")


@pytest.mark.parametrize(
    "line", [b"", b"{}", b'{"ask": "all"}', b'{"ask": "purge"}', b"\xff", b"["]
)
async def test_questions_that_are_none(line: bytes) -> None:
    answer = await CacheDesk(MemoryAnswers(1, 1, Now())).answer(line)
    assert "error" in answer


def test_sockets_are_found_however_long_the_folders_name_is(tmp_path: Path) -> None:
    for length in range(20, 110, 3):
        folder = tmp_path / ("x" * length)
        paths = [desk_socket(folder, name) for name in ("gateway-0", "gateway-31")]
        for path in paths:
            path.touch()
        assert desk_sockets(folder) == paths
