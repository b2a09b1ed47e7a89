"""Settings of exports that are made in the background (docs/billing.md)."""

from typing import Annotated

import msgspec

from gateway.settings_kinds import MIB, Count, CountOrZero, Seconds, doc


class ExportSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of `settings.Settings`."""

    exports_keep_s: Annotated[
        float, Seconds, doc("How long an export's file is there after it was made.")
    ] = 604_800.0
    max_exports_running: Annotated[
        int, Count, doc("Exports that are made at a time on a machine; more wait their turn.")
    ] = 2
    max_exports: Annotated[
        int, Count, doc("Exports that are kept, waiting ones too; beyond it none is taken on.")
    ] = 200
    max_exports_per_user: Annotated[
        int, Count, doc("Of these, how many one user may have asked for.")
    ] = 20
    exports_quota_bytes: Annotated[
        int, CountOrZero, doc("Disk that exports may take together; 0: no bound.")
    ] = 10_240 * MIB
    exports_min_free_bytes: Annotated[
        int,
        CountOrZero,
        doc("Free space that an export leaves on its disk; one that would not is given up."),
    ] = 1024 * MIB
