"""Parsers of the formats whose calls are JSON: Hermes, Llama 3, Mistral. Part of stage 9.

Each is an OutputParser; what they share is json_call.py's.
"""

import re

from gateway.api.tools.cursor import NotACall, Step
from gateway.api.tools.json_call import JsonCursor

HERMES_OPEN = "<tool_call>"
HERMES_CLOSE = "</tool_call>"
LLAMA_MARK = "<|python_tag|>"
MISTRAL_MARK = "[TOOL_CALLS]"
MISTRAL_ID_MARK = "[CALL_ID]"
MISTRAL_ARGUMENTS_MARK = "[ARGS]"

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


class HermesParser(JsonCursor):
    """Hermes and Qwen. A call that the model leaves open ends with its object.

    <tool_call>
    {"name": "f", "arguments": {"a": 1}}
    </tool_call>
    """

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((HERMES_OPEN,))):
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
            yield from self._tell_arguments_until((HERMES_CLOSE,))
            yield from self._read(HERMES_CLOSE)
            self._tell_end(whole=False)
            return
        held = self._held()
        try:
            yield from self._skip_spaces()
            if not (yield from self._read(HERMES_CLOSE)):
                self._back_to(held)
        except NotACall:
            self._back_to(held)
        self._tell_end(whole=True)


class LlamaJsonParser(JsonCursor):
    """Llama 3: the whole answer is an object, or several with `;` between them.

    {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}

    Some write `<|python_tag|>` before it, and only with that mark can a call follow other text: an
    object in the middle of an answer is an example more often than a call.
    """

    def _run(self) -> Step[None]:
        yield
        yield from self._calls_or_back(0)
        while (yield from self._content_until((LLAMA_MARK,))):
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
                yield from self._tell_arguments_until((LLAMA_MARK,))
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


class MistralParser(JsonCursor):
    """Mistral's, in both forms that are in use.

    [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}

    The second is that of tokenizer versions 11 and later; some put `[CALL_ID]` and an id after the
    name, which is passed over: ids are ours to give.
    """

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((MISTRAL_MARK,))):
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
                    yield from self._tell_arguments_until((MISTRAL_MARK,))
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
        if (yield from self._read(MISTRAL_ID_MARK)):
            yield from self._skip(_NAME)
        yield from self._read(MISTRAL_ARGUMENTS_MARK)
        if (yield from self._skip_spaces()) != "{":
            raise NotACall
        self._tell_start(name)
        whole = yield from self._live_arguments()
        if not whole:
            yield from self._tell_arguments_until((MISTRAL_MARK,))
        self._tell_end(whole)
