"""Which packs make way in the host tier."""

from hypothesis import given
from hypothesis import strategies as st

from engine.packs.policy.host_tier import HeldPack, choose_drops

OLD, NEW, DEAR = (
    HeldPack("old", 100, 0.0, 1),
    HeldPack("new", 100, 0.0, 2),
    HeldPack("dear", 100, 5.0, 0),
)


def test_the_least_worth_goes_and_of_equals_the_longest_unused() -> None:
    held = [NEW, DEAR, OLD]
    assert choose_drops(50, 1.0, held, 50) == []
    assert choose_drops(100, 1.0, held, 0) == ["old"]
    assert choose_drops(150, 1.0, held, 0) == ["old", "new"]
    assert choose_drops(400, 9.0, held, 0) is None


def test_a_pack_stays_out_where_it_is_worth_less_than_what_it_would_push_out() -> None:
    assert choose_drops(100, 4.9, [DEAR], 0) is None
    assert choose_drops(100, 5.0, [DEAR], 0) == ["dear"]
    assert choose_drops(100, 4.9, [DEAR], 100) == []  # where it costs nobody, it comes in
    assert choose_drops(200, 2.4, [DEAR, OLD], 0) is None
    assert choose_drops(200, 2.5, [DEAR, OLD], 0) == ["old", "dear"]


def test_nobody_goes_in_vain() -> None:
    small = HeldPack("small", 10, 0.1, 0)
    large = HeldPack("large", 100, 0.2, 0)
    assert choose_drops(100, 9.0, [small, large], 0) == ["large"]


packs = st.lists(
    st.builds(HeldPack, st.uuids().map(str), st.integers(1, 99), st.floats(0, 9), st.integers()),
    max_size=8,
)


@given(packs, st.integers(1, 300), st.floats(0, 9), st.integers(0, 99))
def test_drops_suffice_and_are_needed(
    held: list[HeldPack], num_bytes: int, worth: float, num_free: int
) -> None:
    drops = choose_drops(num_bytes, worth, held, num_free)
    sizes = {pack.revision: pack.num_bytes for pack in held}
    if drops is not None:
        freed = num_free + sum(sizes[name] for name in drops)
        assert freed >= num_bytes
        assert all(freed - sizes[name] < num_bytes for name in drops)
