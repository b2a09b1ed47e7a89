"""What tests of files share: an application whose keys may keep files, and how files are sent."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
from sqlalchemy import func, select

from engine.objects.folder_store import OWNER_FILE
from gateway.settings.settings import Settings
from registry.accounts.api_keys import KeyRecord
from registry.session import make_engine, reading
from registry.state import file_quota
from registry.state.file_quota import FileUsage, ReservedFile
from registry.state.files import StoredFile
from tests.gateway.edge_kit import KEY, Client, Kit, key_record, make_kit
from tests.migrated import migrated

OTHER_KEY = "test-key-of-another-tenant"
PLAIN_KEY = "test-key-for-inference-alone"
SCOPES = frozenset({"files", "inference"})


def file_kit(folder: Path, **settings: Any) -> Kit:
    """An application with a database and a folder for objects."""
    kit = make_kit(folder / "tiny", **settings)
    migrated(kit.edge.services.settings.registry_url)
    kit.use_keys(*file_keys())
    return kit


def file_keys() -> list[KeyRecord]:
    """Two tenants' keys that may keep files, and one that may not."""
    return [
        replace(key_record(), scopes=SCOPES),
        replace(key_record(OTHER_KEY, "key_2", tenant_id="ten_2"), scopes=SCOPES),
        key_record(PLAIN_KEY, "key_3"),
    ]


def form(data: bytes, purpose: str = "batch", field: str = "file", **fields: str) -> Any:
    """A form with a file."""
    made = aiohttp.FormData()
    if field == "file":
        for name, value in {"purpose": purpose, **fields}.items():
            made.add_field(name, value)
    made.add_field(field, io.BytesIO(data), filename="a.jsonl")
    return made


async def call(
    client: Client, method: str, path: str, key: str = KEY, **options: Any
) -> tuple[int, Any]:
    """Status and decoded body."""
    headers = {"authorization": f"Bearer {key}", **options.pop("headers", {})}
    url = client.base + path
    async with client.session.request(method, url, headers=headers, **options) as answer:
        return answer.status, await answer.json()


async def send(client: Client, data: bytes, key: str = KEY, **fields: str) -> dict[str, Any]:
    """The file that was made."""
    status, body = await call(client, "POST", "/v1/files", key, data=form(data, **fields))
    assert status == 200, body
    found: dict[str, Any] = body
    return found


async def content(client: Client, file_id: str, key: str = KEY) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"}
    url = f"{client.base}/v1/files/{file_id}/content"
    async with client.session.get(url, headers=headers) as answer:
        return answer.status, await answer.read()


def objects_of(settings: Settings) -> list[Path]:
    """What is in the folder for objects, half-written files included."""
    root = settings.objects_path(settings.data_path)
    return [path for path in root.rglob("*") if path.is_file() and path.name != OWNER_FILE]


def usage(settings: Settings, tenant_id: str = "ten_1") -> FileUsage:
    """What the tenant has. It is the sum of its files and reservations."""
    engine = make_engine(settings.registry_url)
    with reading(engine) as session:
        sizes: list[int] = []
        for owner, size in (
            (StoredFile.tenant_id, StoredFile.size_bytes),
            (ReservedFile.tenant_id, ReservedFile.num_bytes),
        ):
            query = select(func.count(), func.coalesce(func.sum(size), 0))
            sizes += session.execute(query.where(owner == tenant_id)).one()
        found = file_quota.usage(session, tenant_id)
    engine.dispose()
    assert found == FileUsage(sizes[0] + sizes[2], sizes[1] + sizes[3])
    return found
