"""Stage 1: who is calling, and which models they may see.

Comes in: the request's headers and the client's address. Goes out: a `Principal`, or 401
`invalid_api_key`. Keys and models are looked up in the directory, which the registry's poll keeps
fresh, so nothing here waits and a revoked key is refused within one poll. Making and checking
secrets is registry/accounts/api_keys.py's.
"""

import hmac
from collections.abc import Mapping
from typing import cast

from gateway.auth.directory import Directory
from gateway.errors import (
    FORBIDDEN,
    INVALID_API_KEY,
    IP_NOT_AUTHORIZED,
    MODEL_NOT_FOUND,
    ApiError,
)
from gateway.settings.http_settings import OPEN
from gateway.types import CacheMode, CachePolicy, HostedModel, Principal
from registry.accounts import api_keys
from registry.accounts.api_keys import KeyRecord
from registry.accounts.key_terms import INFERENCE, allows, within

_BEARER = "bearer "
# LiteLLM looks for the first four words to tell a wrong key from a wrong request.
_WRONG_KEY = (
    "Incorrect API key provided: it is unknown, expired or revoked. Check the key, or ask the "
    "operator of this server for one"
)
_KEY_HEADERS = ("x-api-key", "api-key")


def authenticate(
    headers: Mapping[str, str],
    directory: Directory,
    now_at: float,
    client: str,
    scope: str = INFERENCE,
) -> Principal:
    """Resolve the key in `Authorization: Bearer`, `x-api-key` or `api-key`.

    `client` is the caller's address. Raises ApiError INVALID_API_KEY where the key is missing,
    unknown, wrong, revoked or expired; of a key that is right, IP_NOT_AUTHORIZED where it is not
    for this address and FORBIDDEN where it is good for other things only.
    """
    plaintext = _key_of(headers)
    if not plaintext:
        raise ApiError(
            INVALID_API_KEY,
            "no API key provided: send it in the Authorization header "
            "(Authorization: Bearer YOUR_KEY)",
        )
    record = directory.find_key(api_keys.public_id_of(plaintext))
    if record is None or not api_keys.verify(record, plaintext, now_at):
        raise ApiError(INVALID_API_KEY, _WRONG_KEY)
    return _allowed(record, client, scope)


def has_key(headers: Mapping[str, str]) -> bool:
    """Whether a key is shown at all."""
    return bool(_key_of(headers))


def authenticate_or_use(
    headers: Mapping[str, str], directory: Directory, now_at: float, client: str, key_id: str
) -> Principal:
    """Resolve the key as `authenticate` does; where none is sent, the one of this id. Raises
    ApiError as that does."""
    if has_key(headers):
        return authenticate(headers, directory, now_at, client)
    record = directory.find_key_by_id(key_id)
    if record is None or not record.usable(now_at):
        message = "no API key provided, and the one for requests without a key cannot be used"
        raise ApiError(INVALID_API_KEY, message)
    return _allowed(record, client, INFERENCE)


def _allowed(record: KeyRecord, client: str, scope: str) -> Principal:
    """Raises ApiError where a key that is right is not for this address, or not for this."""
    if record.allowed_networks is not None and not within(client, record.allowed_networks):
        message = (
            f"this API key is not authorized for the IP address {client or '(unknown)'}: "
            "ask the owner of the key to allow it"
        )
        raise ApiError(IP_NOT_AUTHORIZED, message)
    if not allows(record.scopes, scope):
        message = f"this API key does not have the scope {scope!r}: use a key that has it"
        raise ApiError(FORBIDDEN, message)
    return _principal(record)


def check_metrics_token(headers: Mapping[str, str], token: str) -> None:
    """Whether the caller may read /metrics, by the setting `metrics_token`. Raises ApiError
    FORBIDDEN where no token is set, INVALID_API_KEY where another or none was sent."""
    if token == OPEN:
        return
    if not token:
        message = (
            "metrics are closed: set metrics_token (POLYHOST_METRICS_TOKEN), restart the server "
            "and send that token in the Authorization header (Authorization: Bearer TOKEN)"
        )
        raise ApiError(FORBIDDEN, message)
    if not hmac.compare_digest(_bearer_of(headers).encode(), token.encode()):
        message = "metrics need the server's metrics_token: send it in the Authorization header"
        raise ApiError(INVALID_API_KEY, message)


def principal_of_key(directory: Directory, key_id: str, now_at: float) -> Principal | None:
    """Who a usable key stands for, for an operator who may ask in its place; None: it is not, or
    no longer."""
    record = directory.find_key_by_id(key_id)
    if record is None or not record.usable(now_at) or INFERENCE not in record.scopes:
        return None
    return _principal(record)


def visible_models(principal: Principal, directory: Directory) -> list[HostedModel]:
    """The models this caller may use, in the catalog's order."""
    return [model for model in directory.models() if _may_use(principal, model.name)]


def find_model(principal: Principal, directory: Directory, name: str) -> HostedModel:
    """Raises ApiError MODEL_NOT_FOUND, in the same words for no such model and none for you."""
    model = directory.find_model(name) if _may_use(principal, name) else None
    if model is None:
        raise ApiError(
            MODEL_NOT_FOUND,
            f"the model {name!r} does not exist or you do not have access to it: "
            "GET /v1/models lists the models you can use",
            "model",
        )
    return model


def _may_use(principal: Principal, name: str) -> bool:
    return principal.allowed_models is None or name in principal.allowed_models


def _bearer_of(headers: Mapping[str, str]) -> str:
    authorization = headers.get("authorization", "")
    is_bearer = authorization[: len(_BEARER)].lower() == _BEARER
    return authorization[len(_BEARER) :].strip() if is_bearer else ""


def _key_of(headers: Mapping[str, str]) -> str:
    return _bearer_of(headers) or next(
        (headers[name].strip() for name in _KEY_HEADERS if headers.get(name)), ""
    )


def _principal(record: KeyRecord) -> Principal:
    return Principal(
        tenant_id=record.tenant_id,
        key_id=record.id,
        scopes=record.scopes,
        limits=record.limits,
        tenant_limits=record.tenant_limits,
        weight=record.tenant_weight,
        batch_weight=record.batch_weight,
        is_batch=record.tenant_class == "batch",
        cache=CachePolicy(
            cast(CacheMode, record.cache.mode),
            record.cache.max_age_s,
            record.cache.false_hit_budget,
            record.cache.sampled,
        ),
        allowed_models=record.allowed_models,
        response_retention_days=record.response_retention_days,
    )
