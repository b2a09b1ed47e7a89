"""A pytest plugin for the SDKs' suites, in their own environment: what was sent, what came back.

    python -m pytest -p recorder tests/api_resources

Environment: COMPAT_KEY, the key in the place of the suite's; COMPAT_RECORD, a file that gets one
JSON object a test; TEST_API_BASE_URL is the suite's own. Only strict clients that are not
asynchronous are kept: the others send the same.

The bodies of a suite are made from schemas and hold every field that OpenAI or Anthropic have. A
field that is refused by name is noted and left out, and the rest is sent again, so that one run
tells all fields that are refused and whether the answer to the others is valid.

Ids of a suite are made up, too: where a path or a body names a response, a conversation, a file, an
upload or a batch, one is made for the test, and its id is sent instead.

This file is imported by itself, without the product.
"""

import inspect
import json
import os
import re
from typing import Any

import httpx2
import pytest

CALL = re.compile(r"client\.((?:\w+\.)*\w+)\(")
WRAPPERS = ("with_raw_response.", "with_streaming_response.")
MOCKS = ("respx_mock", "respx2_mock")
NOT_SENT = ("test_path_params", "test_deprecated_model_warning")
"""Tests of the SDK alone."""
MAX_TRIES = 40
PLACE = re.compile(
    r"(.*/v1)/(responses|conversations|files|uploads|batches)(?:/([^/]+)(?:/items/([^/]+)|/\w+)?)?"
)
OTHERS = "anthropic-version"
"""A header of requests to routes of the same names that are not these."""
KEPT = ("authorization", "content-type")
NEW_RESPONSE = {"model": "model", "input": "string"}
NEW_CONVERSATION = {"items": [{"type": "message", "role": "user", "content": "string"}]}
NEW_UPLOAD = {"bytes": 4, "filename": "f", "mime_type": "text/plain", "purpose": "user_data"}
REQUIRED = {"model": "model", "input": "string", "max_tokens": 16, "bytes": 4}
REQUIRED["endpoint"] = "/v1/chat/completions"
NEW_BATCH = {"endpoint": "/v1/chat/completions", "completion_window": "24h"}
"""What some suites leave out although the service needs it."""
_send = httpx2.Client.send
_now: dict[str, Any] = {}
"""The test that runs."""


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Narrow down to what is worth sending, and hand over the key."""
    for plugin in config.pluginmanager.get_plugins():
        for name in ("api_key", "admin_api_key"):
            if isinstance(getattr(plugin, name, None), str):
                setattr(plugin, name, os.environ["COMPAT_KEY"])
    kept = [item for item in items if _is_kept(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _is_kept(item: Any) -> bool:
    params = getattr(getattr(item, "callspec", None), "params", {})
    return params.get("client") is True and not item.name.startswith(NOT_SENT)


def sdk_method(function: Any) -> str:
    """The SDK's method that a test calls, such as `chat.completions.create`; "" for none."""
    source = re.sub(r"\s+", "", inspect.getsource(function))
    for wrapper in WRAPPERS:
        source = source.replace(wrapper, "")
    found = CALL.findall(source)
    return found[-1] if found else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: Any) -> Any:
    """One row a test."""
    _now.clear()
    mocked = any(name in item.fixturenames for name in MOCKS)
    row = {"test": item.nodeid, "method": sdk_method(item.function), "mocked": mocked}
    _now.update(row, exchanges=[], refused=[], error="")
    try:
        return (yield)
    except BaseException as error:
        cause = " ".join(str(error.__cause__ or "").split())
        _now["error"] = f"{type(error).__name__}: {error} {cause}".strip()[:600]
        raise
    finally:
        with open(os.environ["COMPAT_RECORD"], "a") as record:
            print(json.dumps(_now), file=record)


def send(client: Any, request: Any, **options: Any) -> Any:
    """As httpx2's, and again without what was refused."""
    if "exchanges" in _now and not _now["mocked"]:
        request = _with_real_ids(client, request)
    for _ in range(MAX_TRIES):
        response = _send(client, request, **options)
        if "exchanges" not in _now or _now["mocked"]:
            return response
        exchange = {
            "path": request.url.path,
            "verb": request.method,
            "status": response.status_code,
        }
        _now["exchanges"].append(exchange)
        if response.status_code < 400:
            return response
        response.read()
        problem = _problem(response)
        exchange |= {"code": problem.get("code"), "message": problem.get("message")}
        again = _without(request, problem) if response.status_code == 400 else None
        if again is None:
            return response
        response.close()
        request = again
    raise AssertionError(f"{MAX_TRIES} fields were refused")


def _with_real_ids(client: Any, request: Any) -> Any:
    """The same about responses and conversations that are there."""

    def made(kind: str, body: dict[str, Any]) -> str:
        url = request.url.copy_with(path=f"{prefix}/{kind}", query=None)
        asked = httpx2.Request("POST", url, headers=headers, content=json.dumps(body).encode())
        found: dict[str, Any] = _send(client, asked).json()
        return str(found["id"])

    found = PLACE.fullmatch(request.url.path)
    if found is None or OTHERS in request.headers:
        return request
    prefix, kind, name, item = found.groups()
    headers = {k: v for k, v in request.headers.items() if k.lower() in KEPT}
    if name:
        if kind in ("files", "uploads", "batches"):
            return _with_real_file(client, request, prefix, kind, name)
        body = NEW_CONVERSATION if kind == "conversations" else NEW_RESPONSE
        is_cancelled = request.url.path.endswith("/cancel")
        real = made(kind, {**body, "background": True} if is_cancelled else body)
        path = request.url.path.replace(f"/{name}", f"/{real}", 1)
        if item:
            page = request.url.copy_with(path=f"{prefix}/{kind}/{real}/items", query=None)
            listed = _send(client, httpx2.Request("GET", page, headers=headers)).json()
            path = path.replace(f"/items/{item}", f"/items/{listed['data'][0]['id']}")
        url = request.url.copy_with(path=path)
        return httpx2.Request(request.method, url, headers=request.headers, content=request.content)
    if kind == "batches" and request.method == "POST":
        return _with_real_file(client, request, prefix, kind, "")
    if kind != "responses":
        return request
    body = json.loads(request.content)
    if "previous_response_id" in body:
        body["previous_response_id"] = made(kind, NEW_RESPONSE)
        body.pop("conversation", None)  # nobody takes both
    return _again(request, body)


def _with_real_file(client: Any, request: Any, prefix: str, kind: str, name: str) -> Any:
    """The same about a file, an upload with a part, or a batch, that is there. `name` "": of a new
    batch."""

    def posted(path: str, **body: Any) -> str:
        url = request.url.copy_with(path=f"{prefix}/{path}", query=None)
        kept = {"authorization": request.headers["authorization"]}
        made = _send(client, httpx2.Request("POST", url, headers=kept, **body)).json()
        return str(made["id"])

    request.read()
    content = request.content
    if kind == "uploads":
        real = posted(kind, json=NEW_UPLOAD)
    else:
        purpose = "batch" if kind == "batches" else "user_data"
        real = posted("files", data={"purpose": purpose}, files={"file": ("f", b"data")})
    if kind == "batches":
        if not name:
            return _again(request, {**json.loads(content), "input_file_id": real})
        real = posted(kind, json={**NEW_BATCH, "input_file_id": real})
    elif request.url.path.endswith("/complete"):
        part = posted(f"{kind}/{real}/parts", files={"data": ("f", b"data")})
        content = json.dumps({**json.loads(content), "part_ids": [part]}).encode()
    url = request.url.copy_with(path=request.url.path.replace(f"/{name}", f"/{real}", 1))
    headers = {k: v for k, v in request.headers.items() if k.lower() != "content-length"}
    return httpx2.Request(request.method, url, headers=headers, content=content)


def _problem(response: Any) -> dict[str, Any]:
    try:
        found = response.json().get("error")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _without(request: Any, problem: dict[str, Any]) -> Any:
    """The request without the field that was refused; None where none is named."""
    message = str(problem.get("message"))
    names = [problem.get("param") or "", *map(str, re.findall(r"[a-z]\w*[\w.\[\]]*", message))]
    if request.method in ("GET", "DELETE"):
        return _without_parameter(request, names)
    try:
        body = json.loads(request.content)
    except ValueError:
        return None
    for name in filter(None, names):
        if name in REQUIRED and name not in body and "required" in message:
            body[name] = REQUIRED[name]
            _now["refused"].append(f"no {name}")
            return _again(request, body)
        if _pop(body, name):
            return _again(request, body)
    return None


def _without_parameter(request: Any, names: list[str]) -> Any:
    sent = request.url.params.multi_items()
    for name in (name.partition("[")[0] for name in names):
        left = [(key, value) for key, value in sent if key.partition("[")[0] != name]
        if len(left) < len(sent):
            value = next(value for key, value in sent if key.partition("[")[0] == name)
            _now["refused"].append(f"{name}={value}")
            url = request.url.copy_with(params=left)
            return httpx2.Request(request.method, url, headers=request.headers)
    return None


def _pop(body: Any, name: str) -> bool:
    """Take the field out, or what it is missing from; False where there is neither."""
    steps = [int(s) if s.isdigit() else s for s in re.findall(r"[^.\[\]]+", name)]
    for length in range(len(steps), 0, -1):
        holder = body
        try:
            for step in steps[: length - 1]:
                holder = holder[step]
            value = holder.pop(steps[length - 1])
        except (KeyError, IndexError, TypeError, AttributeError):
            continue
        path = str(steps[0]) + "".join(
            f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[1:length]
        )
        is_plain = isinstance(value, int | float | str)
        _now["refused"].append(f"{path}={json.dumps(value)}" if is_plain else path)
        return True
    return False


def _again(request: Any, body: Any) -> Any:
    headers = {k: v for k, v in request.headers.items() if k != "content-length"}
    return httpx2.Request(
        request.method, request.url, headers=headers, content=json.dumps(body).encode()
    )


httpx2.Client.send = send  # type: ignore[method-assign, assignment]
