"""`polyhost keys create|list|set|revoke|rotate`. A new key is printed once, to standard output."""

import argparse
import math
import time
from dataclasses import replace

from admin.cli.common import (
    add_command,
    add_commands,
    call,
    instant,
    note,
    open_registry,
    parse_duration,
    print_json,
    print_table,
)
from admin.operations import keys
from registry.accounts.api_keys import KeyChanges, KeyRecord
from registry.accounts.key_terms import CACHE_MODES, INFERENCE, KeyCache
from registry.accounts.quotas import Limits
from registry.errors import InvalidValue

SERVERS = "server"
"""In place of a number: the server's setting."""


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(
        commands, "create", "create an API key; it is shown once", _create, with_json=True
    )
    create.add_argument("--tenant", required=True, help="name or id of the tenant")
    create.add_argument("--name", required=True, help="name that says what the key is for")
    create.add_argument(
        "--expires-in",
        type=parse_duration,
        metavar="TIME",
        help="lifetime, such as 30d (default: no expiry)",
    )
    create.add_argument("--models", metavar="A,B", help="allow only these models (default: all)")
    create.add_argument("--cidrs", metavar="A,B", help="allow only these networks (default: any)")
    create.add_argument(
        "--scopes",
        default=INFERENCE,
        metavar="A,B",
        help="what the key may do: inference, responses, usage, files (default: inference)",
    )
    add_cache_options(create)
    add_limit_options(create, default=0)
    every = add_command(commands, "list", "list keys and their state", _list, with_json=True)
    every.add_argument("--tenant", help="only keys of this tenant: name or id")
    change = add_command(commands, "set", "change the restrictions of a key", _set, with_json=True)
    change.add_argument("key", help="id (key_...) or public id")
    change.add_argument(
        "--expires-in",
        type=_duration_or_never,
        metavar="TIME|never",
        help="new lifetime from now on, such as 30d",
    )
    change.add_argument("--models", metavar="A,B|all", help="allow only these models")
    change.add_argument("--cidrs", metavar="A,B|any", help="allow only these networks")
    add_cache_options(change)
    revoke = add_command(commands, "revoke", "revoke a key; this cannot be undone", _revoke)
    revoke.add_argument("key", help="id (key_...) or public id")
    rotate = add_command(commands, "rotate", "replace the secret of a key", _rotate, with_json=True)
    rotate.add_argument("key", help="id (key_...) or public id")
    rotate.add_argument(
        "--grace",
        type=parse_duration,
        default=0.0,
        metavar="TIME",
        help="how long the old secret still works (default: 0)",
    )


def add_limit_options(parser: argparse.ArgumentParser, default: int | None) -> None:
    """--rpm, --tpm, --concurrency; 0 is unlimited."""
    for option, summary in (
        ("--rpm", "requests per minute"),
        ("--tpm", "tokens per minute"),
        ("--concurrency", "concurrent requests"),
    ):
        parser.add_argument(
            option, type=int, default=default, metavar="N", help=f"{summary}; 0: unlimited"
        )


def key_fields(key: KeyRecord) -> dict[str, object]:
    """A key for `--json`: everything but salts and digests."""
    return {
        "id": key.id,
        "public_id": key.public_id,
        "tenant": key.tenant_name,
        "tenant_id": key.tenant_id,
        "name": key.name,
        "scopes": key.scopes,
        "requests_per_minute": key.limits.requests_per_minute,
        "tokens_per_minute": key.limits.tokens_per_minute,
        "max_concurrency": key.limits.max_concurrency,
        **key.cache.public(),
        "allowed_models": key.allowed_models,
        "allowed_cidrs": _cidrs(key),
        "created_at": key.created_at,
        "expires_at": key.expires_at,
        "revoked_at": key.revoked_at,
        "previous_until_at": key.previous_until_at,
    }


def _create(options: argparse.Namespace) -> int:
    key, plaintext = call(
        options,
        keys.create_key,
        options.tenant,
        options.name,
        limits=Limits(options.rpm, options.tpm, options.concurrency),
        cache=cache_of(options, KeyCache()),
        scopes=[name.strip() for name in options.scopes.split(",")],
        allowed_models=_listed(options.models, "all"),
        expires_in_s=options.expires_in,
        allowed_cidrs=_listed(options.cidrs, "any"),
    )
    return _show_once(options, key, plaintext)


def _set(options: argparse.Namespace) -> int:
    given = (options.expires_in, options.models, options.cidrs, *cache_options(options))
    if all(value is None for value in given):
        raise InvalidValue(
            "nothing to change: give --expires-in, --models, --cidrs or a --cache option"
        )
    changes = KeyChanges()
    if options.expires_in is not None:
        expires = None if options.expires_in == math.inf else time.time() + options.expires_in
        changes = replace(changes, expires_at=expires)
    if options.models is not None:
        changes = replace(changes, allowed_models=_listed(options.models, "all"))
    if options.cidrs is not None:
        changes = replace(changes, allowed_cidrs=_listed(options.cidrs, "any"))
    with open_registry(options) as context:
        if any(value is not None for value in cache_options(options)):
            before = keys.show_key(context, options.key)
            changes = replace(changes, cache=cache_of(options, before.cache))
        key = keys.change_key(context, options.key, changes)
    if options.json:
        print_json(key_fields(key))
    else:
        models = "all" if key.allowed_models is None else ",".join(sorted(key.allowed_models))
        networks = ",".join(_cidrs(key) or ("any",))
        expires = "never" if key.expires_at is None else instant(key.expires_at)
        print(
            f"{key.id}: models {models}; networks {networks}; expires {expires}; "
            f"cache {key.cache.mode}"
        )
    return 0


def _list(options: argparse.Namespace) -> int:
    found = call(options, keys.list_keys, options.tenant)
    if options.json:
        print_json([key_fields(key) for key in found])
        return 0
    now_at = time.time()
    print_table(
        ("ID", "PUBLIC ID", "TENANT", "NAME", "STATE", "EXPIRES", "MODELS", "NETWORKS"),
        [
            (
                key.id,
                key.public_id,
                key.tenant_name,
                key.name,
                _state(key, now_at),
                instant(key.expires_at),
                "all" if key.allowed_models is None else ",".join(sorted(key.allowed_models)),
                ",".join(_cidrs(key) or ("any",)),
            )
            for key in found
        ],
    )
    return 0


def _revoke(options: argparse.Namespace) -> int:
    key = call(options, keys.revoke_key, options.key)
    print(f"revoked key {key.id} of tenant {key.tenant_name}")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    key, plaintext = call(options, keys.rotate_key, options.key, options.grace)
    status = _show_once(options, key, plaintext)
    if not options.json and options.grace:
        note(f"the old secret works until {instant(key.previous_until_at)} UTC")
    return status


def _show_once(options: argparse.Namespace, key: KeyRecord, plaintext: str) -> int:
    if options.json:
        print_json({**key_fields(key), "key": plaintext})
    else:
        print(plaintext)
        note(f"key {key.id} of tenant {key.tenant_name}: store it now; it is not shown again")
    return 0


def _listed(text: str | None, everything: str) -> list[str] | None:
    """Names between commas; None: no bound."""
    if text is None or text.strip() == everything:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidValue(f"list at least one, or write {everything}")
    return names


def _cidrs(key: KeyRecord) -> list[str] | None:
    networks = key.allowed_networks
    return None if networks is None else [str(network) for network in networks]


def _duration_or_never(text: str) -> float:
    return math.inf if text == "never" else parse_duration(text)


def _state(key: KeyRecord, now_at: float) -> str:
    if key.revoked_at is not None:
        return "revoked"
    if key.tenant_disabled:
        return "tenant disabled"
    return "active" if key.usable(now_at) else "expired"


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """--cache, --cache-max-age, --false-hit-budget, --cache-sampled."""
    parser.add_argument(
        "--cache", choices=CACHE_MODES, help="when to answer from the cache (new keys: off)"
    )
    parser.add_argument(
        "--cache-max-age",
        type=_age,
        metavar=f"TIME|{SERVERS}",
        help=f"maximum age of a cached answer; {SERVERS}: as long as the server keeps it",
    )
    parser.add_argument(
        "--false-hit-budget",
        type=_share,
        metavar=f"SHARE|{SERVERS}",
        help=f"share of cached answers that may be wrong, such as 0.01; {SERVERS}: the setting",
    )
    parser.add_argument(
        "--cache-sampled",
        choices=("on", "off"),
        help="also cache answers with a temperature above 0 and no seed (new keys: off)",
    )


def cache_options(options: argparse.Namespace) -> tuple[object, ...]:
    """Each None where it was not given."""
    return (
        options.cache,
        options.cache_max_age,
        options.false_hit_budget,
        options.cache_sampled,
    )


def cache_of(options: argparse.Namespace, before: KeyCache) -> KeyCache:
    """What is given in place of what was before."""
    found = before
    if options.cache is not None:
        found = replace(found, mode=options.cache)
    if options.cache_max_age is not None:
        age_s = options.cache_max_age
        found = replace(found, max_age_s=None if math.isnan(age_s) else age_s)
    if options.false_hit_budget is not None:
        share = options.false_hit_budget
        found = replace(found, false_hit_budget=None if math.isnan(share) else share)
    if options.cache_sampled is not None:
        found = replace(found, sampled=options.cache_sampled == "on")
    return found


def _age(text: str) -> float:
    return math.nan if text == SERVERS else parse_duration(text)


def _share(text: str) -> float:
    if text == SERVERS:
        return math.nan
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if math.isnan(share):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a share such as 0.01, which is one in a hundred"
        )
    return share
