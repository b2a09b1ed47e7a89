"""What is sealed or signed: opened by the same tenant for the same model, and by nobody else."""

import base64

import pytest

from gateway.sealing.master_keys import MasterKey
from gateway.sealing.seals import SEALED, SIGNED, SealBroken, Seals, TenantSeal
from tests.gateway.sealing_kit import MASTER, SEAL

OTHER = MasterKey("ba9876543210", b"o" * 32)
TEXTS = ("", "hm", "a\0b\n日本 😀", "x" * 100_000)


def is_opened(seal: TenantSeal, sealed: str, model: str = "m") -> bool:
    try:
        return bool(seal.open(sealed, model) or True)
    except SealBroken:
        return False


def is_signed(seal: TenantSeal, signature: str, text: str = "hm", model: str = "m") -> bool:
    try:
        seal.check(signature, text, model)
    except SealBroken:
        return False
    return True


@pytest.mark.parametrize("text", TEXTS)
def test_it_comes_back(text: str) -> None:
    sealed = SEAL.seal(text, "m")
    assert SEAL.open(sealed, "m") == text
    assert sealed.startswith(SEALED + MASTER.id)
    assert sealed != SEAL.seal(text, "m"), "the nonce is another"
    assert is_signed(SEAL, SEAL.sign(text, "m"), text)
    assert SEAL.sign(text, "m").startswith(SIGNED + MASTER.id)


def test_nobody_else_opens_it() -> None:
    sealed, signature = SEAL.seal("hm", "m"), SEAL.sign("hm", "m")
    others = (
        Seals(lambda: [MASTER]).of("ten_2"),
        Seals(lambda: [OTHER]).of("ten_1"),
        Seals(lambda: [MasterKey(MASTER.id, OTHER.key)]).of("ten_1"),
    )
    for other in others:
        assert not is_opened(other, sealed)
        assert not is_signed(other, signature)
    assert not is_opened(SEAL, sealed, "other")
    assert not is_signed(SEAL, signature, model="other")
    assert not is_signed(SEAL, signature, "ha")
    assert not is_signed(SEAL, sealed)
    assert not is_opened(SEAL, signature)


def test_every_changed_byte_is_seen() -> None:
    for given, opens in ((SEAL.seal("hm", "m"), is_opened), (SEAL.sign("hm", "m"), is_signed)):
        head, _, spelled = given.rpartition(".")
        data = base64.urlsafe_b64decode(spelled)
        for at in range(len(data)):
            changed = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            assert not opens(SEAL, f"{head}.{base64.urlsafe_b64encode(changed).decode()}")
            assert not opens(SEAL, f"{head}.{base64.urlsafe_b64encode(data[:at]).decode()}")
        for odd in ("", head, head + ".", given + "é", given + "A", given.upper(), given[:-1]):
            assert not opens(SEAL, odd)


def test_a_new_key_seals_and_the_old_one_opens() -> None:
    before = SEAL.seal("hm", "m"), SEAL.sign("hm", "m")
    rotated = Seals(lambda: [OTHER, MASTER]).of("ten_1")
    assert rotated.open(before[0], "m") == "hm"
    assert is_signed(rotated, before[1])
    assert rotated.seal("hm", "m").startswith(SEALED + OTHER.id)
    assert not is_opened(SEAL, rotated.seal("hm", "m"))
    assert is_opened(Seals(lambda: [OTHER]).of("ten_1"), rotated.seal("hm", "m"))
