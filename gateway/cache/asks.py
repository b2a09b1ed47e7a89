"""What a request's headers say about the cache.

    x-polyhost-cache-mode     off, exact, semantic, shadow
    x-polyhost-cache-sampled  true: also where answers are drawn without a seed; false: not
    cache-control             max-age=N, no-cache (do not answer from it), no-store (do not keep
                              the answer, nor answer from it); others are not ours to obey

Comes in: headers by their names in lower case. Goes out: a CacheWish, or an ApiError.
"""

from collections.abc import Mapping
from typing import cast, get_args

from gateway.errors import INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError
from gateway.policy.cache_rule import CacheMode, CacheWish

MODE_HEADER = "x-polyhost-cache-mode"
SAMPLED_HEADER = "x-polyhost-cache-sampled"
CONTROL_HEADER = "cache-control"
RESULT_HEADER = "x-polyhost-cache"
ENTRY_HEADER = "x-polyhost-cache-entry"

MODES: tuple[str, ...] = get_args(CacheMode)
NO_WISH = CacheWish()
_SAMPLED = {"true": True, "false": False}
_MAX_CONTROL_CHARS = 256
_MAX_AGE_DIGITS = 12


def wish_of(headers: Mapping[str, str], has_embedder: bool) -> CacheWish:
    """Raises ApiError for a mode that is not served, or a value that is none."""
    mode, control = headers.get(MODE_HEADER), headers.get(CONTROL_HEADER)
    sampled = headers.get(SAMPLED_HEADER)
    if mode is control is sampled is None:
        return NO_WISH
    if mode is not None:
        _check_mode(mode, has_embedder)
    if sampled is not None and sampled not in _SAMPLED:
        message = f"{SAMPLED_HEADER} must be true or false, not {sampled!r}"
        raise ApiError(INVALID_REQUEST, message, SAMPLED_HEADER)
    max_age_s, reads, keeps = _control(control or "")
    return CacheWish(
        cast(CacheMode | None, mode),
        max_age_s,
        None if sampled is None else _SAMPLED[sampled],
        reads,
        keeps,
    )


def no_embedder(what: str) -> str:
    """How to set up what semantic and shadow mode need, in one sentence."""
    return (
        f"{what} needs an embedding model, and this server has none: register one with "
        "`polyhost models add NAME --source DIR` and start the server with cache_embedder = "
        '"NAME" (POLYHOST_CACHE_EMBEDDER=NAME); off and exact work without'
    )


def _check_mode(mode: str, has_embedder: bool) -> None:
    if mode not in MODES:
        message = f"{MODE_HEADER} must be one of {', '.join(MODES)}, not {mode!r}"
        raise ApiError(UNSUPPORTED_PARAMETER, message, MODE_HEADER)
    if mode in ("semantic", "shadow") and not has_embedder:
        message = no_embedder(f"{MODE_HEADER}: {mode}")
        raise ApiError(UNSUPPORTED_PARAMETER, message, MODE_HEADER)


def _control(text: str) -> tuple[float | None, bool, bool]:
    """(max-age, may be answered from it, may be kept). Directives of proxies' kinds are passed
    over, and so is a header that is longer than any honest one."""
    max_age_s: float | None = None
    reads = keeps = True
    for directive in text.split(",") if len(text) <= _MAX_CONTROL_CHARS else ():
        name, _, value = directive.strip().lower().partition("=")
        if name == "no-cache":
            reads = False
        elif name == "no-store":
            reads = keeps = False
        elif name == "max-age":
            digits = value.strip('"')
            if not (digits.isascii() and digits.isdigit() and len(digits) <= _MAX_AGE_DIGITS):
                message = f"{CONTROL_HEADER}: max-age must be whole seconds, not {value!r}"
                raise ApiError(INVALID_REQUEST, message, CONTROL_HEADER)
            max_age_s = float(digits)
    return max_age_s, reads, keeps
