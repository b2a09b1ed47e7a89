"""Stage 1: which header, which key, which models."""

from dataclasses import replace

import msgspec
import pytest

from gateway.auth.auth import authenticate, find_model, visible_models
from gateway.auth.directory import Directory
from gateway.errors import ApiError
from gateway.types import HostedModel
from registry.accounts.api_keys import KeyRecord, generate_plaintext
from registry.accounts.key_terms import parse_networks
from registry.accounts.quotas import Limits
from registry.accounts.tenants import Priority
from tests.gateway.edge_kit import key_record

PLAINTEXT = generate_plaintext()
MODELS = [HostedModel(name, "r", "p", 10, 10, 0) for name in ("a", "b", "org/c")]


def directory(*keys: KeyRecord) -> Directory:
    found = Directory()
    found.replace(1, keys, MODELS)
    return found


def refused(
    headers: dict[str, str], *keys: KeyRecord, now_at: float = 100.0, client: str = ""
) -> ApiError:
    with pytest.raises(ApiError) as caught:
        authenticate(headers, directory(*keys), now_at, client)
    return caught.value


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {PLAINTEXT}"},
        {"authorization": f"BEARER   {PLAINTEXT}  "},
        {"x-api-key": PLAINTEXT},
        {"api-key": PLAINTEXT},
        {"authorization": f"Bearer {PLAINTEXT}", "x-api-key": "another"},
        {"authorization": "Basic abc", "api-key": PLAINTEXT},
    ],
)
def test_keys_are_found(headers: dict[str, str]) -> None:
    limits = Limits(1, 2, 3)
    key = key_record(PLAINTEXT, limits=limits, cache_mode="exact")
    principal = authenticate(headers, directory(key), 100.0, "")
    assert (principal.tenant_id, principal.key_id) == ("ten_1", "key_1")
    assert principal.limits.tokens_per_minute == 2
    assert principal.limits.max_concurrency == 3
    assert principal.cache.mode == "exact"


@pytest.mark.parametrize("priority", ["interactive", "standard", "batch"])
def test_a_tenant_of_class_batch_has_no_other_requests(priority: Priority) -> None:
    key = replace(key_record(PLAINTEXT), tenant_class=priority, batch_weight=0.15)
    principal = authenticate({"api-key": PLAINTEXT}, directory(key), 100.0, "")
    assert (principal.is_batch, principal.batch_weight) == (priority == "batch", 0.15)


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": ""},
        {"authorization": "Bearer "},
        {"authorization": PLAINTEXT},
        {"authorization": f"Bearer {PLAINTEXT[:-1]}"},
        {"authorization": f"Bearer {PLAINTEXT}x"},
        {"authorization": "Bearer \xff\x80"},
        {"x-api-key": "x" * 100_000},
    ],
)
def test_no_key_and_wrong_keys(headers: dict[str, str]) -> None:
    error = refused(headers, key_record(PLAINTEXT))
    assert (error.kind.status, error.kind.code) == (401, "invalid_api_key")
    assert PLAINTEXT not in error.message


def test_the_same_public_id_with_another_secret() -> None:
    public_id = PLAINTEXT.split("-")[2]
    other = generate_plaintext(public_id)
    assert refused({"api-key": other}, key_record(PLAINTEXT)).kind.code == "invalid_api_key"


@pytest.mark.parametrize(
    "change",
    [{"revoked_at": 1.0}, {"expires_at": 100.0}, {"tenant_disabled": True}],
)
def test_keys_that_are_no_longer_good(change: dict[str, object]) -> None:
    key = replace(key_record(PLAINTEXT), **change)  # type: ignore[arg-type]
    assert refused({"api-key": PLAINTEXT}, key).kind.code == "invalid_api_key"


def test_a_key_for_other_things() -> None:
    key = replace(key_record(PLAINTEXT), scopes=frozenset({"admin"}))
    error = refused({"api-key": PLAINTEXT}, key)
    assert (error.kind.status, error.kind.code) == (403, "permission_denied")


def test_a_key_of_a_network() -> None:
    networks = parse_networks(["192.0.2.0/24", "2001:db8::/32"])
    key = replace(key_record(PLAINTEXT), allowed_networks=networks)
    right = {"api-key": PLAINTEXT}
    for client in ("192.0.2.7", "::ffff:192.0.2.7", "2001:db8::1"):
        assert authenticate(right, directory(key), 1.0, client).key_id == "key_1"
    for client in ("192.0.3.7", "", "unix:", "2001:db9::1"):
        error = refused(right, key, client=client)
        assert (error.kind.status, error.kind.code) == (401, "ip_not_authorized")
    # Who has no right key does not learn that there is a list.
    wrong = {"api-key": generate_plaintext(PLAINTEXT.split("-")[2])}
    assert refused(wrong, key, client="192.0.3.7").kind.code == "invalid_api_key"


def test_models_of_a_key() -> None:
    everything = authenticate({"api-key": PLAINTEXT}, directory(key_record(PLAINTEXT)), 1.0, "")
    assert [m.name for m in visible_models(everything, directory())] == ["a", "b", "org/c"]
    some = msgspec.structs.replace(everything, allowed_models=frozenset({"org/c", "gone"}))
    assert [m.name for m in visible_models(some, directory())] == ["org/c"]
    assert find_model(some, directory(), "org/c").name == "org/c"
    for name in ("a", "gone", "never"):
        with pytest.raises(ApiError) as caught:
            find_model(some, directory(), name)
        assert (caught.value.kind.status, caught.value.param) == (404, "model")
