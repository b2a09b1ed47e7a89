"""A real server over the scripted model, with models by whatever names a client asks for.

`prepare` registers them by the registrar's real subprocess: all generating models from one folder
with the scripted model's chat template, encoders from tiny random ones. `serving` starts the
server. One tenant, one key that may do all that a tenant's key may.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from admin.context.operator_context import open_context
from admin.operations import keys, models, tenants
from admin.registration import registrar
from bench.servers import Polyhost, Server
from gateway.settings.settings import Settings
from registry.schema import upgrade
from tests.compat.script import TEMPLATE
from tests.compat.scripted_model import DEMO, MODULE
from tests.e2e.folders import write_cross, write_embed

CONTEXT = 16_384
SCRIPTED, EMBED, CROSS = "scripted", "embed", "cross"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A data folder, and a key of its one tenant with its id."""

    data_dir: Path
    key: str
    key_id: str


def prepare(root: Path, generating: Iterable[str] = (), embedding: Iterable[str] = ()) -> Prepared:
    """A data folder in `root` with SCRIPTED, EMBED and CROSS, and the models of these names."""
    sources = {name: root / name for name in (SCRIPTED, EMBED, CROSS)}
    write_scripted(sources[SCRIPTED])
    write_embed(sources[EMBED])
    write_cross(sources[CROSS])
    folders = dict.fromkeys(generating, sources[SCRIPTED])
    folders |= dict.fromkeys(embedding, sources[EMBED]) | sources
    settings = Settings(data_dir=str(root / "data"))
    settings.data_path.mkdir()
    upgrade(settings.registry_url)
    with open_context(settings, "tests") as context:
        begun = [
            models.begin_registration(context, name, str(folder), dtype="float32")
            for name, folder in folders.items()
        ]
        for model in registrar.run(context, begun):
            assert model.state == "ready", model.reason
        tenants.create_tenant(context, "clients")
        scopes = ("inference", "usage", "files")
        record, key = keys.create_key(context, "clients", "tests", scopes=scopes)
    return Prepared(settings.data_path, key, record.id)


def write_scripted(folder: Path) -> None:
    """A demo model with the scripted model's template and a long context."""
    shutil.copytree(DEMO, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for file, name in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        config = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**config, name: CONTEXT}))


@contextlib.contextmanager
def serving(prepared: Prepared, **settings: object) -> Iterator[Server]:
    """The server until the block ends; `settings` are fields of Settings."""
    settings = {"ollama_key_id": prepared.key_id, **settings}
    server = Polyhost(prepared.data_dir, settings).serve(prepared.key, module=(MODULE,))
    with server.process:
        yield server
