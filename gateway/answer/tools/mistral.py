"""Calls as Mistral's models write them, in both forms that are in use. Part of stage 9.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

The second is that of tokenizer versions 11 and later; some put `[CALL_ID]` and an id after the
name, which is passed over: ids are ours to give.
"""

import re

from gateway.answer.tools.cursor import NotACall, Step
from gateway.answer.tools.json_call import JsonCursor

MARK = "[TOOL_CALLS]"
ID_MARK = "[CALL_ID]"
ARGUMENTS_MARK = "[ARGS]"

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


class MistralParser(JsonCursor):
    """See OutputParser."""

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((MARK,))):
            held = self._held()
            try:
                if (yield from self._skip_spaces()) == "[":
                    yield from self._array()
                else:
                    yield from self._named()
            except NotACall:
                self._back_to(held)

    def _array(self) -> Step[None]:
        """Raises NotACall if there is none; what spoils a later one is content."""
        held = None
        char = "["
        try:
            while char != "]":
                self._pos += 1
                if not self._may_call() or (yield from self._skip_spaces()) != "{":
                    raise NotACall
                outcome = yield from self._call_object()
                if outcome == "broken":
                    yield from self._tell_arguments_until((MARK,))
                self._tell_end(whole=outcome != "broken")
                held = 0
                char = yield from self._skip_spaces()
                if outcome != "clean" or char not in (",", "]"):
                    raise NotACall
        except NotACall:
            if held is None:
                raise
            self._back_to(held)
            return
        self._pos += 1
        self._tell_padding()

    def _named(self) -> Step[None]:
        start = self._held()
        yield from self._skip(_NAME)
        name = self._held_text(start)
        if name not in self._names:
            raise NotACall
        if (yield from self._read(ID_MARK)):
            yield from self._skip(_NAME)
        yield from self._read(ARGUMENTS_MARK)
        if (yield from self._skip_spaces()) != "{":
            raise NotACall
        self._tell_start(name)
        whole = yield from self._live_arguments()
        if not whole:
            yield from self._tell_arguments_until((MARK,))
        self._tell_end(whole)
