"""Server-sent events from bytes as they arrive, by the rules of the HTML standard.

Lines end with CR, LF or both, also where a piece of bytes ends between them; characters may be cut in two by
pieces. Only `data` is kept: what OpenAI's interfaces send has no other field that counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventParser:
    """Bytes in, the `data` of each event out. An event that the stream's end cuts off is dropped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []
        self._begun = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """The events that end within `piece`. `ValueError` where one is not UTF-8."""
        self._rest += piece
        if not self._begun:
            if _BOM.startswith(self._rest):
                return
            self._begun = True
            self._rest = self._rest.removeprefix(_BOM)
        for line in self._lines():
            if not line:
                if self._data:
                    data, self._data = self._data, []
                    yield b"\n".join(data).decode()
                continue
            name, _, value = line.partition(b":")
            if name == b"data":  # a line that begins with a colon is a comment: its name is empty
                self._data.append(value.removeprefix(b" "))

    def _lines(self) -> Iterator[bytes]:
        start = 0
        for end in _END.finditer(self._rest):
            if end.group() == b"\r" and end.end() == len(self._rest):
                break  # its LF may come with the next piece
            yield self._rest[start : end.start()]
            start = end.end()
        self._rest = self._rest[start:]
