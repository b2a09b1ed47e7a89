"""The verb behind the search of the operator's pages: things by a part of their name (control.py).

Everybody finds what they may see elsewhere, and is not told that there is more.
"""

from dataclasses import dataclass
from typing import Literal

from gateway.policy import permissions
from gateway.policy.permissions import Verb
from gateway.service.control import Control
from registry import finding

MAX_TEXT_LEN = 128


@dataclass(frozen=True, slots=True)
class Found:
    """A thing. `ref` is what other verbs call it; `hint` tells it from others of its name."""

    kind: Literal["model", "tenant", "key"]
    ref: str
    name: str
    hint: str


def search(control: Control, text: str, limit: int = 6) -> list[Found]:
    """At most `limit` of each kind; none for an empty text."""
    text = text.strip()[:MAX_TEXT_LEN]
    if not text:
        return []
    found: list[Found] = []
    with control.reading() as session:
        if permissions.allowed(control.grants, "models.read"):
            rows = finding.models(session, text, limit)
            found += [Found("model", name, name, state) for name, state in rows]
        seen = _seen(control, "tenants.read")
        if seen is None or seen:
            of_tenants = finding.tenants(session, text, limit, seen)
            found += [Found("tenant", tenant_id, name, "") for tenant_id, name in of_tenants]
        seen = _seen(control, "keys.read")
        if seen is None or seen:
            for key_id, public_id, name, tenant in finding.keys(session, text, limit, seen):
                found.append(Found("key", key_id, name, f"{public_id} of {tenant}"))
    return found


def _seen(control: Control, verb: Verb) -> frozenset[str] | None:
    return permissions.tenants_allowed(control.grants, verb)
