"""`polyhost prices set|show`: per million tokens on the command line, nano-units per token inside.

One unit of currency per million tokens is 1000 nano-units per token, so a price has steps of
0.001 per million; finer ones are refused rather than rounded.
"""

import argparse
from dataclasses import asdict
from decimal import Decimal, InvalidOperation

from gateway import service
from gateway.cli_common import (
    add_command,
    add_commands,
    instant,
    open_registry,
    parse_instant,
    per_million,
    print_json,
    print_table,
)
from registry.prices import PriceRecord


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(commands, "set", "price a model from a date on", _set, with_json=True)
    change.add_argument("model")
    change.add_argument(
        "--prompt", type=parse_price, required=True, metavar="P", help="per million prompt tokens"
    )
    change.add_argument(
        "--completion",
        type=parse_price,
        required=True,
        metavar="P",
        help="per million generated tokens",
    )
    change.add_argument(
        "--cached",
        type=parse_price,
        metavar="P",
        help="per million prompt tokens found in a cache (the price of prompt tokens)",
    )
    change.add_argument(
        "--from", dest="valid_from", type=parse_instant, metavar="DATE", help="ISO, UTC (now)"
    )
    show = add_command(commands, "show", "prices past, present and future", _show, with_json=True)
    show.add_argument("model", nargs="?", help="only this model's")


def parse_price(text: str) -> int:
    """Units per million tokens as nano-units per token."""
    try:
        nanos = Decimal(text) * 1000
    except InvalidOperation as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price such as 0.15") from error
    if not nanos.is_finite() or nanos < 0 or nanos != nanos.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a price: 0 or more per million tokens, in steps of 0.001"
        )
    return int(nanos)


def _set(options: argparse.Namespace) -> int:
    cached = options.prompt if options.cached is None else options.cached
    with open_registry(options) as control:
        price = service.set_price(
            control, options.model, options.prompt, cached, options.completion, options.valid_from
        )
    return _print(options, [price])


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service.list_prices(control, options.model)
    return _print(options, found)


def _print(options: argparse.Namespace, found: list[PriceRecord]) -> int:
    if options.json:
        print_json([asdict(price) for price in found])
    else:
        print_table(
            ("MODEL", "FROM (UTC)", "PROMPT /M", "CACHED /M", "COMPLETION /M"),
            [
                (
                    price.model,
                    instant(price.valid_from),
                    per_million(price.prompt_nanos),
                    per_million(price.cached_nanos),
                    per_million(price.completion_nanos),
                )
                for price in found
            ],
        )
    return 0
