"""`hadron serve`: a model behind OpenAI's and Anthropic's interfaces. Everything it says goes to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hadron.cli.generate import SHIPPED, SHIPPED_NOTE
from hadron.cli.options import GroupedCommand, engine_options, option
from hadron.errors import UsageError
from hadron.server.config import LOG_FORMATS, ServerConfig

if TYPE_CHECKING:
    from hadron.engine.assemble import Assembled

_Command = TypeVar("_Command", bound=Callable[..., Any])
_DEFAULTS = ServerConfig()
_SERVER, _LIMITS, _LOG = "The server", "Limits", "Log"


def _limit(flag: str, text: str) -> Callable[[_Command], _Command]:
    """A whole number of `ServerConfig`, with its default."""
    default = getattr(_DEFAULTS, flag[2:].replace("-", "_"))
    return option(flag, type=int, default=default, show_default=True, group=_LIMITS, help=text)


@click.command(
    cls=GroupedCommand,
    epilog="SIGTERM and Ctrl-C let requests that have begun end; once more stops at once. Exit codes: 0 stopped by a "
    "signal; 1 the checkpoint has errors; 2 wrong usage or unreadable input.",
)
@click.argument("model", required=False)
@option("--host", default=_DEFAULTS.host, show_default=True, group=_SERVER, help="Address to listen on.")
@option("--port", type=int, default=_DEFAULTS.port, show_default=True, group=_SERVER, help="0 takes a free one.")
@option(
    "--served-model-name",
    multiple=True,
    metavar="NAME",
    group=_SERVER,
    help="What clients call the model; given once for each name, unlike vLLM's.  [default: MODEL]",
)
@option(
    "--api-key",
    multiple=True,
    metavar="KEY",
    group=_SERVER,
    help="A key that opens the server; may be given several times.  [default: it is open]",
)
@option(
    "--api-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    group=_SERVER,
    help="A file of keys, one a line: other users of the machine cannot see them in a list of processes.",
)
@option(
    "--allowed-origins",
    multiple=True,
    metavar="ORIGIN",
    group=_SERVER,
    help="Let pages of this origin call from browsers; may be given several times.  [default: none]",
)
@_limit("--max-queue", "Requests that may wait beside those that run; more are answered 429.")
@_limit("--max-request-bytes", "Most bytes of a request's body.")
@_limit("--header-timeout", "Seconds in which a request's headers must have come; slower ones are answered 408.")
@_limit("--body-timeout", "Seconds in which a request's body must have come; slower ones are answered 408.")
@_limit("--drain-timeout", "Seconds that requests get to end after a signal; 0: no end.")
@option(
    "--log-format",
    type=click.Choice(LOG_FORMATS),
    default=_DEFAULTS.log_format,
    show_default=True,
    group=_LOG,
    help="Of the line that each request leaves.",
)
@option(
    "--enable-log-requests", is_flag=True, group=_LOG, help="Log prompts too, and what was wrong with refused requests."
)
@engine_options
def command(model: str | None, api_key_file: Path | None, **settings: Any) -> int:
    """Serve MODEL: a folder, or a Hub id, which is downloaded.

    Without MODEL, the small model that ships with Hadron is used, which knows little beyond word problems.

    \b
    Examples:
      hadron serve path/to/checkpoint --max-model-len 65536
      curl http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'
    """  # fmt: skip
    names = [name for name in ServerConfig.__dataclass_fields__ if name in settings]
    given = {name: settings.pop(name) for name in names}
    if api_key_file is not None:
        given["api_key"] += _keys(api_key_file)
    config = ServerConfig(**given)
    if model is None:
        click.echo(SHIPPED_NOTE, err=True)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(message)s" if config.log_format == "json" else
        "%(asctime)s %(levelname).1s %(message)s", force=True,
    )  # fmt: skip
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    _serve(model or str(SHIPPED), config, settings)
    return 0


def _serve(model: str, config: ServerConfig, settings: dict[str, Any]) -> None:
    from hadron.engine.config import EngineConfig
    from hadron.server.run import Server

    engine = EngineConfig(**settings)

    def load() -> Assembled:
        from hadron.engine.assemble import assemble

        return assemble(model, engine, _Progress().report)

    name = Path(model).name if model == str(SHIPPED) else model
    Server(load, config, model=name, most=engine.max_num_seqs + config.max_queue).run()


class _Progress:
    """What loading is at, a line for each thing."""

    def __init__(self) -> None:
        self._what = ""

    def report(self, what: str, done: int, total: int) -> None:
        """Called from the engine's thread."""
        del done
        if what != self._what:
            self._what = what
            logging.getLogger("hadron.server").info("loading: %s (%d)", what, total)


def _keys(path: Path) -> tuple[str, ...]:
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise _unusable(path, str(error)) from error
    if not keys:
        raise _unusable(path, "no key")
    return keys


def _unusable(path: Path, found: str) -> UsageError:
    return UsageError(
        "keys cannot be read", where=f"--api-key-file {path}", found=found, accepted="text in UTF-8, a key a line",
        hint="write a key into it, or leave the flag out",
    )  # fmt: skip
