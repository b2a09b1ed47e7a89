"""What `serve` prints once it is ready: addresses, a key, a command to try."""

import asyncio
import json
import shlex
import socket
from collections.abc import Callable, Iterable, Sequence

from admin.operations.users import ADMIN
from admin.registration.bootstrap import DemoAccess
from gateway.settings.settings import Settings

PROMPTS = {
    "shakespeare": "Tell me about love.",
    "sherlock": "Who came to Baker Street?",
    "python": "Write a function that adds two numbers.",
}
ANY_PROMPT = "Say hello."
READY_LOOK_S = 0.05
NO_MODELS = "none yet; add one with `polyhost models add NAME --source FOLDER`"


async def announce(
    is_ready: Callable[[], bool],
    models: Callable[[], Iterable[str]],
    listener: socket.socket,
    settings: Settings,
    demo: DemoAccess | None,
    admin_password: str,
) -> None:
    """Print it once the server is ready, and rest. `models`: their names; asked in a thread."""
    while not is_ready():  # noqa: ASYNC110
        await asyncio.sleep(READY_LOOK_S)
    names = list(await asyncio.to_thread(models))
    host, port = listener.getsockname()[:2]
    print(startup_banner(host, port, settings, names, demo, admin_password), flush=True)
    await asyncio.Event().wait()


def startup_banner(
    host: str,
    port: int,
    settings: Settings,
    names: Sequence[str],
    demo: DemoAccess | None,
    admin_password: str = "",
) -> str:
    """A few lines for a person at a terminal. `names`: of the models.

    `admin_password`: of the user `admin`, if it was generated at this start.
    """
    reachable = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    if ":" in reachable and not reachable.startswith("["):
        reachable = f"[{reachable}]"
    scheme = "https" if settings.tls_cert_file else "http"
    url = f"{scheme}://{reachable}:{port}"
    lines = [
        "",
        f"Polyhost is ready:  {url}/v1",
        f"  operator's pages: {url}/admin",
        *([_sign_in(admin_password)] if admin_password else []),
        f"  data folder:      {settings.data_path}",
        f"  models:           {', '.join(names) or NO_MODELS}",
    ]
    if demo is None:
        lines.append("  API keys:         list or create them with `polyhost keys`")
        return "\n".join([*lines, ""])
    lines.append(f"  API key:          {demo.api_key}")
    lines += [f"  not available:    {failure}" for failure in demo.failed]
    if names:
        model = next((name for name in demo.models if name in names), names[0])
        lines += ["", "Try it:", "", _curl(url, demo.api_key, model)]
    return "\n".join([*lines, ""])


def _sign_in(password: str) -> str:
    return f"  sign in as:       {ADMIN}, password {password} (shown only once: store it now)"


def _curl(url: str, api_key: str, model: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": PROMPTS.get(model, ANY_PROMPT)}],
        "max_tokens": 120,
        "stream": True,
    }
    authorization = shlex.quote(f"Authorization: Bearer {api_key}")
    return (
        f"curl -N {url}/v1/chat/completions -H {authorization} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
