"""Tool calls apart from the answer's text, as a stream splitter, with arguments typed by their schema.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>…</tool_call>

The markup has no types. A parameter whose schema admits text takes its value verbatim, as it streams. One whose
schema excludes text takes JSON; so does one without a schema, where the value is JSON. What is not JSON is text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from hadron.tokenizer.markup import Mark, Piece

_PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_TYPES = frozenset({*_PYTHON_TYPES.values(), "null"})
#: How deep a schema is followed, through references and alternatives; what lies deeper says nothing.
_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Content:
    """Some text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The index-th call begins; its name is whole."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of the index-th call's arguments."""

    index: int
    text: str


CallPart = Content | CallBegin | CallArguments


def admits_text(schema: Any, root: Any = None) -> bool | None:
    """Whether a value of this JSON schema may be text; None where the schema does not say.

    root: what `$ref` is looked up in.
    """
    types = _types(schema, schema if root is None else root, {}, 0)
    return None if types is None else "string" in types


def _types(schema: Any, root: Any, known: dict[str, frozenset[str] | None], depth: int) -> frozenset[str] | None:
    """known: what references have led to, so that each is followed once."""
    if not isinstance(schema, Mapping) or depth > _DEPTH:
        return None
    found: frozenset[str] | None = None
    reference = schema.get("$ref")
    if isinstance(reference, str):
        if reference not in known:
            known[reference] = None  # a circle says nothing
            known[reference] = _types(_referred(reference, root), root, known, depth + 1)
        found = known[reference]
    declared = schema.get("type")
    listed = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else None
    if listed and all(isinstance(name, str) and name in _TYPES for name in listed):
        found = _both(found, frozenset(listed))
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        found = _both(found, frozenset(_PYTHON_TYPES.get(type(value), "null") for value in values))
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            several = [_types(each, root, known, depth + 1) for each in schema[key]]
            union = frozenset().union(*(each for each in several if each is not None))
            found = _both(found, union if None not in several or "string" in union else None)
    if isinstance(schema.get("allOf"), list):
        for each in schema["allOf"]:
            found = _both(found, _types(each, root, known, depth + 1))
    return found


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return other if one is None else one
    # `number` admits integers
    wide = [each | ({"integer"} if "number" in each else set()) for each in (one, other)]
    return frozenset(wide[0] & wide[1])


def _referred(reference: str, root: Any) -> Any:
    if not reference.startswith("#"):
        return None
    place = root
    for part in reference[1:].strip("/").split("/") if reference != "#" else ():
        if not isinstance(place, Mapping):
            return None
        place = place.get(part.replace("~1", "/").replace("~0", "~"))
    return place


def follow(schema: Any, root: Any) -> Mapping[str, Any]:
    """The schema that a JSON schema's `$ref` leads to, with what stands beside it; empty for what is none."""
    for _ in range(_DEPTH):
        if not isinstance(schema, Mapping):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        target = _referred(reference, root)
        beside = {key: value for key, value in schema.items() if key != "$ref"}
        schema = {**target, **beside} if isinstance(target, Mapping) else beside
    return {}


class Parameters:
    """The parameters of a function, by its JSON schema; None: nothing is known of them."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._schema = schema or {}

    def admits_text(self, name: str) -> bool | None:
        """See `admits_text`, of one parameter."""
        properties = self._schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return admits_text(properties[name], self._schema)
        return admits_text(self._schema.get("additionalProperties"), self._schema)


def is_json(text: str) -> bool:
    """Whether `text` is one value of JSON, by the standard: no NaN, no leading zeros."""
    try:
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return False
    return True


def _no_constant(word: str) -> NoReturn:
    raise ValueError(word)


class _State(Enum):
    TEXT = auto()
    NAME = auto()
    BETWEEN = auto()
    KEY = auto()
    KEYED = auto()
    VALUE = auto()


class ToolCallSplitter:
    """Pieces to text and calls. tools: the parameters of each function that was offered, by name; a call of any other
    is text."""

    def __init__(self, tools: Mapping[str, Parameters]) -> None:
        self._tools = tools
        self._state = _State.TEXT
        self._buffer = ""
        self._name = ""
        self._key = ""
        self._keys: set[str] = set()
        self._text_allowed: bool | None = None
        self._index = -1

    @property
    def inside(self) -> bool:
        """Whether a call is open."""
        return self._state is not _State.TEXT

    @property
    def count(self) -> int:
        """How many calls have begun."""
        return self._index + 1

    def push(self, piece: Piece) -> list[CallPart]:
        """What the piece adds."""
        match self._state:
            case _State.TEXT:
                if piece is not Mark.CALL:
                    return [Content(str(piece))] if piece else []
                self._state, self._buffer = _State.NAME, ""
                return []
            case _State.NAME:
                return self._push_name(piece)
            case _State.VALUE:
                return self._push_value(piece)
            case _:
                return self._push_between(piece)

    def finish(self, *, complete: bool) -> list[CallPart]:
        """The text ends here. complete: by the model's wish, so that an open call is closed; else it was cut."""
        parts: list[CallPart] = []
        if complete and self._state is _State.NAME:
            parts = self._begin()
        if complete and self._state is _State.VALUE:
            parts += self._end_value()
        if complete and self.inside:
            parts += self._end_call()
        return parts

    def _push_name(self, piece: Piece) -> list[CallPart]:
        if piece not in (Mark.KEY, Mark.CALL, Mark.CALL_END) or not isinstance(piece, Mark):
            self._buffer += piece
            return []
        parts = self._begin()
        if self.inside:
            return parts + self._push_between(piece)
        return parts + (self.push(piece) if piece is Mark.CALL else [Content(str(piece))])

    def _push_between(self, piece: Piece) -> list[CallPart]:
        """Between arguments, where only markers count, and inside a key."""
        if not isinstance(piece, Mark):
            if self._state is _State.KEY:
                self._buffer += piece
            return []
        if piece is Mark.KEY:
            self._state, self._buffer = _State.KEY, ""
        elif piece is Mark.KEY_END and self._state is _State.KEY:
            self._state, self._key = _State.KEYED, self._buffer.strip()
        elif piece is Mark.VALUE and self._state in (_State.KEY, _State.KEYED):
            if self._state is _State.KEY:
                self._key = self._buffer.strip()
            return self._begin_value()
        elif piece is Mark.CALL_END:
            return self._end_call()
        elif piece is Mark.CALL:
            parts = self._end_call()
            self._state, self._buffer = _State.NAME, ""
            return parts
        elif self._state is _State.KEY:
            self._buffer += piece
        return []

    def _begin(self) -> list[CallPart]:
        name = self._buffer.strip()
        if name not in self._tools:
            self._state = _State.TEXT
            return [Content(Mark.CALL + self._buffer)]
        self._index += 1
        self._name, self._keys = name, set()
        self._state = _State.BETWEEN
        return [CallBegin(self._index, name)]

    def _begin_value(self) -> list[CallPart]:
        self._state, self._buffer = _State.VALUE, ""
        self._text_allowed = self._tools[self._name].admits_text(self._key)
        if self._text_allowed and self._key not in self._keys:
            return self._arguments(self._opening() + '"')
        return []

    def _opening(self) -> str:
        return ("{" if not self._keys else ", ") + json.dumps(self._key, ensure_ascii=False) + ": "

    def _push_value(self, piece: Piece) -> list[CallPart]:
        if piece is Mark.VALUE_END:
            return self._end_value()
        if self._text_allowed and self._key not in self._keys:
            return self._arguments(json.dumps(str(piece), ensure_ascii=False)[1:-1])
        self._buffer += piece
        return []

    def _end_value(self) -> list[CallPart]:
        self._state = _State.BETWEEN
        if self._key in self._keys:  # said twice: the first counts, as it may have been streamed
            return []
        if self._text_allowed:
            added = '"'
        else:
            value = self._buffer.strip()
            added = self._opening() + (value if is_json(value) else json.dumps(self._buffer, ensure_ascii=False))
        self._keys.add(self._key)
        return self._arguments(added)

    def _end_call(self) -> list[CallPart]:
        self._state = _State.TEXT
        return self._arguments("}" if self._keys else "{}")

    def _arguments(self, text: str) -> list[CallPart]:
        return [CallArguments(self._index, text)] if text else []
