"""Parsers of the formats that put control tokens around a name and its JSON. Part of stage 9.

    <|tool_calls_section_begin|><|tool_call_begin|>functions.f:0
        <|tool_call_argument_begin|>{"a": 1}<|tool_call_end|><|tool_calls_section_end|>     Kimi K2

and DeepSeek's, whose tokens have other names and letters: V3.1 writes the name and the JSON with a
separator between them, V3 and R1 the word `function` before the name and the JSON in a code block.
"""

import re

from gateway.api.tools.cursor import NotACall, Step
from gateway.api.tools.json_call import JsonCursor

KIMI_SECTION = "<|tool_calls_section_begin|>"
KIMI_OPEN = "<|tool_call_begin|>"
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
KIMI_CLOSE = "<|tool_call_end|>"
KIMI_END = "<|tool_calls_section_end|>"
DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"  # noqa: RUF001
DEEPSEEK_OPEN = "<｜tool▁call▁begin｜>"  # noqa: RUF001
DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"  # noqa: RUF001
DEEPSEEK_CLOSE = "<｜tool▁call▁end｜>"  # noqa: RUF001
DEEPSEEK_END = "<｜tool▁calls▁end｜>"  # noqa: RUF001
FENCE = "```"

_NAME = re.compile(r"[A-Za-z0-9_.\-]*")
_NUMBER = re.compile(r"[0-9]*")
_NAMESPACE = "functions."


class _MarkedParser(JsonCursor):
    """What both have in common. Subclasses say how a call begins and what follows its JSON."""

    section = ""
    open = ""
    close = ""
    end = ""

    def _run(self) -> Step[None]:
        yield
        while (yield from self._content_until((self.section, self.open))):
            yield from self._calls_or_back(self._held())

    def _calls_or_back(self, held: int) -> Step[None]:
        """Calls from here on, as many as there are; back to `held` where there is none."""
        is_open = self._text.endswith(self.open, self._mark, self._pos)
        while True:
            try:
                if not is_open:
                    yield from self._skip_spaces()
                    is_open = yield from self._read(self.open)
                if not is_open or not self._may_call():
                    raise NotACall
                name = yield from self._name_of_call()
            except NotACall:
                if held or not (yield from self._ends()):
                    self._back_to(held)
                return
            self._tell_start(name)
            whole = yield from self._live_arguments()
            if whole:
                whole = yield from self._closes()
            if not whole:
                yield from self._tell_arguments_until((self.close,))
                yield from self._read(self.close)
            self._tell_end(whole)
            held, is_open = 0, False

    def _name_of_call(self) -> Step[str]:
        """Up to the JSON's `{`. Raises NotACall."""
        raise NotImplementedError

    def _closes(self) -> Step[bool]:
        """Move over the call's end. What a model leaves out is not missed."""
        held = self._held()
        try:
            yield from self._skip_spaces()
            yield from self._read(FENCE)
            yield from self._skip_spaces()
            if not (yield from self._read(self.close)):
                self._back_to(held)
        except NotACall:
            self._back_to(held)
        return True

    def _ends(self) -> Step[bool]:
        """Whether the section ends here; its end is told as padding."""
        self._back_to(0)
        try:
            yield from self._skip_spaces()
            if not (yield from self._read(self.end)):
                return False
        except NotACall:
            return False
        self._tell_padding()
        return True

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise NotACall
        return name

    def _read_name(self) -> Step[str]:
        start = self._held()
        yield from self._skip(_NAME)
        return self._held_text(start)


class KimiParser(_MarkedParser):
    """See the module. The name has a number of the call behind it."""

    section, open, close, end = KIMI_SECTION, KIMI_OPEN, KIMI_CLOSE, KIMI_END

    def _name_of_call(self) -> Step[str]:
        yield from self._skip_spaces()
        name = (yield from self._read_name()).removeprefix(_NAMESPACE)
        if (yield from self._read(":")):
            yield from self._skip(_NUMBER)
        yield from self._skip_spaces()
        if not (yield from self._read(KIMI_ARGUMENTS)) or (yield from self._skip_spaces()) != "{":
            raise NotACall
        return self._known(name)


class DeepSeekParser(_MarkedParser):
    """See the module; both forms."""

    section, open, close, end = DEEPSEEK_SECTION, DEEPSEEK_OPEN, DEEPSEEK_CLOSE, DEEPSEEK_END

    def _name_of_call(self) -> Step[str]:
        yield from self._skip_spaces()
        name = yield from self._read_name()
        if not (yield from self._read(DEEPSEEK_SEPARATOR)):
            raise NotACall
        if (yield from self._skip_spaces()) != "{":  # the older form: that was the word `function`
            name = yield from self._read_name()
            yield from self._skip_spaces()
            yield from self._read(FENCE + "json")
        if (yield from self._skip_spaces()) != "{":
            raise NotACall
        return self._known(name)
