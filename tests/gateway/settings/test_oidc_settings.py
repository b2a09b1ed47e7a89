"""What the settings of an identity provider must be, and what the operator is told."""

import pytest

from gateway.settings.config import SettingsError, load_settings

REDIRECT = "https://polyhost.example/admin/oidc/callback"
SOUND = {
    "oidc_issuer": "https://id.example",
    "oidc_client_id": "polyhost",
    "oidc_redirect_url": REDIRECT,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"oidc_issuer": "http://id.example"}, "https"),
        ({"oidc_issuer": "https://id.example/?x"}, "without a query"),
        ({"oidc_issuer": "https://user@id.example"}, "oidc_issuer"),
        ({"oidc_issuer": "https://id.example:x"}, "oidc_issuer"),
        ({"oidc_client_id": ""}, "needs oidc_client_id"),
        ({"oidc_redirect_url": ""}, "needs oidc_redirect_url"),
        ({"oidc_redirect_url": "https://x.example/callback"}, "/admin/oidc/callback"),
        ({"oidc_algorithms": "none"}, "'none' is not supported"),
        ({"oidc_algorithms": "RS256,HS256"}, "'HS256' is not supported"),
        ({"oidc_algorithms": ""}, "oidc_algorithms"),
        ({"oidc_scopes": "email"}, "openid"),
        ({"oidc_roles": "x=king"}, "GROUP=ROLE"),
        ({"oidc_roles": "x=admin"}, "set both or neither"),
        ({"oidc_role_claim": "groups"}, "set both or neither"),
        ({"oidc_create_users": True}, "needs oidc_role_claim"),
        ({"oidc_issuer": "", "password_users": "root"}, "password_users needs oidc_issuer"),
    ],
)
def test_settings_say_what_is_missing(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        load_settings(overrides={**SOUND, **changes}, environ={})
    assert load_settings(overrides=SOUND, environ={}).oidc_issuer == "https://id.example"
