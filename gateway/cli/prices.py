"""`polyhost prices set|show`: per million tokens on the command line, nano-units per token inside.

One unit of currency per million tokens is 1000 nano-units per token, so a price has steps of
0.001 per million; finer ones are refused rather than rounded. Prices of seconds have steps of a
nano-unit.
"""

import argparse
from dataclasses import asdict

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    open_registry,
    parse_instant,
    parse_units,
    per_million,
    print_json,
    print_table,
    scaled,
    units,
)
from gateway.service import prices as service_prices
from registry.prices import PriceRecord

PRICE_HEADS = (
    "PROMPT /M",
    "CACHED /M",
    "COMPLETION /M",
    "EMBEDDING /M",
    "SERVICE /s",
    "LOAD /s",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(commands, "set", "price a model from a date on", _set, with_json=True)
    change.add_argument("model")
    add_price_options(change, required=True)
    show = add_command(commands, "show", "prices past, present and future", _show, with_json=True)
    show.add_argument("model", nargs="?", help="only this model's")


def add_price_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The options that make a price, and its date."""
    parser.add_argument(
        "--prompt",
        type=parse_price,
        required=required,
        metavar="P",
        help="per million prompt tokens",
    )
    parser.add_argument(
        "--completion",
        type=parse_price,
        required=required,
        metavar="P",
        help="per million generated tokens",
    )
    parser.add_argument(
        "--cached",
        type=parse_price,
        metavar="P",
        help="per million tokens found in a cache (the price of prompt tokens)",
    )
    parser.add_argument(
        "--embedding",
        type=parse_price,
        metavar="P",
        help="per million tokens of an encoder's input (the price of prompt tokens)",
    )
    parser.add_argument(
        "--service-second", type=parse_units, default=0, metavar="P", help="per second of service"
    )
    parser.add_argument(
        "--load-second", type=parse_units, default=0, metavar="P", help="per second of loading"
    )
    add_start_option(parser)


def add_start_option(parser: argparse.ArgumentParser) -> None:
    """When it begins to hold."""
    parser.add_argument(
        "--from",
        dest="valid_from",
        type=parse_instant,
        metavar="DATE",
        help="ISO, UTC (as soon as every gateway knows of it)",
    )


def price_of(options: argparse.Namespace) -> PriceRecord:
    """The price that the options of `add_price_options` make."""
    return PriceRecord(
        model=options.model,
        valid_from=0.0,
        prompt_nanos=options.prompt,
        cached_nanos=options.prompt if options.cached is None else options.cached,
        completion_nanos=options.completion,
        embedding_nanos=options.prompt if options.embedding is None else options.embedding,
        service_second_nanos=options.service_second,
        load_second_nanos=options.load_second,
    )


def parse_price(text: str) -> int:
    """Units per million tokens as nano-units per token."""
    nanos = scaled(text, 1000)
    if nanos is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a price such as 0.15")
    if nanos < 0 or nanos != nanos.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a price: 0 or more per million tokens, in steps of 0.001"
        )
    return int(nanos)


def price_cells(price: PriceRecord) -> tuple[str, ...]:
    """Under PRICE_HEADS."""
    tokens = (
        price.prompt_nanos,
        price.cached_nanos,
        price.completion_nanos,
        price.embedding_nanos,
    )
    seconds = (price.service_second_nanos, price.load_second_nanos)
    shown = [units(nanos).rstrip("0").rstrip(".") for nanos in seconds]
    return (*(per_million(nanos) for nanos in tokens), *shown)


def _set(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        price = service_prices.set_price(control, price_of(options), options.valid_from)
    return _print(options, [price])


def _show(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_prices.list_prices(control, options.model)
    return _print(options, found)


def _print(options: argparse.Namespace, found: list[PriceRecord]) -> int:
    if options.json:
        print_json([asdict(price) for price in found])
    else:
        rows = [(price.model, instant(price.valid_from), *price_cells(price)) for price in found]
        print_table(("MODEL", "FROM (UTC)", *PRICE_HEADS), rows)
    return 0
