"""Chat templates: messages in, the text the model was trained to see out. Part of stage 2.

Templates come with models from the internet, so they run in Jinja's immutable sandbox, with the
environment transformers gives them (trim_blocks, lstrip_blocks, loop controls, `raise_exception`,
`strftime_now`, `tojson` that does not escape HTML, the `generation` tag, one name for reasoning
where callers use several). What a template raises is a refusal of these messages ("roles must
alternate") and becomes a 400. The sandbox keeps them from the server's objects, not from its time
and memory: they run in processes that have little of both (prepare_process.py). Tokens and special
tokens are tokenization.py's business.

Templates of multimodal models may go through a message's content as a list of parts, and would
leave out a text: they get `[{"type": "text", "text": ...}]`. A sample tells which they are.

`continue_final_message`, as transformers does it: a mark is put behind the last message's content
before rendering, and the prompt ends where the mark comes out.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

TEMPLATE_FILE = "chat_template.jinja"
CONFIG_FILE = "tokenizer_config.json"
PROCESSOR_FILE = "chat_template.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"

# Names under which callers send an assistant's reasoning; templates read the first.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
_SPECIAL_NAMES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# What a template's expressions raise besides Jinja's own errors: `{{ 1 / 0 }}`, `{{ x[9] }}`.
_EXPRESSION_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


_SAMPLE = "Zwolle"
MAX_SOURCE_CHARS = 1 << 20
_MAX_REASON_CHARS = 1000


class TemplateRefused(Exception):
    """The template does not take these messages; the text says why, in its author's words."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason[:_MAX_REASON_CHARS])


class ChatTemplate:
    """A compiled template with the values that are the same for every request."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises TemplateRefused where `source` is not a template."""
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateRefused(f"the chat template is longer than {MAX_SOURCE_CHARS} characters")
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, SyntaxError) as error:
            raise TemplateRefused(f"invalid chat template: {error}") from error
        self.source = source
        self._wants_parts: bool | None = None
        self._constants: dict[str, Any] = {
            **special_tokens,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }

    def variables(self) -> list[str]:
        """The names that it looks up in what it is given, but for those that are always there."""
        environment = _environment()
        found = meta.find_undeclared_variables(environment.parse(self.source))
        return sorted(found - self._constants.keys() - environment.globals.keys() - {"messages"})

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        continue_final_message: bool = False,
        **values: Any,
    ) -> str:
        """The prompt as text. Raises TemplateRefused.

        `continue_final_message`: it ends where the last message's content ends.
        """
        given = [_with_reasoning(message) for message in messages]
        if not continue_final_message:
            return self._render(given, values)
        return self._render_open(given, {**values, "add_generation_prompt": False})

    def _render_open(self, messages: list[dict[str, Any]], values: dict[str, Any]) -> str:
        # The blank tells whether the template trims; the number keeps callers from writing a mark.
        mark = f"\ue0f4{int.from_bytes(os.urandom(12), 'big')}\ue0f5 "
        content = _marked(messages[-1], mark) if messages else None
        if content is None or "content" not in self.source:
            raise TemplateRefused("continue_final_message needs text in the last message")
        rendered = self._render(messages, values)
        at = rendered.rfind(mark.rstrip())
        if at < 0 or content.strip() not in rendered:
            text = "continue_final_message is not possible: the template changes the last message"
            raise TemplateRefused(text)
        return rendered[:at] if rendered.startswith(mark, at) else rendered[:at].rstrip()

    def _render(self, messages: list[dict[str, Any]], values: Mapping[str, Any]) -> str:
        if self._wants_parts is None:
            self._wants_parts = not self._shows(_SAMPLE) and self._shows(_parts(_SAMPLE))
        if self._wants_parts:
            messages = [
                {**message, "content": _parts(text)}
                if isinstance(text := message.get("content"), str)
                else message
                for message in messages
            ]
        try:
            return self._template.render({**self._constants, "messages": messages, **values})
        except jinja2.TemplateError as error:
            raise TemplateRefused(str(error)) from error
        except _EXPRESSION_ERRORS as error:
            raise TemplateRefused(f"{type(error).__name__}: {error}") from error

    def _shows(self, content: Any) -> bool:
        """Whether a message's content comes out."""
        messages = [{"role": "user", "content": content}]
        try:
            return _SAMPLE in self._template.render({**self._constants, "messages": messages})
        except (jinja2.TemplateError, *_EXPRESSION_ERRORS):
            return False


def _parts(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def _marked(message: dict[str, Any], mark: str) -> str | None:
    """Puts the mark behind the message's text, the last one of several. Returns that text."""
    content = message.get("content")
    if isinstance(content, str):
        message["content"] = content + mark
        return content
    parts = [dict(part) for part in content] if isinstance(content, list) else []
    message["content"] = parts
    for part in reversed(parts):
        if isinstance(part.get("text"), str):
            text: str = part["text"]
            part["text"] = text + mark
            return text
    return None


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A copy; reasoning under any of its names is there as `reasoning_content` and `thinking`."""
    named = (message[name] for name in _REASONING_FIELDS if message.get(name) is not None)
    reasoning = next(named, None)
    if reasoning is None:
        return dict(message)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def load_template(model_dir: Path) -> ChatTemplate | None:
    """The model's chat template, None where it has none. Raises OSError, TemplateRefused."""
    config = read_json(model_dir / CONFIG_FILE)
    path = model_dir / TEMPLATE_FILE
    if path.is_file():
        source: str | None = path.read_text(encoding="utf-8")
    else:  # older multimodal models have it beside the processor
        source = _named(config) or _named(read_json(model_dir / PROCESSOR_FILE))
    return None if source is None else ChatTemplate(source, special_tokens(model_dir))


def special_tokens(model_dir: Path) -> dict[str, str]:
    """Special tokens by the name templates use for them, such as `bos_token`."""
    found: dict[str, str] = {}
    for file in (SPECIAL_TOKENS_FILE, CONFIG_FILE):
        config = read_json(model_dir / file)
        extra = config.get("extra_special_tokens")
        values = {f"{name}_token": config.get(f"{name}_token") for name in _SPECIAL_NAMES}
        for name, value in {**values, **(extra if isinstance(extra, dict) else {})}.items():
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is none or it holds something else."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except (FileNotFoundError, msgspec.DecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _named(config: Mapping[str, Any]) -> str | None:
    """`chat_template` is a text, or a list of named ones of which `default` is meant."""
    value = config.get("chat_template")
    if isinstance(value, list):
        named = [item for item in value if isinstance(item, dict)]
        by_name = {item.get("name"): item.get("template") for item in named}
        value = by_name.get("default")
    return value if isinstance(value, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        namespace=_Namespace,
        dict=_Dict(),
    )
    return environment


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class _Dict:
    """`dict` for templates: to be called, with nothing else of the class to be reached."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As dict.fromkeys."""
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """Jinja's, but no underscore names: they are the way to CPython's internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace may not contain {name!r}")


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks what the assistant said, for training: here
    its body is rendered and that is all."""

    tags = {"generation"}  # noqa: RUF012 - the base class wants a set

    def parse(self, parser: Parser) -> nodes.Node:
        """Make the tag a call block, so that names set inside stay inside."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()
