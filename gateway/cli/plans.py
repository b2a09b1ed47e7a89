"""`polyhost plans`: price plans, and which tenant has which.

Discounts are percentages in steps of 0.01, basis points inside. Everything holds from a date on.
"""

import argparse
from dataclasses import asdict
from decimal import Decimal

from gateway.cli.common import (
    add_command,
    add_commands,
    instant,
    note,
    open_registry,
    print_json,
    print_table,
    scaled,
)
from gateway.cli.prices import (
    PRICE_HEADS,
    add_price_options,
    add_start_option,
    price_cells,
    price_of,
)
from gateway.service import prices as service_prices
from gateway.service.prices import PlanView
from registry.errors import InvalidValue

NO_PLAN = "none"


def configure(parser: argparse.ArgumentParser) -> None:
    """The group's commands."""
    commands = add_commands(parser)
    create = add_command(commands, "create", "a new plan", _create)
    create.add_argument("plan")
    create.add_argument("--discount", type=parse_percent, default=0, metavar="PERCENT")
    discount = add_command(commands, "discount", "another discount off list prices", _discount)
    discount.add_argument("plan")
    discount.add_argument("percent", type=parse_percent)
    add_start_option(discount)
    price = add_command(commands, "price", "the plan's own price of a model", _price)
    price.add_argument("plan")
    price.add_argument("model")
    price.add_argument("--end", action="store_true", help="the list price again, with its discount")
    add_price_options(price, required=False)
    assign = add_command(commands, "assign", "give a tenant a plan", _assign)
    assign.add_argument("tenant")
    assign.add_argument("plan", help=f"or {NO_PLAN}")
    assign.add_argument(
        "--discount",
        type=parse_percent,
        default=0,
        metavar="PERCENT",
        help="the tenant's own, off whatever the plan says",
    )
    add_start_option(assign)
    terms = add_command(commands, "terms", "what tenants agreed", _terms, with_json=True)
    terms.add_argument("tenant", nargs="?", help="only this one")
    add_command(commands, "list", "plans with prices and discounts", _list, with_json=True)


def parse_percent(text: str) -> int:
    """Basis points of a percentage."""
    points = scaled(text.removesuffix("%"), 100)
    if points is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage such as 12.5")
    if not 0 <= points <= 10_000 or points != points.to_integral_value():
        raise argparse.ArgumentTypeError(f"{text!r} is not 0 to 100 per cent in steps of 0.01")
    return int(points)


def percent(discount_bp: int) -> str:
    """Basis points as a percentage."""
    return f"{(Decimal(discount_bp) / 100).normalize():f} %"


def _create(options: argparse.Namespace) -> int:
    if options.plan == NO_PLAN:
        raise InvalidValue(f"{NO_PLAN} stands for no plan: `plans assign` could not give it")
    with open_registry(options) as control:
        plan = service_prices.create_plan(control, options.plan, options.discount)
    note(f"{plan.plan}: {percent(plan.discount_bp)} off list prices")
    return 0


def _discount(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        plan = service_prices.set_plan_discount(
            control, options.plan, options.percent, options.valid_from
        )
    start = instant(plan.valid_from)
    note(f"{plan.plan}: {percent(plan.discount_bp)} off list prices from {start} on")
    return 0


def _price(options: argparse.Namespace) -> int:
    given = options.prompt is not None and options.completion is not None
    if given == options.end:
        raise InvalidValue("either --prompt and --completion, or --end")
    price = None if options.end else price_of(options)
    with open_registry(options) as control:
        done = service_prices.set_plan_price(
            control, options.plan, options.model, price, options.valid_from
        )
    note(f"{done.plan}: {done.model} from {instant(done.valid_from)} on")
    return 0


def _assign(options: argparse.Namespace) -> int:
    plan = "" if options.plan == NO_PLAN else options.plan
    with open_registry(options) as control:
        terms = service_prices.set_terms(
            control, options.tenant, plan, options.discount, options.valid_from
        )
    note(f"{options.tenant} has {options.plan} from {instant(terms.valid_from)} on")
    return 0


def _terms(options: argparse.Namespace) -> int:
    with open_registry(options) as control:
        found = service_prices.list_terms(control, options.tenant)
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
    with open_registry(options) as control:
        found = service_prices.list_plans(control)
    if options.json:
        print_json([asdict(plan) for plan in found])
    else:
        blank = ("",) * len(PRICE_HEADS)
        rows = [row for plan in found for row in _rows(plan, blank)]
        print_table(("PLAN", "TENANTS", "FROM (UTC)", "OFF LIST", "MODEL", *PRICE_HEADS), rows)
    return 0


def _rows(plan: PlanView, blank: tuple[str, ...]) -> list[tuple[str, ...]]:
    told = str(plan.num_tenants)
    rows: list[tuple[str, ...]] = [
        (plan.name, told, instant(one.valid_from), percent(one.discount_bp), "", *blank)
        for one in plan.discounts
    ]
    for own in plan.prices:
        cells = ("ended", *blank[1:]) if own.price is None else price_cells(own.price)
        rows.append((plan.name, told, instant(own.valid_from), "", own.model, *cells))
    return rows
