"""How long somebody waits before a password, or a provider's code, is looked at, by what failed
before. Pure.

Three counts are kept, because each alone can be got round or turned against others. The strict one
is of a name from an address. An address that tries many names meets the second. A name tried from
many addresses meets the third, which is far away and short: whoever fails in a user's name from one
address locks nobody else out, and who has very many can keep a user trying, ten seconds at a time.
Codes of an identity provider name nobody: they have the second count alone, one of their own, so
that who floods the one way in does not shut the other.

All three can be used up by strangers who share an address with the user (an office, a tunnel, a
proxy). So a browser in which the user has signed in before (registry/accounts/known_browsers.py)
has a count of its own, as strict as that of a name from an address, and none of the others: it can
try that one user's password alone. A count that has rested for FORGET_S begins anew.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

FORGET_S: Final = 3600.0
FIRST_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class Guard:
    """So many failures are free; each beyond doubles the wait, from FIRST_S up to `max_s`."""

    prefix: str
    free: int
    max_s: float


PAIR: Final = Guard("pair", 5, 900.0)
ADDRESS: Final = Guard("address", 30, 900.0)
NAME: Final = Guard("name", 100, 10.0)
GUARDS: Final = (PAIR, ADDRESS, NAME)
CODE: Final = Guard("code", ADDRESS.free, ADDRESS.max_s)
BROWSER: Final = Guard("browser", PAIR.free, PAIR.max_s)
EVERY: Final = (*GUARDS, CODE, BROWSER)


def subjects(name: str, address: str) -> tuple[str, str, str]:
    """What an attempt counts against, in the order of GUARDS."""
    return (
        f"{PAIR.prefix}:{address}:{name}",
        f"{ADDRESS.prefix}:{address}",
        f"{NAME.prefix}:{name}",
    )


def code_subjects(address: str) -> tuple[str]:
    """What a provider's code counts against."""
    return (f"{CODE.prefix}:{address}",)


def browser_subjects(user_id: str, browser_id: str) -> tuple[str]:
    """What an attempt in a browser that is known as the user's counts against."""
    return (f"{BROWSER.prefix}:{user_id}:{browser_id}",)


def parts_of(subject: str) -> tuple[Guard, str, str]:
    """The guard, and the address and the name (of a browser: the user's id) that a subject has,
    "" where it has none."""
    prefix, _, rest = subject.partition(":")
    guard = next(each for each in EVERY if each.prefix == prefix)
    if guard is PAIR:
        network, slash, name = rest.partition("/64:")  # of IPv6, and has colons
        if slash and "." not in network:  # or it was typed as a name at an address of IPv4
            return guard, f"{network}/64", name
        address, _, name = rest.partition(":")
        return guard, address, name
    if guard is BROWSER:
        return guard, "", rest.partition(":")[0]
    return (guard, "", rest) if guard is NAME else (guard, rest, "")


def wait_s(
    failures: Sequence[tuple[int, float]], now_at: float, guards: Sequence[Guard] = GUARDS
) -> float:
    """How long to wait, from (how many failed, when the last did) in the order of the guards."""
    return max(
        (
            _wait(guard, num_failed, now_at - failed_at)
            for guard, (num_failed, failed_at) in zip(guards, failures, strict=True)
        ),
        default=0.0,
    )


def _wait(guard: Guard, num_failed: int, since_s: float) -> float:
    if num_failed < guard.free or since_s >= FORGET_S:
        return 0.0
    doublings = min(num_failed - guard.free, 20)
    return max(0.0, min(guard.max_s, FIRST_S * 2.0**doublings) - max(0.0, since_s))
