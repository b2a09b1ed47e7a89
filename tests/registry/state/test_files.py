"""Rows of files and uploads, on both databases: whose they are, what they may take, how each ends
once."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Engine, func, select, text
from sqlalchemy.orm import Session

from registry.accounts import tenants
from registry.errors import NotFound
from registry.session import appending, reading, writing
from registry.state import file_quota, files, uploads
from registry.state.file_quota import FileBounds, FileReservation, FileUsage, ReservedFile
from registry.state.files import FileRecord, FileViewer, StoredFile
from registry.state.uploads import FileUpload, UploadPartRecord, UploadRecord

VIEWER = FileViewer("ten_1", 1000.0, 0.0)
BOUNDS = FileBounds(1000, 5)
UPLOAD = UploadRecord("upload_1", "ten_1", "batch", "a", 100, "pending", 0, 0, 1000.0, 4600.0)


def record(file_id: str, **fields: Any) -> FileRecord:
    made = FileRecord(
        id=file_id,
        tenant_id="ten_1",
        purpose="batch",
        filename="a.jsonl",
        size_bytes=100,
        sha256="0" * 64,
        object_name=f"ten_1/files/{file_id}",
        created_at=1000.0,
        expires_at=5000.0,
    )
    return replace(made, **fields)


def reserve(engine: Engine, own_id: str, num_bytes: int, **fields: Any) -> bool:
    wanted = replace(FileReservation(own_id, "ten_1", num_bytes, 2000.0), **fields)
    with appending(engine, "test") as session:
        return file_quota.reserve(session, wanted, BOUNDS)


def add(engine: Engine, *records: FileRecord) -> None:
    for each in records:
        with appending(engine, "test") as session:
            wanted = FileReservation(each.id, each.tenant_id, each.size_bytes, 2000.0)
            assert file_quota.reserve(session, wanted, FileBounds(10**9, 10**9))
            assert files.add(session, each, each.id)


def ids(engine: Engine, **query: Any) -> list[str]:
    with reading(engine) as session:
        asked = {"limit": 100, "descending": False, **query}
        return [found.id for found in files.listed(session, VIEWER, **asked)]


def check_integrity(engine: Engine, tenant_id: str = "ten_1") -> FileUsage:
    """The count is the sum of files and reservations. Returns it."""
    num, size = 0, 0
    with reading(engine) as session:
        for table, column in ((StoredFile, StoredFile.size_bytes), (ReservedFile, None)):
            counted = ReservedFile.num_bytes if column is None else column
            query = select(func.count(), func.coalesce(func.sum(counted), 0))
            more = session.execute(query.where(table.tenant_id == tenant_id)).one()
            num, size = num + more[0], size + int(more[1])
        assert file_quota.usage(session, tenant_id) == FileUsage(num, size)
    return FileUsage(num, size)


def test_a_file_is_seen_by_its_tenant_alone_and_as_long_as_it_is_kept(engine: Engine) -> None:
    kept = record("file-1")
    add(engine, kept)
    with reading(engine) as session:
        assert files.get(session, VIEWER, "file-1") == kept
        told = set()
        for viewer, file_id in (
            (VIEWER, "file-2"),
            (replace(VIEWER, tenant_id="ten_2"), "file-1"),
            (replace(VIEWER, now_at=5000.0), "file-1"),
            (replace(VIEWER, since_at=1000.5), "file-1"),
            (VIEWER, "a\x00b"),
            (VIEWER, "\udc80"),
        ):
            with pytest.raises(NotFound) as raised:
                files.get(session, viewer, file_id)
            told.add(str(raised.value).replace(repr(file_id), "ID"))
    assert told == {"file ID does not exist"}
    with pytest.raises(NotFound), appending(engine, "test") as session:
        files.remove(session, replace(VIEWER, tenant_id="ten_2"), "file-1")
    with appending(engine, "test") as session:
        assert files.remove(session, VIEWER, "file-1") == kept
    assert check_integrity(engine) == FileUsage()


def test_lists_go_on_behind_a_file(engine: Engine) -> None:
    add(engine, *(record(f"file-{n}", created_at=1000.0 + n // 2) for n in range(5)))
    add(engine, record("file-x", purpose="evals"), record("file-y", tenant_id="ten_2"))
    assert ids(engine, purpose="batch") == [f"file-{n}" for n in range(5)]
    assert ids(engine, descending=True, limit=2) == ["file-4", "file-3"]
    assert ids(engine, descending=True, after="file-3", limit=2) == ["file-2", "file-x"]
    assert ids(engine, after="file-1", purpose="batch") == ["file-2", "file-3", "file-4"]
    for missing in ("file-y", "file-9"):
        with pytest.raises(NotFound):
            ids(engine, after=missing)


def test_bytes_and_numbers_are_reserved_and_settled(engine: Engine) -> None:
    assert reserve(engine, "file-1", 900)
    assert not reserve(engine, "file-2", 101), "too many bytes"
    assert reserve(engine, "file-2", 100)
    assert reserve(engine, "other", 1000, tenant_id="ten_2"), "another tenant's are others"
    assert check_integrity(engine) == FileUsage(2, 1000)
    with appending(engine, "test") as session:
        assert files.add(session, record("file-1", size_bytes=700), "file-1")
        assert not files.add(session, record("file-9"), "file-9"), "nothing is reserved"
        assert file_quota.release(session, "file-2")
        assert not file_quota.release(session, "file-2")
    assert check_integrity(engine) == FileUsage(1, 700)
    for n in range(4):
        assert reserve(engine, f"file-2{n}", 1)
    assert not reserve(engine, "file-30", 1), "too many files"
    assert check_integrity(engine) == FileUsage(5, 704)


def test_many_at_a_time_do_not_exceed_the_bounds(engine: Engine) -> None:
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda n: reserve(engine, f"file-{n}", 300), range(12)))
    assert sum(made) == 3
    assert check_integrity(engine) == FileUsage(3, 900)


def test_a_reservation_of_a_dead_process_ends(engine: Engine) -> None:
    assert reserve(engine, "file-1", 10)
    assert reserve(engine, "file-2", 10, expires_at=3000.0)
    with appending(engine, "test") as session:
        assert file_quota.remove_expired(session, 1999.0, limit=10) == 0
        assert file_quota.remove_expired(session, 2000.0, limit=10) == 1
        assert not files.add(session, record("file-1"), "file-1"), "it comes too late"
    assert check_integrity(engine) == FileUsage(1, 10)


def test_what_is_not_kept_is_removed(engine: Engine) -> None:
    with writing(engine, "test") as session:
        own = tenants.create_tenant(session, "acme", now_at=0.0)
        tenants.update_tenant(session, own.id, response_retention_days=0, now_at=0.0)
    add(
        engine,
        record("file-1", expires_at=1500.0),
        record("file-2", created_at=500.0),
        record("file-3", tenant_id=own.id),
        record("file-4"),
    )
    names: list[str] = []
    for _ in range(4):
        with appending(engine, "test") as session:
            names += files.remove_expired(session, 1500.0, 600.0, limit=1)
    assert sorted(names) == [f"ten_1/files/file-{n}" for n in (1, 2, 3)]
    assert ids(engine) == ["file-4"]
    assert check_integrity(engine) == FileUsage(1, 100)
    assert check_integrity(engine, own.id) == FileUsage()
    with appending(engine, "test") as session:
        kept = {"limit": 9, "without": ["file-4"]}
        assert files.remove_expired(session, 9e9, 9e9, **kept) == []  # type: ignore[arg-type]
    with reading(engine) as session:
        assert files.without_row(session, [*names, "ten_1/files/file-4"]) == set(names)


@pytest.mark.parametrize("database", ["postgresql"])
def test_the_sweeper_waits_for_nobody_who_is_at_work(engine: Engine) -> None:
    """Whoever settles has a reservation, or an upload, and then waits for the tenant's count. The
    sweeper has the count, so it may not wait for such a row: that would be a deadlock."""

    def sweep(session: Session) -> None:
        session.execute(text("SET LOCAL lock_timeout = '5s'"))
        assert file_quota.remove_expired(session, 2000.0, limit=10) == 1
        assert uploads.expire(session, 4600.0, limit=10) == (1, ["ten_1/parts/part_2"])

    for n in (1, 2):
        assert reserve(engine, f"file-{n}", 10)
        with appending(engine, "test") as session:
            assert uploads.add(session, replace(UPLOAD, id=f"upload_{n}"), BOUNDS)
            assert uploads.claim_part(session, f"upload_{n}", 50, BOUNDS)
            assert uploads.add_part(session, replace(part(n), upload_id=f"upload_{n}"), 50)
    with appending(engine, "test") as at_work:
        for table, own_id in ((ReservedFile, "file-1"), (FileUpload, "upload_1")):
            at_work.execute(select(table.id).where(table.id == own_id).with_for_update())
        with appending(engine, "test") as session:
            sweep(session)
        assert files.add(at_work, record("file-1", size_bytes=7), "file-1")
        assert uploads.claim_part(at_work, "upload_1", 60, BOUNDS)
    assert check_integrity(engine) == FileUsage(2, 117)


def part(number: int, size_bytes: int = 50) -> UploadPartRecord:
    name = f"part_{number}"
    return UploadPartRecord(name, "upload_1", size_bytes, f"ten_1/parts/{name}", 1000.0)


def test_an_upload_takes_parts_and_ends_once(engine: Engine) -> None:
    with appending(engine, "test") as session:
        assert uploads.add(session, UPLOAD, BOUNDS)
        assert uploads.claim_part(session, "upload_1", 60, BOUNDS)
        assert uploads.add_part(session, part(1), 60)
        assert uploads.claim_part(session, "upload_1", 60, BOUNDS)
        uploads.unclaim_part(session, "upload_1", 60)
        assert uploads.claim_part(session, "upload_1", 50, BOUNDS)
        assert uploads.add_part(session, part(2), 50)
    assert check_integrity(engine) == FileUsage(1, 100), "as much as it was made for"
    with reading(engine) as session:
        found = uploads.get(session, VIEWER, "upload_1")
        assert (found.num_parts, found.parts_bytes) == (2, 100)
        assert uploads.parts(session, "upload_1") == {"part_1": part(1), "part_2": part(2)}
        for viewer in (replace(VIEWER, tenant_id="ten_2"), replace(VIEWER, since_at=1001.0)):
            with pytest.raises(NotFound):
                uploads.get(session, viewer, "upload_1")
    with appending(engine, "test") as session:
        names = uploads.end(session, "upload_1", "completed", "file-1")
        assert sorted(names or ()) == ["ten_1/parts/part_1", "ten_1/parts/part_2"]
        assert files.add(session, record("file-1"), "upload_1")
        assert uploads.end(session, "upload_1", "cancelled") is None
        assert not uploads.claim_part(session, "upload_1", 1, BOUNDS)
        assert not uploads.add_part(session, part(3), 50)
    assert check_integrity(engine) == FileUsage(1, 100)
    with reading(engine) as session:
        assert uploads.get(session, VIEWER, "upload_1").file_id == "file-1"
        assert uploads.without_row(session, ["ten_1/parts/part_1"]) == {"ten_1/parts/part_1"}


def test_uploads_are_bounded_whatever_becomes_of_them(engine: Engine) -> None:
    made = []
    for n in range(6):
        with appending(engine, "test") as session:
            made.append(uploads.add(session, replace(UPLOAD, id=f"upload_{n}"), BOUNDS))
            if made[-1]:
                assert uploads.end(session, f"upload_{n}", "cancelled") == []
                assert file_quota.release(session, f"upload_{n}")
    assert made == [True] * 5 + [False]
    with appending(engine, "test") as session:
        assert uploads.add(session, replace(UPLOAD, id="other", tenant_id="ten_2"), BOUNDS)
        assert uploads.expire(session, 4600.0 + uploads.KEEP_S, limit=10) == (1, [])
        assert uploads.add(session, replace(UPLOAD, id="upload_9"), BOUNDS)
    assert check_integrity(engine) == FileUsage(1, 100)


def test_parts_that_are_sent_again_count(engine: Engine) -> None:
    with appending(engine, "test") as session:
        assert uploads.add(session, replace(UPLOAD, size_bytes=600), BOUNDS)
        assert uploads.claim_part(session, "upload_1", 600, BOUNDS)
        assert uploads.add_part(session, part(1, 600), 600)
        assert uploads.claim_part(session, "upload_1", 400, BOUNDS)
        assert uploads.add_part(session, part(2, 400), 400)
    assert check_integrity(engine) == FileUsage(1, 1000)
    with appending(engine, "test") as session:
        assert not uploads.claim_part(session, "upload_1", 1, BOUNDS)
        session.rollback()
    assert check_integrity(engine) == FileUsage(1, 1000)


def test_a_late_upload_expires_and_is_forgotten(engine: Engine) -> None:
    with appending(engine, "test") as session:
        assert uploads.add(session, UPLOAD, BOUNDS)
        assert uploads.claim_part(session, "upload_1", 50, BOUNDS)
        assert uploads.add_part(session, part(1), 50)
        assert uploads.expire(session, 4599.0, limit=10) == (0, [])
        assert uploads.expire(session, 4600.0, limit=10) == (1, ["ten_1/parts/part_1"])
        assert uploads.get(session, VIEWER, "upload_1").state == "expired"
        uploads.expire(session, 4600.0 + uploads.KEEP_S, limit=10)
        with pytest.raises(NotFound):
            uploads.get(session, VIEWER, "upload_1")
    assert check_integrity(engine) == FileUsage()
