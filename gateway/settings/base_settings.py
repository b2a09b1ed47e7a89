"""What a setting is made of, and the settings of exports."""

from dataclasses import dataclass, field
from typing import Any, TypeVar

MIB = 1 << 20
T = TypeVar("T")


def setting(default: T, text: str, **bounds: Any) -> T:
    """A field of a class of settings: its default, what it does, and its bounds (those of
    `msgspec.Meta`)."""
    return field(default=default, metadata={"text": text, "bounds": bounds})


@dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """Files that operators export."""

    exports_keep_s: float = setting(
        604_800.0, "How long the file of a finished export is kept.", gt=0.0
    )
    max_exports_running: int = setting(
        2,
        "Maximum number of exports that run at the same time on one machine. Further exports wait.",
        ge=1,
    )
    max_exports: int = setting(
        200,
        "Maximum number of exports kept, including those that wait. Beyond it, new exports are "
        "refused.",
        ge=1,
    )
    max_exports_per_user: int = setting(20, "Maximum number of exports kept per user.", ge=1)
    exports_quota_bytes: int = setting(
        10_240 * MIB, "Maximum disk space for all exports together. 0: unlimited.", ge=0
    )
    exports_min_free_bytes: int = setting(
        1024 * MIB,
        "Minimum free space on the exports' disk. An export that would leave less fails.",
        ge=0,
    )
