"""`polyhost prices set|show`, and `polyhost plans`: price plans and the tenants that have them.

Prices are per million tokens on the command line, nano-units per token inside. One unit of currency
per million tokens is 1000 nano-units per token, so a price has steps of 0.001 per million; finer
ones are refused rather than rounded. Prices of seconds have steps of a nano-unit. Discounts are
percentages in steps of 0.01, basis points inside. Every change is valid from a date on.
"""

import argparse
from dataclasses import asdict
from decimal import Decimal

from admin.cli.common import (
    add_command,
    add_commands,
    add_date_option,
    call,
    instant,
    note,
    parse_units,
    per_million,
    print_json,
    print_table,
    scaled,
    show_rows,
    units,
)
from admin.operations import prices
from admin.operations.prices import PlanView
from registry.errors import InvalidValue
from registry.money.prices import PriceRecord

PRICE_HEADS = (
    "PROMPT /M",
    "CACHED /M",
    "COMPLETION /M",
    "EMBEDDING /M",
    "SERVICE /s",
    "LOAD /s",
)
NO_PLAN = "none"


def configure_prices(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    change = add_command(
        commands, "set", "set a model's list price from a date on", _set, with_json=True
    )
    change.add_argument("model", help="name of the model")
    add_price_options(change, required=True)
    gone = add_command(commands, "withdraw", "take back a scheduled price", _withdraw)
    gone.add_argument("model", help="name of the model")
    add_date_option(gone, "--from", "valid_from", "the date it would start on (UTC)", required=True)
    show = add_command(
        commands, "show", "show past, current and future prices", _show, with_json=True
    )
    show.add_argument("model", nargs="?", help="only prices of this model")


def add_price_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """The options that make a price, and its date."""
    parser.add_argument(
        "--prompt",
        type=parse_price,
        required=required,
        metavar="P",
        help="price per million prompt tokens",
    )
    parser.add_argument(
        "--completion",
        type=parse_price,
        required=required,
        metavar="P",
        help="price per million generated tokens",
    )
    parser.add_argument(
        "--cached",
        type=parse_price,
        metavar="P",
        help="price per million cached prompt tokens (default: the price of prompt tokens)",
    )
    parser.add_argument(
        "--embedding",
        type=parse_price,
        metavar="P",
        help="price per million input tokens of an encoder (default: the price of prompt tokens)",
    )
    parser.add_argument(
        "--service-second",
        type=parse_units,
        default=0,
        metavar="P",
        help="price per second of service (default: 0)",
    )
    parser.add_argument(
        "--load-second",
        type=parse_units,
        default=0,
        metavar="P",
        help="price per second of loading (default: 0)",
    )
    add_start_option(parser)


def add_start_option(parser: argparse.ArgumentParser) -> None:
    """The option for when a price becomes valid."""
    add_date_option(
        parser,
        "--from",
        "valid_from",
        "valid from this ISO date or time on, UTC (default: now, in about two seconds)",
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
            f"{text!r} is not a price per million tokens: use 0 or more, in steps of 0.001"
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
    price = call(options, prices.set_price, price_of(options), options.valid_from)
    return _print(options, [price])


def _withdraw(options: argparse.Namespace) -> int:
    gone = call(options, prices.withdraw_price, options.model, options.valid_from)
    note(f"withdrew the price of {gone.model} from {instant(gone.valid_from)} UTC on")
    return 0


def _show(options: argparse.Namespace) -> int:
    found = call(options, prices.list_prices, options.model)
    return _print(options, found)


def _print(options: argparse.Namespace, found: list[PriceRecord]) -> int:
    return show_rows(
        options,
        found,
        asdict,
        ("MODEL", "FROM (UTC)", *PRICE_HEADS),
        lambda price: (price.model, instant(price.valid_from), *price_cells(price)),
    )


def configure_plans(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(commands, "create", "create a plan", _create)
    create.add_argument("plan", help="name of the plan")
    create.add_argument(
        "--discount", type=parse_percent, default=0, metavar="PERCENT", help="off list prices"
    )
    discount = add_command(
        commands, "discount", "change a plan's discount off list prices", _discount
    )
    discount.add_argument("plan", help="name of the plan")
    discount.add_argument("percent", type=parse_percent, help="off list prices, such as 12.5")
    add_start_option(discount)
    price = add_command(commands, "price", "set a plan's own price for a model", _price)
    price.add_argument("plan", help="name of the plan")
    price.add_argument("model", help="name of the model")
    price.add_argument(
        "--end",
        action="store_true",
        help="end the plan's own price; the discounted list price applies again",
    )
    add_price_options(price, required=False)
    assign = add_command(commands, "assign", "give a tenant a plan", _assign)
    assign.add_argument("tenant", help="name or id of the tenant")
    assign.add_argument("plan", help=f"name of the plan, or {NO_PLAN}")
    assign.add_argument(
        "--discount",
        type=parse_percent,
        default=0,
        metavar="PERCENT",
        help="extra discount of this tenant, off the plan's prices",
    )
    add_start_option(assign)
    gone = add_command(
        commands, "withdraw", "take back a plan's scheduled discount or price", _withdraw_entry
    )
    gone.add_argument("plan", help="name of the plan")
    gone.add_argument("model", nargs="?", default="", help="its own price of this model")
    add_date_option(gone, "--from", "valid_from", "the date it would start on (UTC)", required=True)
    stay = add_command(commands, "unassign", "take back a tenant's scheduled plan", _withdraw_terms)
    stay.add_argument("tenant", help="name or id of the tenant")
    add_date_option(stay, "--from", "valid_from", "the date it would start on (UTC)", required=True)
    terms = add_command(
        commands, "terms", "list the plans and discounts of tenants", _terms, with_json=True
    )
    terms.add_argument("tenant", nargs="?", help="only this tenant")
    add_command(
        commands, "list", "list plans with their discounts and prices", _list, with_json=True
    )


def parse_percent(text: str) -> int:
    """Basis points of a percentage."""
    points = scaled(text.removesuffix("%"), 100)
    if points is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 12.5")
    if not 0 <= points <= 10_000 or points != points.to_integral_value():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a percentage from 0 to 100 in steps of 0.01"
        )
    return int(points)


def percent(discount_bp: int) -> str:
    """Basis points as a percentage."""
    return f"{(Decimal(discount_bp) / 100).normalize():f} %"


def _create(options: argparse.Namespace) -> int:
    if options.plan == NO_PLAN:
        raise InvalidValue(
            f"a plan cannot be called {NO_PLAN}, which means no plan: choose another name"
        )
    plan = call(options, prices.create_plan, options.plan, options.discount)
    note(f"{plan.plan}: {percent(plan.discount_bp)} off list prices")
    return 0


def _discount(options: argparse.Namespace) -> int:
    plan = call(
        options, prices.set_plan_discount, options.plan, options.percent, options.valid_from
    )
    start = instant(plan.valid_from)
    note(f"{plan.plan}: {percent(plan.discount_bp)} off list prices from {start} UTC on")
    return 0


def _price(options: argparse.Namespace) -> int:
    given = options.prompt is not None and options.completion is not None
    if given == options.end:
        raise InvalidValue("give either --prompt and --completion, or --end")
    price = None if options.end else price_of(options)
    done = call(
        options, prices.set_plan_price, options.plan, options.model, price, options.valid_from
    )
    what = "list price" if price is None else "own price"
    note(f"{done.plan}: {what} of {done.model} from {instant(done.valid_from)} UTC on")
    return 0


def _assign(options: argparse.Namespace) -> int:
    plan = "" if options.plan == NO_PLAN else options.plan
    terms = call(
        options, prices.set_terms, options.tenant, plan, options.discount, options.valid_from
    )
    note(f"{options.tenant}: plan {options.plan} from {instant(terms.valid_from)} UTC on")
    return 0


def _withdraw_entry(options: argparse.Namespace) -> int:
    call(options, prices.withdraw_plan_entry, options.plan, options.model, options.valid_from)
    what = f"price of {options.model}" if options.model else "discount"
    note(f"{options.plan}: withdrew the {what} from {instant(options.valid_from)} UTC on")
    return 0


def _withdraw_terms(options: argparse.Namespace) -> int:
    call(options, prices.withdraw_terms, options.tenant, options.valid_from)
    note(f"{options.tenant}: withdrew the plan from {instant(options.valid_from)} UTC on")
    return 0


def _terms(options: argparse.Namespace) -> int:
    found = call(options, prices.list_terms, options.tenant)
    if options.json:
        print_json([{"tenant": name, **asdict(terms)} for name, terms in found])
    else:
        rows = [
            (name, instant(one.valid_from), one.plan or NO_PLAN, percent(one.discount_bp))
            for name, one in found
        ]
        print_table(("TENANT", "FROM (UTC)", "PLAN", "OWN DISCOUNT"), rows)
    return 0


def _list(options: argparse.Namespace) -> int:
    found = call(options, prices.list_plans)
    if options.json:
        print_json([asdict(plan) for plan in found])
    else:
        blank = ("",) * len(PRICE_HEADS)
        rows = [row for plan in found for row in _rows(plan, blank)]
        print_table(("PLAN", "TENANTS", "FROM (UTC)", "OFF LIST", "MODEL", *PRICE_HEADS), rows)
    return 0


def _rows(plan: PlanView, blank: tuple[str, ...]) -> list[tuple[str, ...]]:
    num_tenants = str(plan.num_tenants)
    rows: list[tuple[str, ...]] = [
        (plan.name, num_tenants, instant(one.valid_from), percent(one.discount_bp), "", *blank)
        for one in plan.discounts
    ]
    for own in plan.prices:
        cells = ("ended", *blank[1:]) if own.price is None else price_cells(own.price)
        rows.append((plan.name, num_tenants, instant(own.valid_from), "", own.model, *cells))
    return rows
