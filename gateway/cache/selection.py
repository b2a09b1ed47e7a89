"""Which entries a purge means. Pure; answers.lua says the same of entries in Redis."""

from gateway.cache.types import Entry, Selector


def selects(selector: Selector, entry: Entry) -> bool:
    """Everything that is asked for holds."""
    wanted = (
        (selector.tenant_id, entry.scope.tenant_id),
        (selector.model_name, entry.scope.model_name),
        (selector.key_id, entry.key_id),
        (selector.question, entry.question),
    )
    return all(asked in ("", had) for asked, had in wanted)
