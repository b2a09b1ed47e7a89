"""Headers of every answer: what a browser may do with a page, and for how long it may keep it.

The policy lets a page load style, scripts and pictures from this server alone, send forms and open
streams to it alone, and be shown in nobody's frame. There are no inline styles or scripts.
"""

from typing import Final, TypeAlias

HeaderRows: TypeAlias = tuple[tuple[str, str], ...]

POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
COMMON: Final[HeaderRows] = (
    ("content-security-policy", POLICY),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    # Not `no-referrer`: a form's Origin would be null.
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("permissions-policy", "camera=(), geolocation=(), microphone=(), payment=()"),
)
FOR_PAGES: Final[HeaderRows] = (("cache-control", "no-store"),)
FOR_EVER: Final[HeaderRows] = (
    ("cache-control", "public, max-age=31536000, immutable"),
    ("vary", "accept-encoding"),
)
