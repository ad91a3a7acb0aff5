"""What a request is answered with when it cannot be served: a status, and an error in the shape of its API.

OpenAI's shape is `{"error": {message, type, param, code}}`, Anthropic's `{"type": "error", "error": {type,
message}}`. Both say what was found against what is accepted, and name the field.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from hadron.errors import CapacityError, HadronError, RequestError, TokenizerError

#: status -> (OpenAI's type, Anthropic's type)
_TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    408: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
}


#: Depth-limited: what is shown may be nested as deep as JSON can be.
_shown = reprlib.Repr()
_shown.maxstring = 80


class ApiError(Exception):
    """An answer that is an error. param: the field at fault. retry_after: in seconds. hang_up: the connection ends
    with it, for a body that nobody will read to its end."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        hang_up: bool = False,
    ) -> None:
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if hang_up:
            self.headers["connection"] = "close"
        super().__init__(message)

    @property
    def brief(self) -> str | None:
        """For a log: without what the request held, which may be a part of its prompt."""
        return self.message if self.status >= 500 else " ".join(filter(None, (self.code, self.param))) or None

    def body(self, path: str = "", request_id: str | None = None) -> dict[str, Any]:
        """The answer's body, in the shape that clients of `path` expect."""
        openai, anthropic = _TYPES.get(self.status, _TYPES[400 if self.status < 500 else 500])
        if path.startswith("/v1/messages"):
            return {
                "type": "error",
                "error": {"type": anthropic, "message": self.message},
                "request_id": request_id,
            }
        return {"error": {"message": self.message, "type": openai, "param": self.param, "code": self.code}}

    def as_request_error(self) -> RequestError:
        """The same for those who do not speak HTTP."""
        cause = self.__cause__
        if isinstance(cause, RequestError):
            return cause
        return RequestError(
            "this cannot be answered", where=self.param or "the request", found=self.message,
            accepted="see what was found", hint="change it as it says",
        )  # fmt: skip


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error with its field called as `names` says, by the longest of them that it begins with."""
    param = error.param
    for inner in sorted(names, key=len, reverse=True):
        if param is not None and (param == inner or param.startswith((f"{inner}.", f"{inner}["))):
            error.param = names[inner] + param[len(inner) :]
            error.message = error.message.replace(param, error.param)
            break
    return error


def from_error(error: Exception, names: Mapping[str, str] | None = None, *, code: str | None = None) -> ApiError:
    """The answer for an exception. names: what the API calls fields that have another name inside. code: of the
    answer, where the request is at fault."""
    if isinstance(error, ApiError):
        return error
    if not isinstance(error, HadronError):
        return ApiError(500, "the server failed on this request; its log says how", code="internal_error")
    message = f"{error.what}: {error.where}: found {error.found}; accepted: {error.accepted}; {error.hint}"
    if isinstance(error, RequestError | TokenizerError | CapacityError):
        return renamed(ApiError(400, message, param=error.where, code=code), names or {})
    return ApiError(500, message, code=type(error).__name__)


def invalid(faults: Sequence[Any]) -> ApiError:
    """The answer for a body of the wrong form, from pydantic's faults: the first field, and how many more."""
    first = max((f for f in faults if f["loc"][:2] == faults[0]["loc"][:2]), key=lambda fault: len(fault["loc"]))
    field = _field(first["loc"])
    if first["type"] == "json_invalid":
        detail = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {detail} at character {first['loc'][-1]}"[:300], param="body")
    found = "nothing" if first["type"] == "missing" else _shown.repr(first.get("input"))[:80]
    others = len({_field(fault["loc"]) for fault in faults} - {field})
    more = f" (and {others} more fields)" if others else ""
    return ApiError(400, f"{field}: found {found}; accepted: {first['msg']}{more}", param=field)


def _field(loc: tuple[Any, ...]) -> str:
    """`messages[0].content` from ("body", "messages", 0, "content", "str"): names of variants are left out."""
    text = ""
    for part in loc[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool", "dict") and not part[0].isupper():
            text += f".{part}" if text else part
    return text or "body"
