"""Entries of the audit log in words, sums of money with the digits that matter, code in prose."""

from typing import Any

import pytest

from admin.rendering.audit_words import ids_in, line_of
from admin.rendering.templating import codes, money
from registry.audit import AuditEntry

NAMES = {"ten_1": "acme", "key_1": "web of acme"}


def entry(action: str, target: str, before: Any, after: Any) -> AuditEntry:
    return AuditEntry(1, 0.0, "admin:ann", action, target, before, after)


@pytest.mark.parametrize(
    ("told", "sentence", "path"),
    [
        (
            ("limits.set", "ten_1", {"month_budget_nanos": 0}, {"month_budget_nanos": 50 * 10**9}),
            "Changed the limits of acme: monthly budget unlimited → USD 50.00",
            "/tenants/ten_1",
        ),
        (
            ("price.set", "tiny", {"valid_from": 0.0, "prompt_nanos": 0},
             {"valid_from": 1791516956.0, "prompt_nanos": 250}),
            "Set a price of tiny: valid from - → 2026-10-09 03:35 UTC, "
            "input price free → USD 0.25 / 1M",
            "/prices/tiny",
        ),
        (
            ("user.role", "vera", {"roles": {}}, {"roles": {"*": "admin", "ten_1": "viewer"}}),
            "Changed the roles of vera: roles - → admin, viewer of acme",
            "/users/vera",
        ),
        (("cache.read", "ten_1", None, {"model": "tiny"}), "Read cached answers of acme",
         "/tenants/ten_1"),
        (("limits.set", "gateway", {"max_concurrency": 4}, {"max_concurrency": 8}),
         "Changed the limits of the server: concurrent requests 4 → 8", "/limits/gateway"),
        (("strange.thing", "x/y", None, None), "strange.thing x/y", ""),
    ],
)  # fmt: skip
def test_an_entry_is_a_sentence_that_leads_somewhere(
    told: tuple[Any, ...], sentence: str, path: str
) -> None:
    line = line_of(entry(*told), NAMES, "USD")
    assert (line.sentence, line.path) == (sentence, path)


def test_defaults_of_a_creation_are_left_out() -> None:
    made = {"name": "web", "tenant_id": "ten_1", "allowed_models": None, "revoked_at": None,
            "cache_mode": "off", "scopes": ["inference"], "cache_sampled": False}  # fmt: skip
    line = line_of(entry("key.create", "key_1", None, made), NAMES, "USD")
    assert line.sentence == "Created the key web of acme"
    assert [(each.label, each.after) for each in line.changes] == [
        ("tenant", "acme"),
        ("scopes", "inference"),
    ]
    assert not line.is_change


def test_many_changes_are_listed_below_and_long_ones_cut() -> None:
    before = {"source": "a", "revision": "b", "dtype": "c", "same": 1}
    after = {"source": "x" * 500, "revision": "y", "dtype": "z", "same": 1}
    line = line_of(entry("model.add", "m", before, after), {}, "USD")
    assert line.sentence == "Began the registration of m"
    assert [each.label for each in line.changes] == ["source", "revision", "dtype"]
    assert max(len(each.after) for each in line.changes) == 120


def test_ids_are_found_wherever_they_stand() -> None:
    found = ids_in(entry("user.role", "key_2", {"roles": {"ten_9": "x"}}, {"tenant_id": "ten_1"}))
    assert found == {"key_2", "ten_9", "ten_1"}


@pytest.mark.parametrize(
    ("nanos", "shown"),
    [
        (0, "USD 0.00"),
        (4_200_000, "USD 0.0042"),
        (1_961_000, "USD 0.00196"),
        (2_000_000, "USD 0.002"),
        (1, "USD 0.000000001"),
        (-4_200_000, "USD -0.0042"),
        (250_000_000, "USD 0.25"),
        (999_999_999, "USD 1.00"),
        (1_234_567_890_000, "USD 1,234.57"),
    ],
)
def test_small_sums_keep_their_digits(nanos: int, shown: str) -> None:
    assert money(nanos, "USD") == shown


def test_code_in_prose_is_set_apart_and_escaped() -> None:
    assert codes("run `polyhost <x>` or `y`") == (
        "run <code>polyhost &lt;x&gt;</code> or <code>y</code>"
    )
    assert codes("a ` alone & <b>") == "a ` alone &amp; &lt;b&gt;"
    assert codes("plain") == "plain"
