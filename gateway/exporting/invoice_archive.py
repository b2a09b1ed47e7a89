"""Issued invoices as one ZIP: of each its PDF and what it was issued as."""

import hashlib
import os
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.service import invoices
from gateway.service.control import Control

FORMS = ("pdf", "json")


def write(
    control: Control, path: Path, numbers: Sequence[str], watch: Callable[[int, int], None]
) -> tuple[int, str]:
    """A new file. Returns what they ask for together, in nano-units, and its SHA-256. `watch` is
    told after each how many there are and what they ask for."""
    total_nanos = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for place, number in enumerate(numbers, 1):
            record, _ = invoices.get_invoice(control, number)
            for form in FORMS:
                entry = zipfile.ZipInfo(f"{_safe(number)}.{form}")
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, invoices.render_invoice(control, number, form))
            total_nanos += record.total_nanos
            watch(place, total_nanos)
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        return total_nanos, hashlib.file_digest(stream, "sha256").hexdigest()


def _safe(number: str) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in number)
