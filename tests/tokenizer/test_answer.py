"""Thoughts, text and tool calls out of a stream: every cut of a text gives the same parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import DATA
from hadron.tokenizer.answer import AnswerSplitter, Part, PieceSplitter, Reasoning
from hadron.tokenizer.markup import Mark, MarkedText, Markup, Piece
from hadron.tokenizer.tokenizer import Tokenizer
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Content, Parameters, admits_text

TOKENIZER = Tokenizer.load(DATA / "tokenizer")
MARKUP = Markup(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "maybe": {"type": ["integer", "null"]},
        "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "object": {"type": "object"},
        "free": {},
    },
}
TOOLS = {"look": Parameters(SCHEMA), "now": Parameters(None), "a": Parameters(SCHEMA), "b": Parameters(None)}


def pieces_of(text: str) -> list[Piece]:
    """A text with its markers taken as such."""
    pieces: list[Piece] = []
    while text:
        found = [(at, mark) for mark in Mark if (at := text.find(mark)) >= 0]
        at, mark = min(found, key=lambda f: f[0]) if found else (len(text), None)
        pieces += [text[:at]] if at else []
        if mark is None:
            break
        pieces.append(mark)
        text = text[at + len(mark) :]
    return pieces


def gathered(parts: list[Part]) -> dict[str, Any]:
    """What a client puts together from the parts."""
    out: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for part in parts:
        match part:
            case Reasoning(text):
                out["reasoning"] += text
            case Content(text):
                out["content"] += text
            case CallBegin(index, name):
                assert index == len(out["calls"])
                out["calls"].append([name, ""])
            case CallArguments(index, text):
                assert text
                out["calls"][index][1] += text
    return out


def split(
    pieces: list[Piece], *, is_open: bool = False, after_mark: bool = True, complete: bool = True, tools: Any = TOOLS
) -> dict[str, Any]:
    splitter = PieceSplitter(is_open=is_open, after_mark=after_mark, tools=tools)
    parts = [part for piece in pieces for part in splitter.push([piece])]
    return gathered(parts + splitter.finish(complete=complete))


def call(name: str, **values: str) -> str:
    arguments = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in values.items())
    return f"<tool_call>{name}{arguments}</tool_call>"


def arguments(text: str, **options: Any) -> Any:
    out = split(pieces_of(text), **options)
    return [(name, json.loads(value)) for name, value in out["calls"]]


WORDS = st.text(alphabet='ab \n{}"\\<é\U0001f600', max_size=6)
PIECES = st.lists(st.one_of(st.sampled_from(list(Mark)), WORDS.filter(bool)), max_size=14)


@given(PIECES, st.booleans(), st.booleans(), st.data())
def test_br63_every_cut_gives_the_same_parts(pieces: list[Piece], is_open: bool, complete: bool, data: Any) -> None:
    """Any order of markers and texts, in single characters and in arbitrary groups."""
    whole = split(pieces, is_open=is_open, complete=complete)
    characters: list[Piece] = []
    for piece in pieces:
        characters += [piece] if isinstance(piece, Mark) else list(piece)
    assert split(characters, is_open=is_open, complete=complete) == whole
    grouped = PieceSplitter(is_open=is_open, after_mark=True, tools=TOOLS)
    parts, rest = [], characters
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        parts += grouped.push(rest[:size])
        rest = rest[size:]
    assert gathered(parts + grouped.finish(complete=complete)) == whole


@given(PIECES, st.booleans())
def test_complete_calls_have_arguments_that_are_json(pieces: list[Piece], is_open: bool) -> None:
    for name, text in split(pieces, is_open=is_open)["calls"]:
        assert name and isinstance(json.loads(text), dict)


TEXT = "I think<x></think>\n\nLet me look. \n" + call("look", text="a\nb", count="42") + "\n" + call("now") + "\n"


def test_br63_one_text_at_every_split_and_in_pairs_of_tokens() -> None:
    expected = {
        "reasoning": "I think<x>",
        "content": "Let me look.",
        "calls": [["look", '{"text": "a\\nb", "count": 42}'], ["now", "{}"]],
    }
    ids = TOKENIZER.encode(TEXT, add_special_tokens=False)
    prompt = TOKENIZER.encode("<|assistant|><think>", add_special_tokens=False)
    texts = [TOKENIZER.decode(ids[:n], skip_special_tokens=False) for n in range(len(ids) + 1)]
    for size in (1, 2, 3, len(ids)):  # several tokens whose text becomes certain at once, as with drafts
        splitter = AnswerSplitter(TOKENIZER, MARKUP, prompt, tools=TOOLS)
        parts: list[Part] = []
        for start in range(0, len(ids), size):
            group = ids[start : start + size]
            for token in group[:-1]:
                parts += splitter.push(token, "")
            parts += splitter.push(group[-1], texts[start + len(group)][len(texts[start]) :])
        assert gathered(parts + splitter.finish(complete=True)) == expected
        assert splitter.reasoning_tokens == ids.index(MARKUP.ids[Mark.THINK_END])
    for at in range(1, len(TEXT)):  # text that comes in two pieces, cut anywhere
        splitter = AnswerSplitter(TOKENIZER, MARKUP, prompt, tools=TOOLS)
        parts = [part for token in ids for part in splitter.push(token, "")]
        parts += splitter.push(None, TEXT[:at]) + splitter.push(None, TEXT[at:])
        assert gathered(parts) == expected


def test_a_call_ends_the_thought_where_tools_are_offered() -> None:
    ids = TOKENIZER.encode("I think" + call("now"), add_special_tokens=False)
    prompt = TOKENIZER.encode("<|assistant|><think>", add_special_tokens=False)
    for tools, expected in ((TOOLS, ids.index(MARKUP.ids[Mark.CALL])), (None, len(ids))):
        splitter = AnswerSplitter(TOKENIZER, MARKUP, prompt, tools=tools)
        for token in ids:
            splitter.push(token, "")
        assert splitter.reasoning_tokens == expected


def test_br63_a_call_before_the_thought_ends_is_a_call() -> None:
    out = split(pieces_of("hm " + call("now")), is_open=True)
    assert out == {"reasoning": "hm", "content": "", "calls": [["now", "{}"]]}


def test_without_tools_the_markup_of_calls_is_text() -> None:
    text = call("look", text="x")
    assert split(pieces_of(text), tools=None) == {"reasoning": "", "content": text, "calls": []}
    assert split(pieces_of("a" + text), is_open=True, complete=False, tools=None)["reasoning"] == "a" + text


def test_white_space_between_markup_is_dropped_and_other_white_space_is_not() -> None:
    text = "<tool_call>look\n<arg_key> text </arg_key>\n<arg_value> a </arg_value>\n</tool_call>\n"
    assert arguments(text) == [("look", {"text": " a "})]
    assert split(pieces_of(" a \n b "), after_mark=False)["content"] == " a \n b "
    assert split(pieces_of(" a"), after_mark=True)["content"] == "a"


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        ("count", "42", 42),
        ("text", "42", "42"),
        ("maybe", "42", 42),
        ("maybe", "null", None),
        ("either", "42", "42"),
        ("text", '{"k":1}', '{"k":1}'),
        ("object", '{"k":1}', {"k": 1}),
        ("text", "001", "001"),
        ("count", "001", "001"),
        ("text", "true", "true"),
        ("free", "true", True),
        ("free", "NaN", "NaN"),
        ("free", "001", "001"),
        ("free", "plain words", "plain words"),
        ("unknown", "[1, 2]", [1, 2]),
        ("count", "12345678901234567890123", 12345678901234567890123),
        ("text", 'quo"te\\ \n\t\u2028', 'quo"te\\ \n\t\u2028'),
        ("text", "", ""),
        ("free", "", ""),
    ],
)
def test_br64_the_schema_decides_what_a_value_is(parameter: str, value: str, expected: Any) -> None:
    pieces: list[Piece] = [Mark.CALL, "look", Mark.KEY, parameter, Mark.KEY_END, Mark.VALUE, *value, Mark.VALUE_END]
    out = split([*pieces, Mark.CALL_END])["calls"]
    assert [json.loads(text) for _, text in out] == [{parameter: expected}]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, True),
        ({"type": ["string", "null"]}, True),
        ({"type": ["integer", "null"]}, False),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, False),
        ({"anyOf": [{"type": "string"}, {}]}, True),
        ({"anyOf": [{"type": "integer"}, {}]}, None),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, True),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, True),
        ({"enum": ["a", "b"]}, True),
        ({"enum": [1, 2]}, False),
        ({"const": None}, False),
        ({"type": "number", "enum": [1]}, False),
        ({"$ref": "#/$defs/word"}, True),
        ({"$ref": "#/$defs/loop"}, None),
        ({"$ref": "elsewhere.json"}, None),
        ({"type": "any"}, None),
        ({}, None),
        (True, None),
        (None, None),
    ],
)
def test_br64_what_a_schema_admits(schema: Any, expected: bool | None) -> None:
    root = {"$defs": {"word": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}}
    assert admits_text(schema, root) is expected


def test_a_schema_is_followed_so_far_and_each_reference_once() -> None:
    """Chains longer than Python's stack, and alternatives that would double at every step."""
    chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)}
    assert admits_text({"$ref": "#/$defs/d0"}, {"$defs": {**chain, "d3000": {"type": "string"}}}) is None
    assert admits_text({"$ref": "#/$defs/d2999"}, {"$defs": {**chain, "d3000": {"type": "string"}}}) is True
    doubled = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(30)}
    assert admits_text({"$ref": "#/$defs/d0"}, {"$defs": {**doubled, "d30": {"type": "integer"}}}) is False
    nested: Any = {"type": "string"}
    for _ in range(3000):
        nested = {"anyOf": [nested]}
    assert admits_text(nested) is None


def test_a_key_that_is_said_twice_counts_once() -> None:
    text = "<tool_call>look" + "".join(
        f"<arg_key>text</arg_key><arg_value>{v}</arg_value>" for v in ("a", "b")
    ) + "</tool_call>"  # fmt: skip
    assert split(pieces_of(text))["calls"] == [["look", '{"text": "a"}']]


def test_a_name_that_is_none_leaves_text() -> None:
    text = "<tool_call>not a name<arg_key>x"
    assert split(pieces_of(text)) == {"reasoning": "", "content": text, "calls": []}


def test_br63_a_name_that_was_not_offered_leaves_text() -> None:
    text = call("other", text="a") + call("look", text="b")
    out = split(pieces_of(text))
    assert out["content"] == call("other", text="a") and out["calls"] == [["look", '{"text": "b"}']]


def test_markers_inside_a_value_are_part_of_it() -> None:
    text = call("look", text="a<think>b</think><tool_call>c</tool_call>")
    assert arguments(text) == [("look", {"text": "a<think>b</think><tool_call>c</tool_call>"})]


@pytest.mark.parametrize(
    ("text", "cut", "closed"),
    [
        ("<tool_call>look", [], [["look", "{}"]]),
        ("<tool_call>look<arg_key>te", [["look", ""]], [["look", "{}"]]),
        ("<tool_call>look<arg_key>text</arg_key><arg_value>ab", [["look", '{"text": "ab']], [["look", '{"text": "ab"}']]),
        ("<tool_call>look<arg_key>count</arg_key><arg_value>4", [["look", ""]], [["look", '{"count": 4}']]),
        (call("look", count="4")[:-12], [["look", '{"count": 4']], [["look", '{"count": 4}']]),
    ],
)  # fmt: skip
def test_a_call_that_is_cut_stays_open_and_one_that_the_model_ends_is_closed(text: str, cut: Any, closed: Any) -> None:
    assert split(pieces_of(text), complete=False)["calls"] == cut
    assert split(pieces_of(text), complete=True)["calls"] == closed


def test_br67_a_thought_that_is_not_closed() -> None:
    assert split(["42"], is_open=True, complete=True) == {"reasoning": "42", "content": "42", "calls": []}
    assert split(["42"], is_open=True, complete=False) == {"reasoning": "42", "content": "", "calls": []}


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|assistant|><think>", True),
        ("<|assistant|><think></think>", False),
        ("<|assistant|>", False),
        ("<|user|>what is <think>?<|assistant|>", False),
        ("<|user|></think><|assistant|><think>", True),
        ("<|assistant|><think>begun", True),
        ("<|assistant|><think>done</think>The answer", False),
        ("", False),
    ],
)
def test_br66_the_prompt_decides_where_the_answer_begins(prompt: str, is_open: bool) -> None:
    assert MARKUP.open_thought(TOKENIZER.encode(prompt, add_special_tokens=False)) is is_open


def test_br66_a_thought_that_the_template_opens_ends_at_its_marker() -> None:
    out = split(pieces_of("abc</think>answer"), is_open=True)
    assert (out["reasoning"], out["content"]) == ("abc", "answer")


def test_a_thought_may_begin_in_the_answer_and_a_stray_end_is_dropped() -> None:
    out = split(pieces_of("\n<think> a </think> b</think>c"), after_mark=False)
    assert (out["reasoning"], out["content"]) == ("a", "bc")


def test_markers_are_tokens_and_not_characters() -> None:
    marked = MarkedText(TOKENIZER, MARKUP)
    ids = [i for letter in "</think>" for i in TOKENIZER.encode(letter, add_special_tokens=False)]
    assert [p for i in ids for p in marked.push(i, TOKENIZER.decode([i]))] == list("</think>")
    assert marked.push(MARKUP.ids[Mark.THINK_END], "</think>") == [Mark.THINK_END]


def test_a_marker_that_a_stop_string_cuts_is_text() -> None:
    marked = MarkedText(TOKENIZER, MARKUP)
    assert marked.push(MARKUP.ids[Mark.CALL], "<tool_") == []
    assert marked.finish() == ["<tool_"]
    marked = MarkedText(TOKENIZER, MARKUP)
    token = MARKUP.ids[Mark.CALL]
    assert marked.push(token, "") == marked.push(token, "<tool") == []
    assert marked.push(None, "_call>") == [Mark.CALL]


def test_a_broken_character_before_a_marker_does_not_shift_it() -> None:
    smile = "\U0001f600".encode()
    byte = next(i for i in range(480) if TOKENIZER.token_bytes(i) == smile[:1])
    marked = MarkedText(TOKENIZER, MARKUP)
    assert marked.push(byte, "") == []
    assert marked.push(MARKUP.ids[Mark.THINK_END], "\ufffd</think>") == ["\ufffd", Mark.THINK_END]


def test_a_tokenizer_without_markup_knows_none(tmp_path: Path) -> None:
    settings = json.loads((DATA / "tokenizer" / "tokenizer.json").read_text())
    settings["added_tokens"] = [t for t in settings["added_tokens"] if "think" not in t["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    markup = Markup(Tokenizer.load(tmp_path))
    assert not markup.has_thoughts and markup.has_calls and not markup.open_thought([488])
