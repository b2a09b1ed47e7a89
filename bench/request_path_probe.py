"""What request_path.py sets into each process of the server, as its `sitecustomize` module.

It obeys the file `command` in its folder (a number, a word, an argument) and answers each in a file
of its own: `calls` and `forms` begin to look, `report` ends that and says what was found, `look`
says where the argument, a request's id, can be found now. A file `PID.pid` says that it is there.
"""

import asyncio
import collections
import functools
import gc
import json
import os
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

POLL_S = 0.02
MAX_ITEMS = 4096
"""Of one container, looked at."""
MAX_DEPTH = 7
WORDS = ("Violet bicycles", "Tell me about the case.")
"""What the chat says, in two messages."""
_ALL = frozenset(WORDS)
_NONE: frozenset[str] = frozenset()
_PLAIN = (list, tuple, set, frozenset, collections.deque)
_LEAVES = (str, int, float, bytes, type, types.ModuleType)


class Probe:
    """Of one process. `root`: of the product's tree; `folder`: where commands and answers are."""

    def __init__(self, root: str, folder: str, packages: Iterable[str]) -> None:
        self._root = root
        self._folder = folder
        self._packages = frozenset(packages)
        self._mode = ""
        self._calls: collections.Counter[tuple[str, str]] = collections.Counter()
        self._forms: set[str] = set()
        self._ids: list[int] = []
        self._old: dict[int, Any] = {}

    def start(self) -> None:
        """From now on, in all threads."""
        open(os.path.join(self._folder, f"{os.getpid()}.pid"), "w").close()
        threading.Thread(target=self._watch, daemon=True).start()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def _profile(self, frame: types.FrameType, event: str, arg: Any) -> None:
        if not self._mode or event not in ("call", "return"):
            return
        code = frame.f_code
        if not code.co_filename.startswith(self._root):
            return
        if self._mode == "forms":
            for value in list(frame.f_locals.values()) if event == "call" else [arg]:
                self._look_at(value)
        elif event == "call":
            self._calls[code.co_filename[len(self._root) + 1 :], code.co_qualname] += 1

    def _watch(self) -> None:
        number = 0
        while True:
            time.sleep(POLL_S)
            try:
                with open(os.path.join(self._folder, "command")) as file:
                    command = json.load(file)
            except (OSError, ValueError):
                continue
            if command[0] > number:
                number = command[0]
                sys.setswitchinterval(60.0)  # nothing else moves while it looks
                answer = self._obey(command[1], command[2])
                sys.setswitchinterval(0.005)
                path = os.path.join(self._folder, f"{os.getpid()}.{number}")
                with open(path + ".part", "w") as file:
                    json.dump(answer, file)
                os.replace(path + ".part", path)

    def _obey(self, word: str, argument: Any) -> Any:
        if word == "look":
            return sorted(self._owners(argument))
        self._mode = ""
        if word == "report":
            calls = [[*key, count] for key, count in self._calls.items()]
            return {"calls": calls, "forms": sorted(self._forms), "ids": self._ids}
        self._calls.clear()
        self._old = {id(one): one for one in gc.get_objects() if self._is_ours(one)}
        self._ids = argument or self._ids
        self._mode = word
        return None

    def _is_ours(self, value: Any) -> bool:
        module = getattr(type(value), "__module__", None)
        return isinstance(module, str) and module.partition(".")[0] in self._packages

    # Forms.

    def _look_at(self, value: Any) -> None:
        if self._is_ours(value) and id(value) not in self._old:
            ids = getattr(value, "prompt_token_ids", None)
            if ids and not self._ids:
                self._ids = list(ids)
            if self._said_by(value) == _ALL:
                self._forms.add(_name(value))

    def _said_by(self, value: Any, depth: int = 3) -> frozenset[str]:
        """Which of the words the object holds itself, or in objects that hold only some."""
        return _NONE.union(*(self._said(each, depth) for _, each in _attributes(value)))

    def _said(self, value: Any, depth: int) -> frozenset[str]:
        if isinstance(value, str):
            return frozenset(word for word in WORDS if word in value)
        if isinstance(value, dict):
            value = list(islice(value.values(), 64))
        if isinstance(value, _PLAIN) or hasattr(value, "tolist"):
            if self._is_prompt(value):
                return _ALL
            items = list(islice(value, 64)) if depth and isinstance(value, _PLAIN) else ()
            return _NONE.union(*(self._said(each, depth - 1) for each in items))
        if depth and self._is_ours(value) and id(value) not in self._old:
            part = self._said_by(value, depth - 1)
            return _NONE if part == _ALL else part
        return _NONE

    def _is_prompt(self, value: Any) -> bool:
        if not self._ids:
            return False
        head = value.tolist() if hasattr(value, "tolist") else list(islice(value, len(self._ids)))
        return isinstance(head, list) and head[: len(self._ids)] == self._ids

    # Owners.

    def _owners(self, request_id: str) -> Iterator[str]:
        for old in self._old.values():
            for name, value in _attributes(old):
                if self._finds(value, request_id):
                    yield f"{_name(old)}.{name}"

    def _finds(self, value: Any, request_id: str) -> bool:
        seen: set[int] = set()
        waiting = [(value, MAX_DEPTH)]
        while waiting:
            one, depth = waiting.pop()
            if isinstance(one, str):
                if request_id in one:
                    return True
                continue
            if isinstance(one, _LEAVES) or one is None or id(one) in seen or not depth:
                continue
            seen.add(id(one))
            waiting += ((inner, depth - 1) for inner in islice(self._within(one), MAX_ITEMS))
        return False

    def _within(self, value: Any) -> Iterable[Any]:
        """What it holds; nothing where it was there before."""
        if isinstance(value, dict):
            return [part for item in list(value.items())[:MAX_ITEMS] for part in item]
        if isinstance(value, _PLAIN):
            return list(value)
        if isinstance(value, asyncio.Task):
            coroutine: Any = value.get_coro()
            return list(coroutine.cr_frame.f_locals.values()) if coroutine.cr_frame else ()
        if isinstance(value, types.MethodType):
            return [value.__self__]
        if isinstance(value, functools.partial):
            return [*value.args, *value.keywords.values()]
        if isinstance(value, types.FunctionType):
            return [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
        if self._is_ours(value) and id(value) not in self._old:
            return [each for _, each in _attributes(value)]
        return ()


_EMPTY = types.CellType()


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """Those that are stored, without any property."""
    yield from list(getattr(value, "__dict__", {}).items())
    for kind in type(value).__mro__:
        for name in kind.__dict__.get("__slots__", ()):
            if isinstance(name, str) and not name.startswith("__"):
                try:
                    yield name, getattr(value, name)
                except AttributeError:
                    continue


if "PATH_ROOT" in os.environ:
    Probe(
        os.environ["PATH_ROOT"], os.environ["PATH_FOLDER"], os.environ["PATH_PACKAGES"].split(",")
    ).start()
