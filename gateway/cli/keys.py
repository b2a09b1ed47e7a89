"""`polyhost keys create|list|set|revoke|rotate`. A plaintext goes to standard output, once."""

import argparse
import math
import time
from dataclasses import replace

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    parse_duration,
    print_json,
    print_table,
)
from gateway.cli.key_cache import add_cache_options, cache_of, cache_options
from gateway.service import keys as service_keys
from registry.api_keys import KeyChanges, KeyRecord
from registry.errors import InvalidValue
from registry.key_cache import KeyCache
from registry.key_scopes import INFERENCE
from registry.quotas import Limits


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(commands, "create", "make a key, shown once", _create, with_json=True)
    create.add_argument("--tenant", required=True, help="name or id")
    create.add_argument("--name", required=True, help="what the key is for")
    create.add_argument("--expires-in", type=parse_duration, metavar="TIME", help="such as 30d")
    create.add_argument("--models", metavar="A,B", help="allow only these models (all)")
    create.add_argument("--cidrs", metavar="A,B", help="allow only these networks (any)")
    create.add_argument(
        "--scopes", default=INFERENCE, metavar="A,B", help="inference, usage (inference)"
    )
    add_cache_options(create)
    add_limit_options(create, default=0)
    every = add_command(commands, "list", "keys and their state", _list, with_json=True)
    every.add_argument("--tenant", help="only this tenant's")
    change = add_command(commands, "set", "other bounds for a key", _set, with_json=True)
    change.add_argument("key", help="id (key_...) or public id")
    change.add_argument("--expires-in", type=_duration_or_never, metavar="TIME|never")
    change.add_argument("--models", metavar="A,B|all", help="allow only these models")
    change.add_argument("--cidrs", metavar="A,B|any", help="allow only these networks")
    add_cache_options(change)
    revoke = add_command(commands, "revoke", "refuse a key from now on", _revoke)
    revoke.add_argument("key", help="id (key_...) or public id")
    rotate = add_command(commands, "rotate", "give a key a new secret", _rotate, with_json=True)
    rotate.add_argument("key", help="id (key_...) or public id")
    rotate.add_argument(
        "--grace",
        type=parse_duration,
        default=0.0,
        metavar="TIME",
        help="how long the old secret still works (0)",
    )


def add_limit_options(parser: argparse.ArgumentParser, default: int | None) -> None:
    """--rpm, --tpm, --concurrency; 0 is unlimited."""
    for option, summary in (
        ("--rpm", "requests a minute"),
        ("--tpm", "tokens a minute"),
        ("--concurrency", "requests at a time"),
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
    with open_registry(options) as control:
        key, plaintext = service_keys.create_key(
            control,
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
        raise InvalidValue("say what to change: --expires-in, --models, --cidrs or --cache...")
    changes = KeyChanges()
    if options.expires_in is not None:
        expires = None if options.expires_in == math.inf else time.time() + options.expires_in
        changes = replace(changes, expires_at=expires)
    if options.models is not None:
        changes = replace(changes, allowed_models=_listed(options.models, "all"))
    if options.cidrs is not None:
        changes = replace(changes, allowed_cidrs=_listed(options.cidrs, "any"))
    with open_registry(options) as control:
        if any(value is not None for value in cache_options(options)):
            before = service_keys.show_key(control, options.key)
            changes = replace(changes, cache=cache_of(options, before.cache))
        key = service_keys.change_key(control, options.key, changes)
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
    with open_registry(options) as control:
        found = service_keys.list_keys(control, options.tenant)
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
    with open_registry(options) as control:
        key = service_keys.revoke_key(control, options.key)
    print(f"{key.id} of {key.tenant_name} is revoked")
    return 0


def _rotate(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        key, plaintext = service_keys.rotate_key(control, options.key, options.grace)
    status = _show_once(options, key, plaintext)
    if not options.json and options.grace:
        note(f"the old secret works until {instant(key.previous_until_at)} UTC")
    return status


def _show_once(options: argparse.Namespace, key: KeyRecord, plaintext: str) -> int:
    if options.json:
        print_json({**key_fields(key), "key": plaintext})
    else:
        print(plaintext)
        note(f"{key.id} of {key.tenant_name}: keep it now, it is not shown again")
    return 0


def _listed(text: str | None, everything: str) -> list[str] | None:
    """Names between commas; None: no bound."""
    if text is None or text.strip() == everything:
        return None
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InvalidValue(f"name at least one, or write {everything}")
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
