"""Style sheet, scripts and icon: read once, compressed once, named by what is in them.

    /admin/static/<digest of all of them>/<name>

A digest over the whole folder, so that modules import each other by their plain names and a
browser may keep every file for ever.
"""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
MEDIA = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file, plain and compressed."""

    media: str
    plain: bytes
    compressed: bytes


class StaticFiles:
    """All of the folder, in memory."""

    def __init__(self, folder: Path = FOLDER) -> None:
        paths = sorted(path for path in folder.iterdir() if path.suffix in MEDIA)
        digest = hashlib.sha256()
        self._files: dict[str, StaticFile] = {}
        for path in paths:
            data = path.read_bytes()
            digest.update(path.name.encode() + b"\0" + data)
            packed = gzip.compress(data, 9, mtime=0)
            self._files[path.name] = StaticFile(MEDIA[path.suffix], data, packed)
        self.version = digest.hexdigest()[:16]

    def url(self, name: str) -> str:
        """Where a page finds it. Raises KeyError."""
        _ = self._files[name]
        return f"/admin/static/{self.version}/{name}"

    def find(self, version: str, name: str) -> StaticFile | None:
        """The file; of another version none: the page that asks is an old one."""
        return self._files.get(name) if version == self.version else None
