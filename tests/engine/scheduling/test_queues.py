"""Counts of tenants' requests on a worker, and who went lately."""

from collections import Counter

import pytest

from engine.errors import IntegrityError
from engine.protocol import SamplingParams, Submit
from engine.request import Request
from engine.scheduling.queues import MAX_REMEMBERED, RECENT_S, TenantCounts


def request(tenant: str) -> Request:
    return Request.of(Submit("r", 1, tenant, "m", [1], 4, SamplingParams(0.0), []), 0.0)


def test_somebody_who_has_gone_is_remembered_for_a_while_and_nobody_beside_itself() -> None:
    here = TenantCounts()
    here.add("a")
    assert not here.is_shared(0.0)
    here.remove("a", 1.0)
    here.add("a")
    assert not here.is_shared(1.0), "it is the same one"
    here.add("b")
    assert here.is_shared(1.0)
    here.remove("b", 2.0)
    assert here.is_shared(2.0 + RECENT_S)
    assert not here.is_shared(2.1 + RECENT_S)


def test_only_who_has_a_small_share_may_start_beyond_the_rows() -> None:
    here = TenantCounts()
    for _ in range(3):
        here.add("heavy")
    here.add("lone")
    assert here.may_take_over(request("lone"))
    assert not here.may_take_over(request("heavy"))
    here.add("lone")
    assert not here.may_take_over(request("lone"))
    started = request("lone")
    started.token_ids.append(1)
    assert not here.is_light_start(started)


def test_what_is_remembered_is_bounded_and_the_books_are_checked() -> None:
    here = TenantCounts()
    for number in range(2 * MAX_REMEMBERED):
        here.add(str(number))
        here.remove(str(number), float(number))
    assert len(here._left_s) == MAX_REMEMBERED
    here.check_integrity(Counter())
    with pytest.raises(IntegrityError):
        here.check_integrity(Counter(["a"]))
