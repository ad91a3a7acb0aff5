"""`ServerConfig`: how a server behaves. Names are those of the flags of `hadron serve`, vLLM's where it has them."""

from __future__ import annotations

from dataclasses import dataclass

from hadron.errors import UsageError

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How a server behaves; every field has a flag of the same name.

    host, port: where to listen; port 0 takes a free one. served_model_name: what clients may call the model; the
    first is what answers say. api_key: any of these opens the server; none: it is open.
    max_queue: requests that may wait beside those that run; more are answered 429.
    max_request_bytes: most bytes of a body. header_timeout, body_timeout: seconds in which all of a request's head, and
    of its body, must have come.
    allowed_origins: origins that browsers may call from. enable_log_requests: log prompts, and what
    was wrong with requests that are refused.
    log_format: of the line that each request leaves. drain_timeout: seconds that requests get to end after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_key: tuple[str, ...] = ()
    max_queue: int = 64
    max_request_bytes: int = 32 << 20
    header_timeout: int = 30
    body_timeout: int = 120
    allowed_origins: tuple[str, ...] = ()
    enable_log_requests: bool = False
    log_format: str = "text"
    drain_timeout: int = 600

    def __post_init__(self) -> None:
        for name, least, most in (
            ("port", 0, 65535), ("max_queue", 0, 1 << 20), ("max_request_bytes", 1024, 1 << 40),
            ("header_timeout", 1, 1 << 30), ("body_timeout", 1, 1 << 30), ("drain_timeout", 0, 1 << 30),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise _refused(name, value, f"a whole number from {least} to {most}")
        if self.log_format not in LOG_FORMATS:
            raise _refused("log_format", self.log_format, ", ".join(LOG_FORMATS))
        for name in ("served_model_name", "api_key", "allowed_origins"):
            if not all(isinstance(text, str) and text for text in getattr(self, name)):
                raise _refused(name, getattr(self, name), "texts that are not empty")


def _refused(name: str, value: object, accepted: str) -> UsageError:
    return UsageError(
        "An option cannot be used as given", where=f"--{name.replace('_', '-')}",
        found="a secret" if name == "api_key" else repr(value), accepted=accepted, hint="see `hadron serve --help`",
    )  # fmt: skip
