"""What all registry tables share: declarative base, constraint names, column types, ids, values.

Here lives nothing about any one table. Column types are those that SQLite and PostgreSQL both
have: money is BigInteger nano-units, instants are Double epoch seconds (UTC), ids are short
strings. Names of constraints are fixed, because a migration can only drop what has a name.
"""

import base64
import secrets
from dataclasses import fields
from typing import Annotated, Any, TypeAlias, TypeVar

from sqlalchemy import BigInteger, Double, Integer, MetaData, String
from sqlalchemy.orm import DeclarativeBase, mapped_column

NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}

MAX_NAME_LEN = 128
LATEST_AT = 253_402_300_799.0
"""The end of the year 9999: what is later cannot be written as a date."""
JsonObject: TypeAlias = dict[str, Any]
K = TypeVar("K")


class Base(DeclarativeBase):
    """Every table of the registry; `Base.metadata` is what the migrations must produce."""

    metadata = MetaData(naming_convention=NAMING)


Id = Annotated[str, mapped_column(String(64))]
Name = Annotated[str, mapped_column(String(MAX_NAME_LEN))]
Instant = Annotated[float, mapped_column(Double)]
OptionalInstant = Annotated[float | None, mapped_column(Double)]
Count = Annotated[int, mapped_column(BigInteger)]
Nanos = Annotated[int, mapped_column(BigInteger)]
# SQLite numbers rows by itself only where the key's type is exactly INTEGER.
Serial = Annotated[
    int, mapped_column(BigInteger().with_variant(Integer, "sqlite"), autoincrement=True)
]


def random_token(num_bytes: int) -> str:
    """Lower-case base32 of fresh random bytes: 5 bytes become 8 characters of [a-z2-7]."""
    return base32(secrets.token_bytes(num_bytes))


def base32(data: bytes) -> str:
    """Lower-case base32 without padding."""
    return base64.b32encode(data).decode().rstrip("=").lower()


def new_id(prefix: str) -> str:
    """An id such as `ten_k3v...`: 80 random bits, safe in URLs and file names."""
    return f"{prefix}_{random_token(10)}"


def record_of(kind: type[K], row: object, **others: Any) -> K:
    """A value of the dataclass `kind`: each field is one of `others` or the row's of that name."""
    names = (field.name for field in fields(kind))  # type: ignore[arg-type]
    return kind(**{name: getattr(row, name) for name in names if name not in others}, **others)


def values_of(row: object, *names: str) -> JsonObject:
    """Attributes by their names, as the audit log shows a row."""
    return {name: getattr(row, name) for name in names}
