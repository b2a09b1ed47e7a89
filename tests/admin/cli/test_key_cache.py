"""What keys say of cached answers, by the command line."""

import argparse

import pytest

from admin.cli.keys import add_cache_options, cache_of, cache_options
from registry.accounts.key_terms import KeyCache

BEFORE = KeyCache("exact", 60.0, 0.02, True)


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_cache_options(parser)
    return parser.parse_args(arguments)


def test_what_is_not_given_stays() -> None:
    assert cache_of(parse(), BEFORE) == BEFORE
    assert set(cache_options(parse())) == {None}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--cache", "shadow"), KeyCache("shadow", 60.0, 0.02, True)),
        (("--cache-max-age", "2h"), KeyCache("exact", 7200.0, 0.02, True)),
        (("--cache-max-age", "server"), KeyCache("exact", None, 0.02, True)),
        (("--false-hit-budget", "0"), KeyCache("exact", 60.0, 0.0, True)),
        (("--false-hit-budget", "server"), KeyCache("exact", 60.0, None, True)),
        (("--cache-sampled", "off"), KeyCache("exact", 60.0, 0.02, False)),
    ],
)
def test_what_is_given_counts(arguments: tuple[str, ...], expected: KeyCache) -> None:
    assert cache_of(parse(*arguments), BEFORE) == expected


@pytest.mark.parametrize("share", ["much", "nan", ""])
def test_shares_that_are_none(share: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--false-hit-budget", share)
    assert "is not a share" in capsys.readouterr().err
