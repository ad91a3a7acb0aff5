"""`hadron chat`: a conversation in the terminal. Thoughts are dimmed; Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hadron.cli import console
from hadron.cli.generate import SHIPPED, SHIPPED_NOTE, Bars
from hadron.cli.options import GroupedCommand, engine_options, option
from hadron.errors import HadronError

if TYPE_CHECKING:
    from hadron.server.model import Model
    from hadron.tokenizer.answer import Part

_HELP = """\
/reset        begin a new conversation
/save FILE    write the conversation to FILE, as JSON
/exit         leave; Ctrl-D does too
Ctrl-C stops an answer. A line that ends in \\ goes on in the next."""
_HOW, _TALK = "How to answer", "The conversation"


@click.command(
    cls=GroupedCommand,
    epilog="In the conversation: /reset, /save FILE, /help, /exit. Exit codes: 0 done; 1 the checkpoint has errors; "
    "2 wrong usage or unreadable input.",
)
@click.argument("model", required=False)
@option("--system", metavar="TEXT", group=_TALK, help="Begin the conversation with this system message.")
@option("--reasoning-effort", metavar="WORD", group=_TALK, help="For the chat template, such as low or high.")
@option(
    "--enable-thinking/--no-enable-thinking",
    default=None,
    group=_TALK,
    help="For the chat template.  [default: the template's]",
)
@option("--thinking-budget", type=int, metavar="N", group=_HOW, help="Close a thought after N tokens.")
@option("--max-tokens", type=int, metavar="N", group=_HOW, help="Most tokens of an answer.  [default: what fits]")
@option("--temperature", type=float, group=_HOW, help="0 takes the likeliest token.  [default: the checkpoint's]")
@option(
    "--top-p",
    type=float,
    group=_HOW,
    help="Choose from the smallest set with this probability.  [default: the checkpoint's]",
)
@option("--top-k", type=int, group=_HOW, help="Choose from this many tokens.  [default: the checkpoint's]")
@option("--seed", type=int, group=_HOW, help="Repeat the same choices.  [default: a fresh one]")
@engine_options
def command(model: str | None, system: str | None, enable_thinking: bool | None, **settings: Any) -> int:
    """Talk with MODEL: a folder, or a Hub id, which is downloaded.

    Without MODEL, the small model that ships with Hadron is used, which knows little beyond word problems.

    \b
    Example:
      hadron chat path/to/checkpoint --system 'Answer in one sentence.'
    """  # fmt: skip
    names = ("reasoning_effort", "thinking_budget", "max_tokens", "temperature", "top_p", "top_k", "seed")
    wishes = {name: settings.pop(name) for name in names}
    if enable_thinking is not None:
        wishes["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
    if model is None:
        click.echo(SHIPPED_NOTE, err=True)
    talk = _Talk(_load(model or str(SHIPPED), settings), system, wishes)
    talk.check()
    for line in _lines():
        talk.take(line)
    return 0


def _load(name: str, settings: dict[str, Any]) -> Model:
    from hadron.engine.assemble import assemble
    from hadron.engine.config import EngineConfig
    from hadron.server.model import Model

    config = EngineConfig(**settings)
    with Bars() as bars:
        return Model.of(assemble(name, config, bars.report), (name,), 0)


def _lines() -> Iterator[str]:
    """What is typed, until the end or /exit."""
    terminal = sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - lends `input` its editing and history
        click.echo("/help says what can be typed", err=True)
    text = ""
    while True:
        try:
            line = input(("  " if text else "> ") if terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D leaves", err=True)
            text = ""
            continue
        text += line
        if text.endswith("\\"):
            text = text[:-1] + "\n"
            continue
        if text.strip() in ("/exit", "/quit"):
            return
        yield text
        text = ""


class _Talk:
    """One conversation. wishes: fields of every chat request."""

    def __init__(self, model: Model, system: str | None, wishes: dict[str, Any]) -> None:
        self._model = model
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self._wishes = wishes
        self._messages: list[dict[str, Any]] = list(self._first)
        self._saved: set[Path] = set()

    def check(self) -> None:
        """Whether the model can talk and the wishes make sense, before anything is typed."""
        self._prepared([*self._first, {"role": "user", "content": "?"}])

    def take(self, line: str) -> None:
        """A line that was typed: something to say, or a command."""
        word, _, rest = line.strip().partition(" ")
        if not word:
            return
        if not word.startswith("/"):
            self._answer(line)
        elif word == "/reset":
            self._messages = list(self._first)
            click.echo("a new conversation", err=True)
        elif word == "/save":
            self._save(rest.strip())
        else:
            click.echo(_HELP if word == "/help" else f"{word} is not known; /help says what is", err=True)

    def _prepared(self, messages: list[dict[str, Any]]) -> Any:
        from hadron.server.chat import prepare_chat
        from hadron.server.errors import ApiError
        from hadron.server.messages_protocol import validated

        try:
            return prepare_chat(self._model, validated({**self._wishes, "messages": messages}, {}), capped=True)
        except ApiError as error:
            raise error.as_request_error() from error

    def _answer(self, line: str) -> None:
        said = [*self._messages, {"role": "user", "content": line}]
        try:
            with _interrupts() as stopped:
                message = self._run(self._prepared(said), stopped)
        except HadronError as error:
            console.write_error(error)
            return
        self._messages = [*said, message]

    def _run(self, prepared: Any, stopped: list[int]) -> dict[str, Any]:
        """Show the answer as it comes; the message that it is, also where `stopped` was filled."""
        engine = self._model.engine
        (splitter,) = prepared.splitters(self._model)
        shown = _Shown()
        (request,) = engine.add_all("chat", prepared.ids, prepared.params, prepared.text, answer=True)
        try:
            while engine.has_requests and not stopped:
                for event in engine.step():
                    shown.take(splitter.push(event.token_id, event.text))
        finally:
            engine.abort_all()
        complete = request.finish_reason == "stop"
        shown.take(splitter.finish(complete=complete))
        shown.end()
        if request.error is not None:
            raise request.error
        if stopped or request.finish_reason == "length":
            click.echo("(stopped)" if stopped else "(no room for more)", err=True)
        message = {"role": "assistant", "content": shown.content}
        return message | ({"reasoning_content": shown.thoughts} if shown.thoughts else {})

    def _save(self, name: str) -> None:
        path = Path(name)
        if not name or (path.exists() and path not in self._saved):
            reason = "/save FILE: name a file" if not name else f"{name} is there already; name another file"
            click.echo(reason, err=True)
            return
        try:
            path.write_text(json.dumps({"messages": self._messages}, ensure_ascii=False, indent=1) + "\n")
        except OSError as error:
            click.echo(f"{name} cannot be written: {error.strerror}", err=True)
            return
        self._saved.add(path)
        click.echo(f"saved {len(self._messages)} messages to {name}", err=True)


class _Shown:
    """Parts of an answer on the terminal: thoughts dimmed, or in brackets where there is no colour."""

    def __init__(self) -> None:
        self.thoughts = ""
        self.content = ""
        self._dim = console.coloured(sys.stdout)
        self._terminal = sys.stdout.isatty()
        self._thinking = False

    def take(self, parts: list[Part]) -> None:
        """Show what has come."""
        from hadron.tokenizer.answer import Reasoning
        from hadron.tokenizer.tool_calls import Content

        for part in parts:
            if isinstance(part, Reasoning):
                self.thoughts += part.text
                self._begin(thinking=True)
                self._write(part.text, dim=self._dim)
            elif isinstance(part, Content):
                self.content += part.text
                self._begin(thinking=False)
                self._write(part.text)
        sys.stdout.flush()

    def end(self) -> None:
        """Begin a new line."""
        if self._thinking and not self._dim:
            sys.stdout.write("]")
        sys.stdout.write("\n")
        sys.stdout.flush()

    def _write(self, text: str, *, dim: bool = False) -> None:
        text = console.visible(text) if self._terminal else text
        sys.stdout.write(click.style(text, dim=True) if dim else text)

    def _begin(self, *, thinking: bool) -> None:
        if thinking is self._thinking:
            return
        self._thinking = thinking
        if thinking:
            sys.stdout.write("" if self._dim else "[")
        else:
            sys.stdout.write("\n\n" if self._dim else "]\n\n")


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C fills the list instead of raising, so that no step is torn; a second one raises."""
    seen: list[int] = []

    def note(number: int, _: object) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(number)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, before)
