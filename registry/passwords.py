"""Passwords of people: slow salted digests (argon2id), and what may be one.

Unlike API keys (api_keys.py), people's passwords can be guessed, so a digest costs memory and time
on purpose: 64 MiB and some 50 ms by argon2-cffi's defaults (RFC 9106, second choice). Only for
logging in: never on the request path. A digest names its own parameters.
"""

from typing import Final

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from registry.errors import InvalidValue

MIN_LEN: Final = 8
MAX_LEN: Final = 256
# Compared with where there is no such user, so that answers take as long: of a random password.
NOBODY: Final = "$argon2id$v=19$m=65536,t=3,p=4$c29tZXJhbmRvbXNhbHQhIQ$" + "A" * 43


def digest(password: str) -> str:
    """What is stored. Raises InvalidValue."""
    if not MIN_LEN <= len(password) <= MAX_LEN:
        raise InvalidValue(f"a password must have {MIN_LEN} to {MAX_LEN} characters")
    if not _is_text(password):
        raise InvalidValue("a password must be text in UTF-8")
    return PasswordHasher().hash(password)


def verify(stored: str, password: str) -> bool:
    """Is this the password? Takes as long either way."""
    given = password[: MAX_LEN + 1]
    try:  # what cannot be a password takes as long, too
        return PasswordHasher().verify(stored, given if _is_text(given) else "") and _is_text(given)
    except (VerificationError, InvalidHashError):
        return False


def _is_text(password: str) -> bool:
    """Half of a surrogate pair has no bytes."""
    return password.isascii() or not any("\ud800" <= sign <= "\udfff" for sign in password)
