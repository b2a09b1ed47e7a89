"""`polyhost models search|inspect`: what there is on a hub, and what a model is.

Both ask the registering process and need no database and no server: they are what somebody runs
first. A model that cannot be hosted is an ordinary answer of `inspect`; only where nothing could be
seen does it fail.
"""

import argparse
import sys
from collections.abc import Mapping

import msgspec

from admin.cli.common import (
    Commands,
    add_command,
    note,
    print_fields,
    print_json,
    print_table,
    settings_of,
    size,
)
from admin.context.registration_files import PHASES
from admin.registration.preflight import Preflight, inspect, search_hub
from admin.registration.register_process import HostingOption, HubModel, RegisterEvent

DEFAULT_LIMIT = 20
MAX_LIMIT = 100
UNSEEN = frozenset(
    {
        *("network", "hub_denied", "hub_offline", "no_repository", "no_revision", "bad_hub"),
        *("bad_redirect", "hash_mismatch", "io_error", "disk_full", "no_source", "no_answer"),
        *("crashed", "internal_error"),
    }
)
"""Codes that say nothing of the model: it could not be looked at."""
_TASKS = {"generate": "generation", "embed": "embedding", "classify": "classification"}
_ACCESS = {
    "auto": "gated: accept its licence on the hub",
    "manual": "gated: its authors decide on requests for access",
}


def configure(commands: Commands) -> None:
    """The two commands, in the group `models`."""
    look = add_command(
        commands, "inspect", "show what a model is, and whether it can be hosted", _inspect,
        with_json=True,
    )  # fmt: skip
    look.add_argument(
        "source",
        metavar="FOLDER|HUB_ID[@REVISION]",
        help="folder with a model, or a model ID on the hub such as org/name",
    )
    look.add_argument(
        "--revision", default="", help="branch, tag or commit on the hub (default: main)"
    )
    find = add_command(commands, "search", "find models on the hub", _search, with_json=True)
    find.add_argument("words", nargs="+", metavar="WORDS", help="part of the model ID")
    find.add_argument("--author", default="", metavar="A", help="only models of this organization")
    find.add_argument(
        "--task", default="", metavar="TASK", help="only this task, such as text-generation"
    )
    find.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        choices=range(1, MAX_LIMIT + 1),
        metavar="N",
        help=f"maximum number of models (default: {DEFAULT_LIMIT}, at most {MAX_LIMIT})",
    )


def _inspect(options: argparse.Namespace) -> int:
    def report(phase: str) -> None:
        if sys.stderr.isatty():
            text = PHASES.get(phase, phase)
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    settings = settings_of(options)
    seen = inspect(settings, options.source, options.revision, report=report)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    if options.json:
        print_json(inspection_fields(seen))
    elif seen.code not in UNSEEN or seen.hub or seen.described:
        print_inspection(seen, settings.device_budget_bytes)
    if seen.code in UNSEEN:
        note(f"polyhost: {seen.reason} ({seen.code})")
        return 1
    return 0


def inspection_fields(seen: Preflight) -> dict[str, object]:
    """An inspection for `--json`."""
    found, said = seen.found, seen.described
    fields: dict[str, object] = {
        "source": seen.place,
        "commit": seen.commit,
        "can_be_hosted": None if seen.code in UNSEEN else not seen.code,
        "code": seen.code,
        "reason": seen.reason,
        "parity_error": seen.parity_error,
        "hub": msgspec.to_builtins(seen.hub) if seen.hub else None,
        "model_type": said.model_type if said else "",
        "text_type": said.text_type if said else "",
        "architecture": said.architecture if said else "",
    }
    if found is not None:
        fields |= {
            "family": found.family,
            "hosted_architecture": found.architecture,
            "hosted_as": found.hosted_as,
            "task": found.task,
            "max_context": found.max_context,
            "num_parameters": found.num_parameters,
            "source_format": found.source_format,
            "dtype": found.dtype,
            "download_bytes": found.download_bytes,
            "choices": msgspec.to_builtins(found.choices),
        }
    return fields


def print_inspection(seen: Preflight, budget_bytes: int) -> None:
    """The facts, then what each dtype takes."""
    fields: Mapping[str, object] = {
        "model": f"{seen.place}, commit {seen.commit[:12]}" if seen.commit else seen.place,
        **_what_it_is(seen),
        **_what_the_hub_says(seen.hub),
        "can be hosted": _verdict(seen),
    }
    print_fields({name: value for name, value in fields.items() if value})
    if seen.found is None or not seen.found.choices:
        return
    print()
    head = ("DTYPE", "WEIGHTS", "KV, 1,000 TOKENS", "ADDED ERROR", "FITS")
    print_table(head, [_choice_row(seen.found, each) for each in seen.found.choices])
    note(
        f"fits: weights and KV within device_budget_bytes ({size(budget_bytes)})"
        if budget_bytes
        else "device_budget_bytes is not set: a server then takes a part of the free memory"
    )


def _what_it_is(seen: Preflight) -> dict[str, object]:
    found, said = seen.found, seen.described
    fields: dict[str, object] = {}
    if said is not None:
        text = f", text part {said.text_type}" if said.text_type else ""
        fields["type"] = f"{said.model_type} ({said.architecture or 'no architecture'}){text}"
        fields["published as"] = said.source_format and f"quantized by {said.source_format}"
    elif seen.hub is not None:
        fields["type"] = seen.hub.model_type and f"{seen.hub.model_type}, as the hub says"
        fields["published as"] = seen.hub.format
    if found is not None:
        # Of a wrapper its text part: towers are not hosted.
        fields["hosted as"] = found.hosted_as and f"{found.hosted_as}, {found.architecture}"
        fields["task"] = _TASKS.get(found.task, found.task)
        fields["parameters"] = parameters(found.num_parameters)
        fields["context"] = f"{found.max_context} tokens"
        fields["published as"] = (
            f"quantized by {found.source_format}" if found.source_format else found.dtype
        )
        fields["download"] = size(found.download_bytes) if found.download_bytes else ""
    elif seen.hub is not None:
        fields["parameters"] = parameters(seen.hub.num_parameters)
    return fields


def _what_the_hub_says(hub: HubModel | None) -> dict[str, object]:
    if hub is None:
        return {}
    return {
        "licence": hub.license or "not stated",
        "access": _ACCESS.get(hub.gated, "gated" if hub.gated else "open"),
        "downloads": f"{hub.downloads:,} in 30 days",
        "made from": hub.base_model,
    }


def _verdict(seen: Preflight) -> str:
    if seen.code in UNSEEN:
        return "not known"
    if seen.code:
        return f"no ({seen.code}): {seen.reason}{_instead(seen)}"
    error = "" if seen.parity_error is None else f" (largest error {seen.parity_error:.0e})"
    return f"yes, the parity probe passed{error}"


def _instead(seen: Preflight) -> str:
    """Where a file that cannot be opened was made from a checkpoint that perhaps can."""
    base = seen.hub.base_model if seen.hub else ""
    if seen.code not in ("no_weights", "pickle_weights", "quantized_weights") or not base:
        return ""
    return f"; or look at what it was made from: polyhost models inspect {base}"


def _choice_row(found: RegisterEvent, each: HostingOption) -> tuple[object, ...]:
    return (
        each.dtype + (" (auto)" if each.dtype == found.dtype else ""),
        size(each.weight_bytes),
        size(each.kv_bytes) if each.kv_bytes else "-",
        f"{each.added_error:.1%}" if each.added_error else "none",
        {None: "-", True: "yes", False: "no"}[each.fits],
    )


def parameters(count: int) -> str:
    """8.0B, 135M."""
    if not count:
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _search(options: argparse.Namespace) -> int:
    words = " ".join(options.words)
    found = search_hub(settings_of(options), words, options.limit, options.author, options.task)
    if options.json:
        print_json([_found_fields(event) for event in found])
        return 0
    if not found:
        note("no model found: try fewer words, or only one part of the name")
        return 0
    head = (
        *("ID", "DOWNLOADS", "LICENCE", "GATED", "TYPE", "PARAMETERS", "FORMAT", "CAN BE HOSTED"),
    )
    print_table(head, [_found_row(event) for event in found])
    note("the last column is judged by the type alone: `polyhost models inspect ID` looks closely")
    return 0


def _found_fields(event: RegisterEvent) -> dict[str, object]:
    hub: dict[str, object] = msgspec.to_builtins(event.hub)
    return hub | {"verdict": event.verdict, "code": event.code, "reason": event.reason}


def _found_row(event: RegisterEvent) -> tuple[object, ...]:
    hub = event.hub or HubModel()
    return (
        hub.id,
        f"{hub.downloads:,}",
        hub.license or "-",
        hub.gated or "no",
        hub.model_type or "-",
        parameters(hub.num_parameters) or "-",
        hub.method or hub.format or "-",
        event.verdict + (f": {event.code}" if event.code else ""),
    )
