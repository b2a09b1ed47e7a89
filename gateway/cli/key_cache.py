"""What `polyhost keys create` and `set` say of a key's cached answers: the options and how they are
read."""

import argparse
import math
from dataclasses import replace

from gateway.cli.common import parse_duration
from registry.key_cache import CACHE_MODES, KeyCache

SERVERS = "server"
"""In place of a figure: the server's own."""


def add_cache_options(parser: argparse.ArgumentParser) -> None:
    """--cache, --cache-max-age, --false-hit-budget, --cache-sampled."""
    parser.add_argument("--cache", choices=CACHE_MODES, help="answer cache (off)")
    parser.add_argument(
        "--cache-max-age",
        type=_age,
        metavar=f"TIME|{SERVERS}",
        help="how old a cached answer may be (as old as the server keeps them)",
    )
    parser.add_argument(
        "--false-hit-budget",
        type=_share,
        metavar=f"SHARE|{SERVERS}",
        help="share of the answers from the cache that may be wrong, such as 0.01",
    )
    parser.add_argument(
        "--cache-sampled",
        choices=("on", "off"),
        help="also above temperature 0 without a seed (off)",
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
        raise argparse.ArgumentTypeError(f"{text!r} is no share: 0.01 is one in a hundred")
    return share
