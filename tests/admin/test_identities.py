"""Whom an identity provider's subject is here: bindings, addresses, roles, passwords beside it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from admin.context.operator_context import acting_as
from admin.oidc.policy.identity import Identity
from admin.operations import sessions as verbs
from admin.operations import users as user_verbs
from admin.operations.sessions import SignInRefused
from registry import audit
from registry.accounts import identities, tenants, users
from registry.errors import AlreadyExists, Forbidden
from tests.admin.provider import (
    START,
    Provider,
    running_provider,
    running_site_of,
    through,
)
from tests.admin.site import PASSWORD, Site, running_site


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[Site]:
    with running_site_of(tmp_path_factory.mktemp("site"), provider) as running_one:
        user_verbs.bind(running_one.operator, "ann", "subject-1")
        yield running_one


@pytest.fixture(autouse=True)
def _sound(provider: Provider) -> Iterator[None]:
    yield
    provider.behave()


def test_who_is_bound_and_who_binds(site: Site, provider: Provider) -> None:
    site.add_user("bea", "viewer")
    provider.subject = "subject-of-bea"
    _, refused = through(site)
    assert refused.status == 403
    assert "polyhost users bind NAME subject-of-bea" in refused.text
    ann, bea = site.visitor("ann"), site.visitor("bea")
    for subject in ("", " ", "x" * 300, "subject-1"):
        assert ann.post("/user/bind/bea", {"subject": subject}).status == 422, subject
    assert bea.post("/user/bind/bea", {"subject": "mine"}).status == 403
    assert bea.post("/user/unbind/ann", {"issuer": provider.issuer}).status == 403
    assert (
        "with the identity provider"
        in ann.post("/user/bind/bea", {"subject": "subject-of-bea"}).text
    )
    assert "subject-of-bea" in ann.get("/users/bea").text
    visitor, answer = through(site)
    assert answer.status == 200
    assert "bea" in visitor.get("/account").text
    assert "was unbound" in ann.post("/user/unbind/bea", {"issuer": provider.issuer}).text
    assert "sign-in" in visitor.get("/account").url, "sessions end"
    assert through(site)[1].status == 403
    told = site.read(audit.page, audit.AuditFilter(action="user"), limit=2)
    assert [entry.action for entry in told] == ["user.unbind", "user.bind"]


def test_who_is_shut_out_stays_out(site: Site, provider: Provider) -> None:
    site.add_user("eve", "viewer")
    provider.subject = "subject-of-eve"
    user_verbs.bind(site.operator, "eve", "subject-of-eve")
    visitor, answer = through(site)
    assert answer.status == 200
    site.write(users.set_disabled, "eve", True, now_at=site.operator.clock())
    assert "sign-in" in visitor.get("/account").url
    assert through(site)[1].status == 403


def test_one_subject_one_user(site: Site) -> None:
    site.add_user("ned", "viewer")
    with pytest.raises(AlreadyExists, match="bound to the user 'ann'"):
        user_verbs.bind(site.operator, "ned", "subject-1")
    with pytest.raises(AlreadyExists, match="another subject"):
        user_verbs.bind(site.operator, "ann", "subject-9")
    user_verbs.bind(site.operator, "ned", "subject-1", "https://other.example")
    assert site.read(identities.find_user, "https://third.example", "subject-1") is None
    site.write(users.remove_user, "ned", now_at=site.operator.clock())
    assert site.read(identities.find_user, "https://other.example", "subject-1") is None


def test_by_a_verified_address_where_the_operator_says_so(tmp_path: Path) -> None:
    name = "bob@acme.example"
    with running_provider() as own, running_site_of(tmp_path, own, oidc_link_by_email=True) as site:
        site.add_user(name, "viewer")
        for claims in ({"email": name}, {"email": name, "email_verified": False},
                       {"email": name, "email_verified": "true"},
                       {"email": "x" + name, "email_verified": True}):  # fmt: skip
            own.claims = claims
            assert through(site)[1].status == 403, claims
        own.claims = {"email": "BOB@acme.example", "email_verified": True}
        assert through(site)[1].status == 200
        own.claims = {}
        assert through(site)[1].status == 200, "bound for good"
        own.subject, own.claims = "subject-2", {"email": name, "email_verified": True}
        _, taken = through(site)
        assert taken.status == 403, "an address that was given to somebody else"
        assert "bound to another account" in taken.text


def test_letters_that_become_others_bind_nobody(tmp_path: Path) -> None:
    """The Kelvin sign's small letter is k (compare CVE-2019-19844)."""
    with running_provider() as own, running_site_of(tmp_path, own, oidc_link_by_email=True) as site:
        site.add_user("kim@acme.example", "owner")
        for email in ("\u212aim@acme.example", "kim@", "@acme.example", "kim"):
            own.subject, own.claims = "evil", {"email": email, "email_verified": True}
            assert through(site)[1].status == 403, email
        own.claims = {"email": "KIM@Acme.example", "email_verified": True}
        assert through(site)[1].status == 200


def test_of_rules_for_one_tenant_the_highest_counts(tmp_path: Path) -> None:
    """Also where one says its name and the other its id."""
    with running_site(tmp_path) as site:
        acme = site.write(tenants.create_tenant, "acme", now_at=site.operator.clock())
        rules = f"a=admin@acme,b=viewer@{acme.id},c=owner@gone"
        settings = replace(site.operator.settings, oidc_role_claim="groups", oidc_roles=rules)
        context = replace(site.operator, settings=settings)
        site.add_user("ned", "viewer")
        user_verbs.bind(context, "ned", "s", "https://id.example")
        who = Identity("https://id.example", "s", "", frozenset({"a", "b"}))
        here = "127.0.0.1"
        verbs.sign_in_as(context, who, "state", here, "", verbs.take_code_turn(context, here))
        with context.reading() as session:
            assert users.get_user(session, "ned").roles == {acme.id: "admin"}
        lost = replace(who, groups=frozenset({"a", "c"}))
        with pytest.raises(SignInRefused, match="gone"):
            verbs.sign_in_as(
                context, lost, "another", here, "", verbs.take_code_turn(context, here)
            )


def test_an_address_binds_nobody_unless_told(site: Site, provider: Provider) -> None:
    site.add_user("kim@acme.example", "owner")
    provider.subject = "subject-of-kim"
    provider.claims = {"email": "kim@acme.example", "email_verified": True}
    assert through(site)[1].status == 403


def test_roles_by_a_claim(tmp_path: Path) -> None:
    mapped = {
        "oidc_role_claim": "realm_access.roles",
        "oidc_roles": "ops=admin, boss=owner, staff=viewer, acme=viewer@acme",
        "oidc_create_users": True,
    }
    with running_provider() as own, running_site_of(tmp_path, own, **mapped) as site:
        acme = site.write(tenants.create_tenant, "acme", now_at=site.operator.clock())

        def roles(name: str) -> dict[str, Any]:
            return dict(site.read(users.get_user, name).roles)

        def comes(*groups: str, subject: str = "s-zoe", email: str = "zoe@acme.example") -> int:
            own.subject = subject
            own.claims = {
                "email": email, "email_verified": True, "realm_access": {"roles": [*groups, 7]},
            }  # fmt: skip
            return through(site)[1].status

        assert comes("nobody-knows") == 403
        assert comes() == 403
        assert comes("staff") == 200, "made, with the role"
        assert roles("zoe@acme.example") == {"": "viewer"}
        assert comes("staff", "ops", "acme") == 200
        assert roles("zoe@acme.example") == {"": "admin", acme.id: "viewer"}
        assert comes("acme") == 200
        assert roles("zoe@acme.example") == {acme.id: "viewer"}
        assert comes("nobody-knows") == 403
        assert comes("ops", subject="s-ann", email="ann") == 403, "no address"
        site.add_user("vic@acme.example", "viewer")
        assert comes("boss", subject="s-vic", email="vic@acme.example") == 403, (
            "a name that is taken"
        )
        assert roles("vic@acme.example") == {"": "viewer"}
        user_verbs.bind(site.operator, "ann", "s-ann")
        assert comes("staff", subject="s-ann") == 403, "the last owner stays one"
        assert roles("ann") == {"": "owner"}
        assert comes("boss", subject="s-zoe") == 200
        assert comes("staff", subject="s-ann") == 200
        assert roles("ann") == {"": "viewer"}


def test_passwords_for_emergencies_alone(tmp_path: Path) -> None:
    with (
        running_provider() as own,
        running_site_of(tmp_path, own, password_users="root, spare") as site,
    ):
        site.add_user("root", "owner")
        assert "Emergency sign-in" in site.visitor().get("/sign-in").text
        assert site.visitor().sign_in("ann").status == 401
        assert site.visitor().sign_in("ann", "wrong").text.count("Wrong user name or password") == 1
        own.down = True
        assert site.visitor("root").get("/account").status == 200
        own.down = False
        user_verbs.bind(site.operator, "ann", "subject-1")
        assert through(site)[1].status == 200


def test_signing_out_there_too(tmp_path: Path) -> None:
    with running_provider() as own, running_site_of(tmp_path, own, oidc_sign_out=True) as site:
        user_verbs.bind(site.operator, "ann", "subject-1")
        visitor, _ = through(site)
        out = visitor.post("/sign-out", {})
        assert "Sign out of Acme too" in out.text
        assert "sign-in" in visitor.get("/account").url, "here it is over already"
        ended = visitor.get("/oidc/sign-out")
        assert ended.url.startswith(own.issuer + "/end?client_id=polyhost-tests")
        assert (
            "post_logout_redirect_uri=https%3A%2F%2Fpolyhost.example%2Fadmin%2Fsign-in" in ended.url
        )
        by_password = site.visitor("ann")
        assert "Sign out of Acme" not in by_password.post("/sign-out", {}).text


def test_nothing_of_it_is_there_where_none_is_set(tmp_path: Path) -> None:
    with running_site(tmp_path) as site:
        for path in (START, "/oidc/callback?code=x&state=y", "/oidc/sign-out"):
            assert site.visitor().get(path).status == 404
        assert "oidc" not in site.visitor().get("/sign-in").text
        assert "Single sign-on" not in site.visitor("ann").get("/users/ann").text
        assert site.visitor().sign_in("ann", PASSWORD).status == 200


def test_only_an_owner_binds(site: Site) -> None:
    site.add_user("al", "admin")
    al = site.read(users.get_user, "al")
    context = site.operator
    acting = acting_as(context, al)
    for call in (
        lambda: user_verbs.bind(acting, "al", "x"),
        lambda: user_verbs.unbind(acting, "ann"),
        lambda: user_verbs.bindings_of(acting, "ann"),
    ):
        with pytest.raises(Forbidden):
            call()
