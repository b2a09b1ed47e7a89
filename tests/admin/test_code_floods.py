"""Codes that nobody gave, sent to the callback by the dozen: the provider is spared, and who is
elsewhere, or signs in by a password, feels nothing."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from admin.operations import sessions, users
from admin.operations import sessions as verbs
from admin.operations.policy.sign_in_guard import (
    ADDRESS,
    BROWSER,
    CODE,
    FIRST_S,
    code_subjects,
    subjects,
)
from admin.operations.sessions import SignInRefused
from admin.web.session import BROWSER_COOKIE
from registry.accounts import user_sessions
from registry.accounts.user_sessions import Failures
from tests.admin.provider import (
    Provider,
    begun,
    callback,
    running_provider,
    running_site_of,
    through,
)
from tests.admin.site import PASSWORD, Site

HERE, ELSEWHERE = "127.0.0.1", "203.0.113.9"


@pytest.fixture
def provider() -> Iterator[Provider]:
    with running_provider() as running:
        yield running


@pytest.fixture
def site(tmp_path: Path, provider: Provider) -> Iterator[Site]:
    with running_site_of(tmp_path, provider) as running_one:
        users.bind(running_one.operator, "ann", "subject-1")
        yield running_one


def failed_at(site: Site, address: str) -> int:
    (found,) = site.read(user_sessions.failures, code_subjects(address))
    return found.num_failed


def fail(site: Site, address: str, num: int) -> None:
    with site.operator.writing() as session:
        for _ in range(num):
            now_at = site.operator.clock()
            user_sessions.count_up(session, code_subjects(address), now_at=now_at, forget_s=3600.0)


def test_a_flood_reaches_the_provider_so_often_and_no_more(site: Site, provider: Provider) -> None:
    """At once, so that none has failed when the next one comes."""
    fail(site, HERE, CODE.free - 5)
    visitors = [begun(site) for _ in range(12)]
    provider.forms.clear()
    with ThreadPoolExecutor(6) as threads:
        answers = list(
            threads.map(
                lambda one: callback(site, one[0], code="guess", state=one[1]["state"]), visitors
            )
        )
    assert len(provider.forms) <= 5
    refused = [answer for answer in answers if answer.status == 429]
    assert len(refused) >= 7
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    assert all("Too many attempts" in answer.text for answer in refused)
    assert failed_at(site, HERE) == CODE.free, "who has to wait makes the wait no longer"


def test_a_known_browser_feels_nothing_of_a_flood_at_its_address(site: Site) -> None:
    known, answer = through(site)
    assert answer.status == 200
    fail(site, HERE, CODE.free + 3)
    assert through(site, visitor=known)[1].status == 200
    guesses = []
    for _ in range(BROWSER.free + 1):
        visitor, asked = begun(site)
        visitor.cookies |= {BROWSER_COOKIE: known.cookies[BROWSER_COOKIE]}
        guesses.append(callback(site, visitor, code="guess", state=asked["state"]).status)
    assert guesses == [400] * BROWSER.free + [429], "its own guesses count"


def test_who_is_elsewhere_or_has_a_password_feels_nothing(site: Site) -> None:
    fail(site, HERE, CODE.free + 3)
    _, answer = through(site)
    assert answer.status == 429
    verbs.take_code_turn(site.operator, ELSEWHERE)
    assert site.visitor().sign_in("ann").url.endswith("/overview"), "by password, from here"
    assert CODE.free == ADDRESS.free, "as many tries as the form gives an address"


def test_failed_passwords_leave_the_providers_way_open(site: Site) -> None:
    guesser = site.visitor()
    answers = [guesser.sign_in("ann", f"guess number {n}").status for n in range(6)]
    assert answers[-1] == 429
    assert through(site)[1].status == 200


def test_the_code_of_who_waited_is_good_afterwards(site: Site, provider: Provider) -> None:
    fail(site, HERE, CODE.free)
    visitor, asked = begun(site)
    code = provider.code(asked)
    assert callback(site, visitor, code=code, state=asked["state"]).status == 429
    with site.operator.writing() as session:
        user_sessions.forget(session, *code_subjects(HERE))
    assert callback(site, visitor, code=code, state=asked["state"]).status == 200


def test_what_counts(site: Site, provider: Provider) -> None:
    """Signing in, and a provider that is away, do not; nor what another site sends a browser to."""
    assert through(site)[1].status == 200
    assert failed_at(site, HERE) == 0
    visitor, asked = begun(site)
    assert callback(site, visitor, code="x", state="y" * 43).status == 400
    assert callback(site, visitor, error="access_denied", state=asked["state"]).status == 400
    assert failed_at(site, HERE) == 0
    visitor, asked = begun(site)
    provider.down = True
    assert callback(site, visitor, code="x", state=asked["state"]).status == 503
    assert failed_at(site, HERE) == 0
    provider.down = False
    visitor, asked = begun(site)
    assert callback(site, visitor, code="x", state=asked["state"]).status == 400
    assert failed_at(site, HERE) == 1
    provider.subject = "of nobody here"
    assert through(site)[1].status == 403
    assert failed_at(site, HERE) == 2


def test_who_signs_in_makes_nobody_at_the_address_wait_anew(site: Site) -> None:
    """An office behind one address, in which somebody has failed often, a wait ago."""
    fail(site, HERE, CODE.free)
    with site.operator.writing() as session:
        for _ in range(ADDRESS.free):
            now_at = site.operator.clock()
            user_sessions.count_up(
                session, subjects("x", HERE)[1:2], now_at=now_at, forget_s=3600.0
            )
    rested = replace(site.operator, clock=lambda: now_at + FIRST_S)
    for _ in range(3):
        verbs.give_back(rested, verbs.take_code_turn(rested, HERE))
        sessions.sign_in(rested, "ann", PASSWORD, HERE, "")
    verbs.take_code_turn(rested, HERE)  # and fails
    with pytest.raises(SignInRefused):
        verbs.take_code_turn(rested, HERE)


def test_who_signs_in_takes_back_no_failure_of_others_beside(site: Site) -> None:
    with site.operator.writing() as session:
        first, second = (
            user_sessions.count_up(session, code_subjects(HERE), now_at=at, forget_s=3600.0)
            for at in (1e9, 1e9 + 5)
        )
        user_sessions.take_back(session, first)
        assert user_sessions.failures(session, code_subjects(HERE)) == [Failures(1, 1e9 + 5)]
        user_sessions.take_back(session, second)
        assert user_sessions.failures(session, code_subjects(HERE)) == [Failures()]


def test_a_network_of_ipv6_is_one(site: Site) -> None:
    fail(site, "2001:db8:1:2::/64", CODE.free)
    with pytest.raises(SignInRefused):
        verbs.take_code_turn(site.operator, "2001:db8:1:2:aaaa::7")
    verbs.take_code_turn(site.operator, "2001:db8:1:3::7")
