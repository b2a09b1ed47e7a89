"""What an API key is good for. Deny by default: what a key does not name it may not do.

inference   to ask models
usage       to read its own tenant's usage and costs
"""

from collections.abc import Iterable

from registry.errors import InvalidValue

INFERENCE = "inference"
USAGE = "usage"
SCOPES = frozenset({INFERENCE, USAGE})


def checked_scopes(names: Iterable[str]) -> list[str]:
    """In their order by name. Raises InvalidValue where one is none, or there is none."""
    found = sorted(set(names))
    unknown = [name for name in found if name not in SCOPES]
    if unknown or not found:
        raise InvalidValue(f"a key's scopes are some of {', '.join(sorted(SCOPES))}")
    return found
