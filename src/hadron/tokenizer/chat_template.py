"""Messages to a prompt, through the checkpoint's own jinja2 template.

The environment is what templates on the Hub are written for: trimmed blocks, loop controls, `tojson`
that keeps key order and leaves `<` alone, `raise_exception`, `strftime_now`, `{% generation %}` blocks.
It is jinja2's immutable sandbox: a template is somebody else's program.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from hadron.errors import RequestError, TokenizerError

Message = Mapping[str, Any]

#: Types of a message's parts that are text.
TEXTS = ("text", "input_text", "output_text", "refusal")


class ChatTemplate:
    """A compiled template. variables: names every rendering sees (`bos_token`, …)."""

    def __init__(self, source: str, *, where: str, variables: Mapping[str, Any] | None = None) -> None:
        self.where = where
        self._variables = dict(variables or {})
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise self._broken(error) from error

    @classmethod
    def load(cls, root: Path) -> ChatTemplate:
        """The template of a checkpoint's folder; `TokenizerError` when there is none or it is broken."""
        settings = _settings(root / "tokenizer_config.json")
        variables = {key: _content(value) for key, value in settings.items() if key.endswith("_token")}
        own = root / "chat_template.jinja"
        if own.is_file():
            try:
                return cls(own.read_text(encoding="utf-8"), where=str(own), variables=variables)
            except UnicodeDecodeError as error:
                raise _unreadable(own, error) from error
        source = _default(settings.get("chat_template"))
        if source is None:
            raise TokenizerError(
                f"{root.name or root} has no chat template",
                where=str(root),
                found="neither chat_template.jinja nor a chat_template in tokenizer_config.json",
                accepted="one of them",
                hint="give a plain prompt, or copy chat_template.jinja from the original release",
            )
        return cls(source, where=str(root / "tokenizer_config.json"), variables=variables)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **switches: Any,
    ) -> str:
        """The prompt for `messages`. switches go to the template (`enable_thinking`, …).

        `RequestError` when a message is malformed or the template refuses them.
        """
        names = self._variables | switches
        names |= {
            "messages": decode_tool_arguments(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._template.render(names)
        except _RefusedError as error:
            raise RequestError(
                "the chat template refuses these messages",
                where=self.where,
                found=str(error),
                accepted="what the template supports",
                hint="change the messages as it says",
            ) from error
        except jinja2.exceptions.SecurityError as error:
            raise self._broken(error) from error
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
            raise RequestError(
                "the chat template cannot render these messages",
                where=self.where,
                found=f"{type(error).__name__}: {error}",
                accepted="messages of the form the template reads",
                hint="every message needs a role and a content that is text or a list of parts",
            ) from error

    def _broken(self, error: Exception) -> TokenizerError:
        line = getattr(error, "lineno", None)
        return TokenizerError(
            "the chat template cannot be used",
            where=self.where if line is None else f"{self.where}, line {line}",
            found=f"{type(error).__name__}: {error}",
            accepted="a jinja2 template that stays inside the sandbox",
            hint="copy chat_template.jinja from the original release",
        )


def refuse_pictures(messages: Sequence[Message]) -> None:
    """`RequestError` for a part that is no text: templates may leave one out, or write a note in its place."""
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
        for number, part in enumerate(parts):
            if isinstance(part, Mapping) and part.get("type") not in TEXTS:
                raise RequestError(
                    "pictures and films cannot be read",
                    where=f"messages[{index}].content[{number}].type",
                    found=repr(part.get("type"))[:80],
                    accepted=f"parts that are text ({', '.join(TEXTS)}): the vision tower is not run",
                    hint="leave the part out",
                )


def decode_tool_arguments(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Copies of `messages` in which tool-call arguments are mappings.

    Templates iterate over them; clients send a JSON string. An empty string counts as no arguments.
    """
    decoded = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise _malformed(f"messages[{index}]", repr(message)[:120], "an object with a role and a content")
        copy = dict(message)
        if calls := copy.get("tool_calls"):
            if not isinstance(calls, Sequence) or isinstance(calls, str):
                raise _malformed(f"messages[{index}].tool_calls", repr(calls)[:120], "a list")
            copy["tool_calls"] = [
                _decode_call(call, f"messages[{index}].tool_calls[{number}]") for number, call in enumerate(calls)
            ]
        decoded.append(copy)
    return decoded


def _decode_call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _malformed(where, repr(call)[:120], "an object with a function")
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _decode_call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        value = json.loads(arguments, parse_constant=_no_constant) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _malformed(f"{where}.arguments", f"{arguments[:120]!r} ({error})", "a JSON object") from error
    if not isinstance(value, dict):
        raise _malformed(f"{where}.arguments", repr(arguments)[:120], "a JSON object")
    return {**call, "arguments": value}


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not JSON")


def _malformed(where: str, found: str, accepted: str) -> RequestError:
    return RequestError(
        "a message is malformed",
        where=where,
        found=found,
        accepted=accepted,
        hint="send the message as the OpenAI chat format has it",
    )


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(settings, dict):
        raise _unreadable(path, TypeError("not an object"))
    return settings


def _unreadable(path: Path, error: Exception) -> TokenizerError:
    return TokenizerError(
        f"{path.name} cannot be read",
        where=str(path),
        found=str(error)[:200],
        accepted="a file in UTF-8" if path.suffix == ".jinja" else "a JSON object",
        hint="fetch the file again, or copy it from the original release",
    )


def _content(value: Any) -> Any:
    """A special token is written as text or as an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def _default(template: Any) -> str | None:
    """`chat_template` is one template, or a list of named ones."""
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


class _RefusedError(Exception):
    """A template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model wrote; rendering ignores the mark."""

    tags = {"generation"}  # noqa: RUF012 - typed as a set by the base class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The block's own statements, unwrapped."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
