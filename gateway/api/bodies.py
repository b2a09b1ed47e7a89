"""A request's body read into a struct, and what is said of one that cannot be. Part of stage 2.

Comes in: bytes and a decoder. Goes out: the struct, or an ApiError that names the field. Which
fields there are is wire_body.py's, encode_wire.py's and the dialects'.
"""

import re
from typing import TypeVar

import msgspec

from gateway.errors import INVALID_REQUEST, UNSUPPORTED_PARAMETER, ApiError

_T = TypeVar("_T")
_BOM = b"\xef\xbb\xbf"
_AT = re.compile(r" - at `\$\.?(.*)`$")
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)


def unsupported(param: str, wanted: str = "") -> ApiError:
    """The answer to a field this server does not serve."""
    return ApiError(UNSUPPORTED_PARAMETER, f"{param}{wanted} is not supported: remove it", param)


def invalid(param: str, message: str) -> ApiError:
    """The answer to a field that cannot be what it is."""
    return ApiError(INVALID_REQUEST, message, param)


def decode_body(decoder: "msgspec.json.Decoder[_T]", body: bytes, param: str = "") -> _T:
    """The body, or the field of it that is called `param`. Raises ApiError."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), param) from error
    except UnicodeDecodeError as error:
        raise ApiError(INVALID_REQUEST, "the request body is not valid UTF-8") from error
    except RecursionError as error:
        raise ApiError(INVALID_REQUEST, "the request body is nested too deeply") from error
    except msgspec.DecodeError as error:
        # Some clients put it there, and it is no part of the text.
        if body.startswith(_BOM) and not body.startswith(_BOM, len(_BOM)):
            return decode_body(decoder, body.removeprefix(_BOM), param)
        raise ApiError(INVALID_REQUEST, f"the request body is not valid JSON: {error}") from error


def _field_error(text: str, whole: str = "") -> ApiError:
    """msgspec says where: "... - at `$.messages[0].content`". `whole`: the field that was read."""
    at = _AT.search(text)
    param = whole + (at.group(1) if at else "")
    what = text[: at.start()] if at else text
    found = _FIELD.match(what)
    if found is None:
        return ApiError(INVALID_REQUEST, f"{param or 'request body'}: {what}", param or None)
    param = f"{param}.{found.group(2)}" if param else found.group(2)
    if found.group(1) == "missing required":
        return invalid(param, f"{param} is required")
    return unsupported(param)
