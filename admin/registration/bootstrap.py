"""`serve --demo`: the three demo models, the tenant `demo`, and a key to paste into a curl line.

`ensure_demo` may run at every start and only adds what is missing; what the operator took away on
purpose (a removed demo model) stays away. It blocks while models are registered: run it in a
thread, before the workers start.

Only digests of keys are stored, with one exception: the demo key's plaintext is kept in
`<data_dir>/demo_api_key` (mode 0600), so that every start can print a line that works. A server
that is more than a demonstration is started without --demo, with keys of its own. Where
POLYHOST_DEMO_API_KEY (setting `demo_api_key`) gives the key, nothing is written down.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy.orm import Session

from admin.context.operator_context import OperatorContext, open_context
from admin.context.registration_files import is_old
from admin.operations import models
from admin.operations.models import list_models
from admin.registration import registrar
from admin.registration.registrar import Progress
from gateway.settings.settings import Settings
from registry.accounts import api_keys, tenants
from registry.accounts.key_terms import FILES, INFERENCE
from registry.accounts.tenants import TenantRecord
from registry.errors import NotFound, RegistryError

DEMO_TENANT = "demo"
DEMO_KEY_NAME = "demo"
DEMO_KEY_FILE = "demo_api_key"
DEMO_MODELS_DIR = Path(__file__).parents[2] / "gateway" / "demo_models"
ACTOR = "bootstrap"

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoAccess:
    """What the start block prints. `failed` are demo models that are not ready, with the reason."""

    api_key: str
    models: tuple[str, ...]
    failed: tuple[str, ...]


def ensure_demo(
    settings: Settings,
    say: Say = print,
    demo_dir: Path = DEMO_MODELS_DIR,
    command: Sequence[str] | None = None,
) -> DemoAccess:
    """Make whatever of the demo is missing. The schema must be there.

    Raises RegistryError where the key cannot be had. A demo model that cannot be registered is
    reported in the answer and tried again at the next start.
    """
    with open_context(settings, ACTOR) as context:
        api_key = ensure_key(context, settings.demo_api_key)
        models, failed = ensure_models(context, say, demo_dir, command)
    return DemoAccess(api_key, models, failed)


def ensure_key(context: OperatorContext, given: str = "") -> str:
    """The demo key's plaintext: the given one, the one of an earlier start, or a new one."""
    now_at = context.clock()
    with context.writing() as session:
        tenant = _tenant(session, now_at)
        if given:
            if not _works(session, given, now_at):
                _create(session, tenant, given, now_at)
            return given
        path = context.data_dir / DEMO_KEY_FILE
        kept = path.read_text(encoding="utf-8").strip() if path.exists() else ""
        if kept and _works(session, kept, now_at):
            return kept
        if not kept or _is_known(session, kept):
            # None yet, or the one kept was revoked: then another is made.
            kept = api_keys.generate_plaintext()
            # Written before the row is committed: a start that dies in between finds a text
            # without a row next time, and makes the row.
            _write_private(path, kept)
        _create(session, tenant, kept, now_at)
        return kept


def ensure_models(
    context: OperatorContext, say: Say, demo_dir: Path, command: Sequence[str] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Register the demo folders that are missing, failed or of an earlier release's format.

    All in one subprocess.

    Returns the names that are ready, and "name: reason" of those that are not.
    """
    known = {model.name: model for model in list_models(context, with_removed=True)}
    folders = {
        path.name: path for path in sorted(demo_dir.iterdir()) if (path / "config.json").is_file()
    }
    missing = [name for name in folders if name not in known or known[name].state == "failed"]
    ready = [name for name in folders if name in known and known[name].state == "ready"]
    old = [name for name in ready if is_old(context.packs_dir / known[name].pack)]
    if missing or old:
        names = ", ".join([*missing, *old])
        say(f"registering {len(missing) + len(old)} demo models, once: {names}")
        started_s = time.monotonic()
        begun = [models.begin_registration(context, name, str(folders[name])) for name in missing]
        begun += [models.begin_update(context, name, str(folders[name])) for name in old]
        registrar.run(context, begun, _phases(say), command)
        known = {model.name: model for model in list_models(context, with_removed=True)}
        say(f"registered the demo models in {time.monotonic() - started_s:.1f} s")
    states = [known[name] for name in folders]
    return (
        tuple(model.name for model in states if model.state == "ready"),
        tuple(
            f"{model.name}: {model.reason or model.state}"
            for model in states
            if model.state in ("failed", "registering")
        ),
    )


def _phases(say: Say) -> Callable[[Progress], None]:
    """Say each phase of each model once."""
    last: dict[str, str] = {}

    def show(progress: Progress) -> None:
        if last.get(progress.model) != progress.phase:
            last[progress.model] = progress.phase
            say(f"  {progress.model}: {progress.phase}")

    return show


def _tenant(session: Session, now_at: float) -> TenantRecord:
    try:
        return tenants.get_tenant(session, DEMO_TENANT)
    except NotFound:
        return tenants.create_tenant(session, DEMO_TENANT, internal=True, now_at=now_at)


def _create(session: Session, tenant: TenantRecord, plaintext: str, now_at: float) -> None:
    if _is_known(session, plaintext):
        raise RegistryError(
            "demo_api_key (POLYHOST_DEMO_API_KEY) is a key that was revoked, has expired or has "
            "another secret now: set another value"
        )
    scopes = (INFERENCE, FILES)
    api_keys.create_key(
        session, tenant.id, DEMO_KEY_NAME, scopes=scopes, plaintext=plaintext, now_at=now_at
    )


def _works(session: Session, plaintext: str, now_at: float) -> bool:
    try:
        record = api_keys.get_key(session, api_keys.public_id_of(plaintext))
    except NotFound:
        return False
    return api_keys.verify(record, plaintext, now_at)


def _is_known(session: Session, plaintext: str) -> bool:
    try:
        api_keys.get_key(session, api_keys.public_id_of(plaintext))
    except NotFound:
        return False
    return True


def _write_private(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".part")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "w", encoding="utf-8") as stream:
        stream.write(text + "\n")
    partial.replace(path)
