"""Text to token ids and back, over `tokenizer.json` as the `tokenizers` library reads it.

A token's bytes are looked up one by one (`token_bytes`), which is what makes exact streaming
possible; they equal what the library's own decoder joins, and a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import tokenizers
from tokenizers import decoders

from hadron.errors import RequestError, TokenizerError

FILE = "tokenizer.json"


class Tokenizer:
    """A checkpoint's tokenizer. Build one with `load`."""

    def __init__(self, inner: tokenizers.Tokenizer, end_token: str | None = None) -> None:
        self._inner = inner
        self._end_token = end_token
        self._inner.no_truncation()
        self._inner.no_padding()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, root: Path) -> Tokenizer:
        """Read `tokenizer.json` from a checkpoint's folder; `TokenizerError` when it is absent or broken."""
        path = root / FILE
        if not path.is_file():
            raise TokenizerError(
                f"{root.name or root} has no tokenizer",
                where=str(path),
                found="no such file",
                accepted=f"a {FILE}",
                hint="give prompts as token ids, or copy the original release's tokenizer files beside the weights",
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), _end_token(root))
        except Exception as error:  # the library raises bare `Exception` for every fault in the file
            raise TokenizerError(
                "the tokenizer cannot be read",
                where=str(path),
                found=str(error)[:300],
                accepted=f"a {FILE} that tokenizers {tokenizers.__version__} reads",
                hint="fetch the file again, or copy it from the original release",
            ) from error

    @property
    def serialized(self) -> str:
        """The whole tokenizer, as `tokenizer.json` has it."""
        return self._inner.to_str()

    @property
    def vocabulary_size(self) -> int:
        """One more than the highest id, added tokens included."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out unless told otherwise."""
        return frozenset(i for i, token in self._inner.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether ids stand for bytes, so that text can be streamed without decoding anything twice."""
        return isinstance(self._inner.decoder, decoders.ByteLevel)

    @property
    def end_id(self) -> int | None:
        """The id of the token that `tokenizer_config.json` names as the end of a text, or None."""
        return None if self._end_token is None else self.token_id(self._end_token)

    def token_id(self, token: str) -> int | None:
        """The id of a token's exact text, or None."""
        return self._inner.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; markup such as `<|user|>` inside it becomes its own id.

        add_special_tokens: also what the tokenizer itself puts around a text; off for rendered chats.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                "a prompt is not valid Unicode",
                where=f"prompt, character {error.start}",
                found=f"the lone surrogate {error.object[error.start : error.end]!a}",
                accepted="text that has an encoding in UTF-8",
                hint="decode the input with the encoding it was written in",
            ) from error
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids without a token give nothing."""
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_text(self, token: int) -> str:
        """One token for people to look at: its text, or its bytes as `\\xNN` where they are not UTF-8."""
        if self.is_byte_level:
            return self.token_bytes(token).decode("utf-8", errors="backslashreplace")
        return self._inner.decode([token], skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token of a byte-level vocabulary stands for; none for an id without a token."""
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = _bytes_of(self._inner.id_to_token(token) or "")
        return known


def _end_token(root: Path) -> str | None:
    """`eos_token` of `tokenizer_config.json`, a text or an object with one; None where there is nothing to use."""
    try:
        value = json.loads((root / "tokenizer_config.json").read_bytes())["eos_token"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # an optional file; who needs it, as the chat template does, says what is wrong with it
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _bytes_of(token: str) -> bytes:
    """Undo the printable spelling of bytes; added tokens may hold characters outside it and stay as they are."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode("utf-8")


def _byte_spelling() -> dict[str, int]:
    """Printable character -> byte: Latin-1's visible characters are themselves, the rest follow from 256."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_spelling()
