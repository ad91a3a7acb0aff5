"""Streaming equals decoding, at every split; stop strings likewise."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models

from conftest import DATA
from hadron.tokenizer.detokenizer import Detokenizer, StopStrings
from hadron.tokenizer.tokenizer import Tokenizer

BYTE_LEVEL = Tokenizer.load(DATA / "tokenizer")
BYTES = {BYTE_LEVEL.token_bytes(i): i for i in range(480)}


def stream(tokenizer: Tokenizer, ids: list[int], **options: bool) -> list[str]:
    detokenizer = Detokenizer(tokenizer, **options)
    return [*(detokenizer.push(i) for i in ids), detokenizer.finish()]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(0, 511), max_size=40), st.booleans())
def test_any_ids_stream_to_what_they_decode_to(ids: list[int], skip: bool) -> None:
    pieces = stream(BYTE_LEVEL, ids, skip_special_tokens=skip)
    assert "".join(pieces) == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_text_streams_without_replacement_characters(text: str) -> None:
    text = text.replace("\ufffd", "")
    one_byte_each = [BYTES[bytes([b])] for b in text.encode()]
    for ids in (BYTE_LEVEL.encode(text), one_byte_each):
        pieces = stream(BYTE_LEVEL, ids, skip_special_tokens=False)
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) == text


def test_a_character_comes_with_its_last_byte() -> None:
    ids = [BYTES[bytes([b])] for b in "a你😀".encode()]
    assert stream(BYTE_LEVEL, ids) == ["a", "", "", "你", "", "", "", "😀", ""]


def test_an_unfinished_character_is_given_up_at_the_end() -> None:
    ids = [BYTES[bytes([b])] for b in "ok😀".encode()[:-1]]
    assert stream(BYTE_LEVEL, ids) == ["o", "k", "", "", "", "\ufffd"]


def test_a_broken_character_is_given_up_when_that_is_certain() -> None:
    ids = [BYTES[b] for b in (b"\xe4", b"\xbd", b"A", b"\xff", b"B")]
    assert stream(BYTE_LEVEL, ids) == ["", "", "\ufffdA", "\ufffd", "B", ""]


def byte_fallback() -> Tokenizer:
    """A vocabulary whose tokens carry their own spaces and fall back to bytes, as in Llama's first ones."""
    pieces = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581a", "\u2581the", "b", "c", "你"]
    inner = Inner(models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(inner)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["\u2581a", "\u2581the", "b", "c", "你", "é", "😀"]), max_size=20))
def test_a_decoder_that_is_not_byte_level_streams_too(words: list[str]) -> None:
    tokenizer = byte_fallback()
    ids: list[int] = []
    for word in words:
        known = tokenizer.token_id(word)
        ids += [known] if known is not None else [tokenizer.token_id(f"<0x{b:02X}>") or 0 for b in word.encode()]
    pieces = stream(tokenizer, ids)
    assert not tokenizer.is_byte_level
    assert "".join(pieces) == tokenizer.decode(ids)
    assert not any("\ufffd" in piece for piece in pieces)


def test_without_byte_level_invalid_bytes_do_not_wait_for_ever() -> None:
    tokenizer = byte_fallback()
    pieces = stream(tokenizer, [1 + 0xFF] * 40)
    assert pieces.count("") < 35
    assert set("".join(pieces)) == {"\ufffd"}


def cut(text: str, stop: list[str], sizes: list[int]) -> tuple[list[str], str | None]:
    strings = StopStrings(stop)
    pieces, at = [], 0
    for size in sizes:
        if strings.matched is not None:
            break
        pieces.append(strings.push(text[at : at + size]))
        at += size
    if strings.matched is None:
        pieces.append(strings.finish())
    return pieces, strings.matched


def first_stop(text: str, stop: list[str]) -> tuple[str, str | None]:
    """By definition: the shortest beginning of the text that ends with a stop string, cut at the longest."""
    for end in range(len(text) + 1):
        hits = [s for s in stop if text[:end].endswith(s)]
        if hits:
            longest = max(hits, key=len)
            return text[: end - len(longest)], longest
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    st.text("abc", max_size=14),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(1, 5), min_size=14, max_size=14),
)
def test_stop_strings_do_not_depend_on_the_split(text: str, stop: list[str], sizes: list[int]) -> None:
    expected, matched = first_stop(text, stop)
    pieces, found = cut(text, stop, sizes)
    assert ("".join(pieces), found) == (expected, matched)


def test_a_stop_string_across_tokens_never_shows() -> None:
    text = "one\n\nUser: two"
    for cuts in itertools.combinations(range(1, len(text)), 2):
        a, b = cuts
        strings = StopStrings(["\n\nUser:"])
        pieces = [strings.push(part) for part in (text[:a], text[a:b], text[b:])]
        assert "".join(pieces) == "one"
        assert strings.matched == "\n\nUser:"


def test_what_was_held_back_comes_out_at_the_end() -> None:
    strings = StopStrings(["END"])
    assert [strings.push("the EN"), strings.push("D?"[1:]), strings.finish()] == ["the ", "EN?", ""]
    strings = StopStrings(["END"])
    assert [strings.push("the EN"), strings.finish()] == ["the ", "EN"]


@pytest.mark.parametrize("text", ["", "abc"])
def test_without_stop_strings_nothing_is_held(text: str) -> None:
    strings = StopStrings([])
    assert strings.push(text) == text
    assert strings.finish() == ""
