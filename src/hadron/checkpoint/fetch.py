"""Reads parts of remote files over HTTP: bounded, retried with back-off, never more than was asked.

Runs on huggingface_hub's own session, so that proxies, certificates and tokens are the ones set up for
it. Every way in which a server can misbehave ends in `HubError` with the file and the status.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

from huggingface_hub import constants, get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # not marked as exported

from hadron.errors import HubError

#: errors of the transport, whichever HTTP library huggingface_hub is built on
TRANSPORT_ERRORS: tuple[type[Exception], ...] = tuple(b for b in HfHubHTTPError.__bases__ if issubclass(b, Exception))
_CONTENT_RANGE = re.compile(r"bytes (?:(\d+)-(\d+)|\*)/(\d+)")
_TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}
_DOWNLOAD = "download the checkpoint (`hf download ORG/NAME`) and check the folder"
_ANSWERS = {
    401: "log in (`hf auth login`, or set HF_TOKEN); a private or misspelt repository looks the same",
    403: "accept the model's licence on its page, and use a token that may read it",
    404: "check the spelling of the id, the revision and the file",
    416: "the file is shorter than it was said to be; try again later",
    429: "wait: the server limits the rate of requests; a token raises the limit",
}


@dataclass(frozen=True)
class Part:
    """Bytes of a remote file from some offset on, and the whole file's length."""

    data: bytes
    total: int


class _RetryError(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, found: str, hint: str, after: float = 0.0) -> None:
        self.found = found
        self.hint = hint
        self.after = after
        super().__init__(found)


@dataclass(frozen=True)
class Fetcher:
    """GET with limits.

    timeout: seconds without a byte, and the grace before `min_rate` (bytes a second) must hold.
    retries: further attempts after the first; the first waits `backoff` seconds, each next twice that.
    """

    token: str | bool | None = None
    timeout: float = 30.0
    min_rate: float = 2000.0
    retries: int = 4
    backoff: float = 0.5

    def whole(self, url: str, name: str, limit: int) -> bytes:
        """A file of at most `limit` bytes. `FileNotFoundError` for 404; `HubError`, calling it `name`."""
        return self._attempts(url, name, None, limit).data

    def part(self, url: str, name: str, start: int, length: int) -> Part:
        """Bytes `start` to `start + length` (fewer at the end of the file). `HubError`."""
        try:
            return self._attempts(url, name, start, length)
        except FileNotFoundError:
            _fail(name, "HTTP status 404", _ANSWERS[404])

    def _attempts(self, url: str, name: str, start: int | None, length: int) -> Part:
        pause = self.backoff
        for attempt in range(self.retries + 1):
            try:
                return self._attempt(url, name, start, length)
            except _RetryError as error:
                if attempt == self.retries:
                    _fail(name, f"{error.found}, {attempt + 1} times", error.hint)
                time.sleep(max(pause, min(error.after, 60.0)))
                pause = min(2 * pause, 30.0)
        raise AssertionError("the loop returns or raises")

    def _attempt(self, url: str, name: str, start: int | None, length: int) -> Part:
        if constants.is_offline_mode():
            _fail(name, "HF_HUB_OFFLINE is set", "unset it, or download the checkpoint while online")
        try:
            if (
                urlsplit(url).port == 0 or not url.isprintable()
            ):  # what a URL may not be also raises, on reading its port
                raise ValueError("this is no address")
            headers = {**build_hf_headers(token=self.token, library_name="hadron"), "Accept-Encoding": "identity"}
            if start is not None:
                headers["Range"] = f"bytes={start}-{start + length - 1}"
            with get_session().stream("GET", url, headers=headers, timeout=self.timeout) as response:
                total = _check_status(response, name, start, length)
                if total is not None and start is not None:
                    length = max(0, min(length, total - start))
                return self._body(response, name, start is None, length, total)
        except OfflineModeIsEnabled:
            _fail(name, "HF_HUB_OFFLINE is set", "unset it, or download the checkpoint while online")
        except FileNotFoundError:
            raise
        except TRANSPORT_ERRORS as error:
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise _RetryError(what, "check the connection (HF_ENDPOINT, proxies) and try again") from None
        except ValueError as error:  # a URL or a header that the HTTP library cannot encode
            _fail(name, f"{type(error).__name__}: {error}", "check HF_ENDPOINT and HF_TOKEN")

    def _body(self, response: Any, name: str, whole: bool, length: int, total: int | None) -> Part:
        begin = time.monotonic()
        data = bytearray()
        for chunk in response.iter_raw():
            data += chunk
            if len(data) > length:
                if whole:
                    _fail(name, f"more than {length} bytes", "this is not the file it should be")
                _fail(name, f"more bytes than the {length} asked for", _DOWNLOAD)
            elapsed = time.monotonic() - begin
            if elapsed > self.timeout and len(data) < self.min_rate * elapsed:
                found = f"{len(data)} bytes in {elapsed:.1f} s, too slow to finish"
                raise _RetryError(found, "try again on a better connection")
        expected = length if not whole else _content_length(response)
        if expected is not None and len(data) != expected:
            raise _RetryError(f"{len(data)} bytes of {expected}, then the end", "try again later")
        return Part(bytes(data), len(data) if total is None else total)


def _content_length(response: Any) -> int | None:
    text = response.headers.get("content-length", "")
    return int(text) if text.isdigit() else None


def _check_status(response: Any, name: str, start: int | None, length: int) -> int | None:
    """The file's length from a good answer; None where a whole file was asked for."""
    status = response.status_code
    if start is None and status == 200:
        return None
    if start is not None and status in (206, 416):
        return _content_range(response, name, start, length)
    if start is not None and status == 200:
        _fail(name, "HTTP status 200: the server ignores byte ranges and sends the whole file", _DOWNLOAD)
    if status == 404 and not response.headers.get("x-error-code", "").startswith(("Repo", "Revision")):
        raise FileNotFoundError(name)
    code = response.headers.get("x-error-code")
    found = f"HTTP status {status}" + (f" ({code})" if code else "")
    if status in _TRY_AGAIN:
        after = response.headers.get("retry-after", "")
        hint = _ANSWERS.get(status, "the server is in trouble; try again later")
        raise _RetryError(found, hint, float(after) if after.isdigit() else 0.0)
    return _fail(name, found, _ANSWERS.get(status, "check HF_ENDPOINT"))


def _content_range(response: Any, name: str, start: int, length: int) -> int:
    text = response.headers.get("content-range", "")
    match = _CONTENT_RANGE.fullmatch(text)
    if match is None:
        _fail(name, f"HTTP status {response.status_code} with Content-Range {text!r}", _DOWNLOAD)
    first, last, total = (int(group) if group else None for group in match.groups())
    if total is None or (response.status_code == 416) != (first is None) or (first is None and start < total):
        _fail(name, f"HTTP status {response.status_code} with Content-Range {text!r}", _DOWNLOAD)
    if first is not None and (first != start or last != min(start + length, total) - 1):
        _fail(name, f"other bytes ({text}) than asked for ({start}-{start + length - 1})", _DOWNLOAD)
    return total


def _fail(name: str, found: str, hint: str) -> NoReturn:
    raise HubError(
        f"{name} could not be fetched", where=name, found=found, accepted="the bytes asked for", hint=hint
    ) from None
