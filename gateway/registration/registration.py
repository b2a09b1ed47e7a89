"""The operator's verbs about registering: begin, update, retry, cancel. No subprocess here.

Each checks the request and leaves a row in the catalog as `registering` for this process, which
then calls `registrar.run` or `registrar.run_detached`; `cancel` ends such a row, and the process
that works for it notices. What they raise is `registry.errors.RegistryError`.
"""

import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

from gateway.registration.registration_files import is_hub
from gateway.service.control import Control, require
from gateway.service.models import list_models
from registry import catalog, revisions
from registry.catalog import CANCELLED, NEXT, ModelRecord
from registry.errors import IllegalTransition, InvalidValue

DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4")
_HUB_ID = re.compile(r"[\w.-]{1,96}(?:/[\w.-]{1,96})?", re.ASCII)
_REVISION = re.compile(r"[!-~]{1,128}")


def begin(
    control: Control,
    name: str,
    source: str,
    dtype: str = "auto",
    pinned: bool = False,
    revision: str = "",
) -> ModelRecord:
    """Check the request and put the model into the catalog as `registering`, for this process.

    `source` is a folder or a hub id, `revision` a hub's branch, tag or commit. Follow with `run` or
    `run_detached`. Raises RegistryError.
    """
    require(control, "models.write")
    if name.endswith(NEXT):
        raise InvalidValue(f"names that end in {NEXT} are the registry's own")
    place = place_of(source, revision, dtype)
    list_models(control)  # a name whose registration died is free again
    with control.writing() as session:
        return catalog.add_model(
            session,
            name,
            place,
            dtype=dtype,
            requested_revision=revision,
            pinned=pinned,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=control.clock(),
        )


def begin_update(
    control: Control, name: str, source: str = "", dtype: str = "", revision: str = ""
) -> ModelRecord:
    """Begin the registration of a new revision of a ready model, which is served meanwhile.

    What is not given is as it was: the same branch of the same repository, or the same folder.
    Raises RegistryError.
    """
    require(control, "models.write")
    list_models(control)
    with control.reading() as session:
        model = catalog.get_model(session, name)
    was_hub = not source and is_hub(model.source)
    if not source:
        source = model.source
        revision = revision or model.requested_revision
    dtype = dtype or model.requested_dtype
    place = place_of(source, revision, dtype, was_hub)
    with control.writing() as session:
        return revisions.begin_update(
            session,
            name,
            place,
            dtype=dtype,
            requested_revision=revision,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=control.clock(),
        )


def begin_retry(control: Control, name: str) -> ModelRecord:
    """Begin a failed registration once more, of the same commit. Raises RegistryError."""
    require(control, "models.write")
    list_models(control)
    with control.writing() as session:
        model = _job(catalog.list_models(session), name, "failed")
        if model is None:
            known = catalog.get_model(session, name)
            raise IllegalTransition(f"model {name!r} is {known.state}: there is nothing to retry")
        return catalog.add_model(
            session,
            model.name,
            model.source,
            dtype=model.requested_dtype,
            requested_revision=model.requested_revision,
            source_commit=model.source_commit,
            pinned=model.pinned,
            weight=model.weight,
            registrar_host=socket.gethostname(),
            registrar_pid=os.getpid(),
            now_at=control.clock(),
        )


def cancel(control: Control, name: str) -> ModelRecord:
    """End a registration, wherever it runs. Its process notices within OWNER_POLL_S.

    Raises RegistryError where nothing is being registered under that name.
    """
    require(control, "models.write")
    list_models(control)
    with control.writing() as session:
        model = _job(catalog.list_models(session), name, "registering")
        if model is None:
            known = catalog.get_model(session, name)
            raise IllegalTransition(f"model {name!r} is {known.state}, not being registered")
        reason = f"cancelled by {control.actor}"
        catalog.fail(session, model.registration, CANCELLED, reason, now_at=control.clock())
    return model


def place_of(source: str, revision: str, dtype: str, was_hub: bool = False) -> str:
    """The source as the catalog has it: an absolute path, or a hub id.

    `was_hub`: it is one, also where a folder of that name happens to lie here.
    """
    if dtype not in DTYPES:
        raise InvalidValue(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    folder = "" if was_hub else _folder(source)
    if folder:
        if revision:
            raise InvalidValue(f"{source} is a folder: --revision is for models of a hub")
        return folder
    if source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source):
        raise InvalidValue(
            f"{source[:200]} is neither a folder (give the one with config.json in it) nor a hub "
            "id such as org/name"
        )
    if revision and not _REVISION.fullmatch(revision):
        raise InvalidValue(f"{revision!r} is no branch, tag or commit")
    return source


def _folder(source: str) -> str:
    """The folder's absolute path; "" if it is none. Raises InvalidValue."""
    try:
        folder = Path(source).expanduser().resolve()
        if not folder.is_dir():
            return ""
        str(folder).encode()
    except UnicodeEncodeError as error:
        raise InvalidValue(f"{source!r} is not UTF-8: give the folder another name") from error
    except (OSError, RuntimeError):  # too long for a path; ~somebody who is not there
        return ""
    return str(folder)


def _job(models: Sequence[ModelRecord], name: str, state: str) -> ModelRecord | None:
    """The row of a registration in that state: NAME's own, or its update's."""
    names = (name, name.removesuffix(NEXT) + NEXT)
    return next((m for m in models if m.name in names and m.state == state), None)
