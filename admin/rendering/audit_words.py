"""The audit log in words: a sentence for each entry, its fields by name, money, dates and sizes as
people read them, and where what it is about can be seen. Pure: names of ids are given.

An entry keeps what the registry stored (registry/audit.py). Of something new or gone, what has its
default is left out here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final

import msgspec

from admin.rendering.templating import exact, money, number, path, percent, size
from registry.audit import AuditEntry
from registry.money.prices import PRICE_NAMES

MAX_SHOWN: Final = 120
TARGET: Final = "{target}"
NUM_IN_SENTENCE: Final = 2
"""Changes that the sentence itself names; more are listed below it."""
_MAX_AT: Final = 253_402_300_800.0
"""The year 10000."""
_IDS: Final = ("ten_", "key_")
_EMPTY: Final[tuple[Any, ...]] = (None, "", 0, False, [], {}, "*", "auto", "standard", "off")
"""What a new thing has where nobody said anything; left out of what is said of it."""
SENTENCES: Final[Mapping[str, str]] = {
    "key.create": "Created the key {target}",
    "key.change": "Changed the key {target}",
    "key.revoke": "Revoked the key {target}",
    "key.rotate": "Rotated the key {target}",
    "tenant.create": "Created the tenant {target}",
    "tenant.update": "Changed the tenant {target}",
    "tenant.floor": "Set the memory floor of {target}",
    "tenant.terms": "Set the plan of {target}",
    "tenant.withdraw": "Withdrew the scheduled plan of {target}",
    "limits.set": "Changed the limits of {target}",
    "user.create": "Created the user {target}",
    "user.remove": "Removed the user {target}",
    "user.role": "Changed the roles of {target}",
    "user.password": "Set the password of {target}",
    "user.disable": "Disabled the user {target}",
    "user.enable": "Enabled the user {target}",
    "user.bind": "Bound {target} to an account of the identity provider",
    "user.unbind": "Unbound {target} from an account of the identity provider",
    "session.begin": "{target} signed in",
    "session.end": "Ended a session of {target}",
    "model.add": "Began the registration of {target}",
    "model.ready": "Finished the registration of {target}",
    "model.failed": "The registration of {target} failed",
    "model.remove": "Removed the model {target}",
    "model.pin": "Pinned {target}",
    "model.unpin": "Unpinned {target}",
    "model.load": "Asked the server to load {target}",
    "model.unload": "Asked the server to unload {target}",
    "model.update": "Served a new revision of {target}",
    "model.rollback": "Rolled back {target}",
    "price.set": "Set a price of {target}",
    "price.withdraw": "Withdrew the scheduled price of {target}",
    "plan.create": "Created the plan {target}",
    "plan.discount": "Set the discount of the plan {target}",
    "plan.price": "Set an own price of the plan {target}",
    "plan.withdraw": "Withdrew a scheduled change of the plan {target}",
    "alert.add": "Added an alert",
    "alert.remove": "Removed an alert",
    "invoice.issue": "Issued the invoice {target}",
    "ledger.correct": "Corrected the request {target}",
    "ledger.keep": "Deleted old postings",
    "cache.purge": "Flushed cached answers of {target}",
    "cache.read": "Read cached answers of {target}",
    "database.adopt": "Adopted the data folder {target}",
    "export.ask": "Requested an export",
    "export.cancel": "Cancelled an export",
    "export.retry": "Restarted an export",
    "export.remove": "Removed an export",
    "export.open": "Downloaded an export",
}
LABELS: Final[Mapping[str, str]] = {
    "prompt_nanos": "input price",
    "cached_nanos": "cached input price",
    "completion_nanos": "output price",
    "embedding_nanos": "encoder price",
    "service_second_nanos": "price per second of service",
    "load_second_nanos": "price per second of loading",
    "day_budget_nanos": "daily budget",
    "month_budget_nanos": "monthly budget",
    "valid_from": "valid from",
    "discount_bp": "discount",
    "tenant_id": "tenant",
    "key_id": "key",
    "allowed_models": "models",
    "allowed_cidrs": "networks",
    "password_set_at": "password set",
    "prompt_tokens": "input tokens",
    "cached_tokens": "cached input tokens",
    "completion_tokens": "output tokens",
    "cost_nanos": "cost",
    "total_nanos": "total",
    "budget_nanos": "soft budget",
    "size_bytes": "size",
    "cache_max_age_s": "maximum age of cached answers",
    "cache_false_hit_budget": "false hits allowed",
    "cache_mode": "cached answers",
    "cache_sampled": "also cache sampled answers",
    "max_concurrency": "concurrent requests",
    "max_prompt_tokens": "input tokens per request",
    "max_output_tokens": "output tokens per request",
}


@dataclass(frozen=True, slots=True)
class AuditChange:
    """One field of an entry that is not what it was, in words."""

    label: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class AuditLine:
    """An entry as it is shown: `head`, `target` and `tail` are one sentence. `path` below the
    prefix: where the target is seen; "" nowhere. `changes`: those that the sentence does not
    name."""

    entry: AuditEntry
    head: str
    target: str
    tail: str
    path: str
    changes: Sequence[AuditChange]

    @property
    def sentence(self) -> str:
        """As a whole."""
        return f"{self.head}{self.target}{self.tail}"

    @property
    def is_change(self) -> bool:
        """Whether there is something before and after; else something is new or gone."""
        return bool(self.entry.before) and bool(self.entry.after)


def ids_in(entry: AuditEntry) -> set[str]:
    """Ids of tenants and keys that an entry speaks of."""
    values = [entry.target]
    for side in (entry.before or {}, entry.after or {}):
        values += [value for value in side.values() if isinstance(value, str)]
        values += list(side.get("roles") or ())
    return {value for value in values if value.startswith(_IDS)}


def line_of(entry: AuditEntry, names: Mapping[str, str], currency: str) -> AuditLine:
    """`names`: of tenants and keys by id."""
    target = names.get(entry.target) or _plain_target(entry)
    changes = _changes(entry, names, currency)
    sentence = SENTENCES.get(entry.action, f"{entry.action} {TARGET}")
    head, _, tail = sentence.partition(TARGET) if TARGET in sentence else ("", "", "")
    if TARGET not in sentence:
        target = sentence
    if entry.before and entry.after and 0 < len(changes) <= NUM_IN_SENTENCE:
        told = (f"{each.label} {each.before} → {each.after}" for each in changes)
        tail, changes = f"{tail}: {', '.join(told)}", []
    return AuditLine(entry, head, target, tail, path_of(entry), changes)


def path_of(entry: AuditEntry) -> str:
    """The page below the prefix where the target is seen; "" where there is none."""
    target, kind = path(entry.target), entry.action.partition(".")[0]
    if entry.target.startswith("ten_"):
        return f"/tenants/{target}"
    if entry.target.startswith("key_"):
        return f"/keys/{target}"
    if entry.action == "limits.set":
        return "/limits/gateway" if entry.target == "gateway" else f"/limits/model/{target}"
    if entry.action == "ledger.correct":
        return f"/corrections?request={target}"
    return {
        "model": f"/models/{target}",
        "price": f"/prices/{target}",
        "plan": f"/plans/{target}",
        "user": f"/users/{target}",
        "session": f"/users/{target}",
        "invoice": f"/invoices?q={target}",
        "alert": "/alerts",
        "export": "/exports",
    }.get(kind, "")


def _plain_target(entry: AuditEntry) -> str:
    if entry.target == "gateway" and entry.action == "limits.set":
        return "the server"
    named = (entry.after or entry.before or {}).get("name")
    return named if isinstance(named, str) and named else entry.target


def _changes(entry: AuditEntry, names: Mapping[str, str], currency: str) -> list[AuditChange]:
    before, after = entry.before or {}, entry.after or {}
    whole = not (entry.before and entry.after)
    found = []
    for name in {**before, **after}:
        old, new = before.get(name), after.get(name)
        if old == new or (whole and ((old or new) in _EMPTY or name == "name")):
            continue
        limit = entry.action == "limits.set"
        said = [_said(name, value, names, currency, limit) for value in (old, new)]
        label = LABELS.get(name, name.removesuffix("_nanos").replace("_", " "))
        found.append(AuditChange(label, *said))
    return found


def _said(name: str, value: Any, names: Mapping[str, str], currency: str, is_limit: bool) -> str:
    if is_limit and value == 0:
        return "unlimited"
    if value is None or value in ("", [], {}):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name == "roles" and isinstance(value, dict):
        roles = (f"{role} of {names.get(t, t)}" if t != "*" else role for t, role in value.items())
        return _cut(", ".join(map(str, roles)))
    if isinstance(value, dict):
        inner = (f"{LABELS.get(n, n)} {_said(n, v, names, currency, False)}"
                 for n, v in value.items() if v and n != "model")  # fmt: skip
        return _cut(", ".join(inner) or "free")
    if isinstance(value, list):
        return _cut(", ".join(str(each) for each in value))
    if isinstance(value, str):
        return _cut(names.get(value, value))
    return _figure(name, value, currency)


def _figure(name: str, value: float, currency: str) -> str:
    if name in PRICE_NAMES and name.endswith("second_nanos"):
        return money(int(value), currency)
    if name in PRICE_NAMES:
        return f"{money(int(value) * 10**6, currency)} / 1M" if value else "free"
    if name.endswith("_nanos"):
        return money(int(value), currency)
    if name.endswith(("_at", "_from")):
        return exact(value)[:16] + " UTC" if 0 < value < _MAX_AT else "-"
    if name.endswith("_bytes"):
        return size(value)
    if name.endswith("_bp"):
        return f"{(Decimal(int(value)) / 100).normalize():f} %"
    if name in ("reserved_share", "cache_false_hit_budget"):
        return percent(value, 1)
    if float(value).is_integer():
        return number(value)
    return msgspec.json.encode(value).decode()


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"
