"""What settings are made of: bounds of their types, and descriptions."""

import msgspec

MIB = 1 << 20

Count = msgspec.Meta(ge=1)
CountOrZero = msgspec.Meta(ge=0)
Seconds = msgspec.Meta(gt=0.0)


def doc(text: str) -> msgspec.Meta:
    """What a setting does, for settings_reference()."""
    return msgspec.Meta(description=text)
