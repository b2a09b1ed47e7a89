"""Calls as Hermes and Qwen write them. Part of stage 9.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>

A call that the model leaves open ends with its object.
"""

from gateway.answer.tools.cursor import NotACall, Step
from gateway.answer.tools.json_call import JsonCursor

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


class HermesParser(JsonCursor):
    """See OutputParser."""

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((OPEN,))):
            held = self._held()
            try:
                yield from self._call()
            except NotACall:
                self._back_to(held)

    def _call(self) -> Step[None]:
        if (yield from self._skip_spaces()) != "{":
            raise NotACall
        outcome = yield from self._call_object()
        if outcome == "broken":
            yield from self._tell_arguments_until((CLOSE,))
            yield from self._read(CLOSE)
            self._tell_end(whole=False)
            return
        held = self._held()
        try:
            yield from self._skip_spaces()
            if not (yield from self._read(CLOSE)):
                self._back_to(held)
        except NotACall:
            self._back_to(held)
        self._tell_end(whole=True)
