"""Calls as Llama 3 writes them: the whole answer is an object, or several with `;` between them.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

Some write `<|python_tag|>` before it, and only with that mark can a call follow other text: an
object in the middle of an answer is an example more often than a call.
"""

from gateway.answer.tools.cursor import NotACall, Step
from gateway.answer.tools.json_call import JsonCursor

MARK = "<|python_tag|>"


class LlamaJsonParser(JsonCursor):
    """See OutputParser."""

    def _run(self) -> Step[None]:
        yield
        yield from self._calls_or_back(0)
        while (yield from self._content_until((MARK,))):
            yield from self._calls_or_back(self._held())

    def _calls_or_back(self, held: int) -> Step[None]:
        """Calls from here on, as many as there are; back to `held` where there is none."""
        while self._may_call():
            try:
                if (yield from self._skip_spaces()) != "{":
                    raise NotACall
                outcome = yield from self._call_object()
            except NotACall:
                self._back_to(held)
                return
            if outcome == "broken":
                yield from self._tell_arguments_until((MARK,))
            self._tell_end(whole=outcome != "broken")
            held = 0
            if outcome != "clean":
                return
            try:
                if (yield from self._skip_spaces()) in (";", ","):
                    self._pos += 1
            except NotACall:
                self._back_to(held)
                return
