"""The verb that lets an operator ask a model in a key's place, for test prompts (control.py).

The request goes the way of any other: limits, fair queue, ledger. It is billed to the key's tenant,
so who may change the tenant's keys may do it. The plaintext is neither needed nor known.
"""

from dataclasses import dataclass

from gateway.service.control import Control, find_key, require, visible
from registry import finding

MAX_SUGGESTED = 20


@dataclass(frozen=True, slots=True)
class AskingKey:
    """A key that may be asked as. `title` is for people."""

    key_id: str
    public_id: str
    title: str


def asking_keys(control: Control) -> list[AskingKey]:
    """Some keys that work, the newest first; the caller may name others."""
    seen = visible(control, "keys.write")
    with control.reading() as session:
        rows = finding.working_keys(session, MAX_SUGGESTED, seen, now_at=control.clock())
    return [
        AskingKey(key_id, public_id, f"{public_id} · {name} of {tenant}")
        for key_id, public_id, name, tenant in rows
    ]


def key_to_ask_as(control: Control, key: str) -> AskingKey:
    """By id or public id. Raises NotFound or Forbidden."""
    require(control, "models.read")
    with control.reading() as session:
        found = find_key(control, session, key, "keys.write")
    return AskingKey(found.id, found.public_id, f"{found.name} of {found.tenant_name}")
