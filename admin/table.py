"""All operations by name: what commands and pages can do, and what an API over them would offer.

Each entry has the function with its typed parameters and result, the permission, and the audit
entries (admin/context/operation.py). `tests/admin/operations/test_table.py` holds the table
together.
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Final

from admin.context.operation import ATTRIBUTE, Operation
from admin.live import load_plan, workers
from admin.operations import (
    cache,
    export_jobs,
    invoices,
    keys,
    limits,
    models,
    prices,
    server,
    sessions,
    tenants,
    usage,
    users,
)
from admin.registration import preflight

MODULES: Final = (
    *(tenants, keys, limits, users, sessions),
    *(models, preflight, load_plan, workers, cache, server),
    *(prices, usage, export_jobs, invoices),
)


def operations_of(module: ModuleType) -> list[Operation]:
    """Those that a module defines, in its order."""
    found = [getattr(value, ATTRIBUTE, None) for value in vars(module).values()]
    own = [each for each in found if isinstance(each, Operation)]
    return [each for each in own if each.run.__module__ == module.__name__]


OPERATIONS: Final[Mapping[str, Operation]] = {
    each.name: each for module in MODULES for each in operations_of(module)
}
