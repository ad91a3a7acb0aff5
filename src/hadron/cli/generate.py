"""`hadron generate`: continue a prompt.

Text is written as it comes; without a tokenizer, ids are. Everything about progress goes to stderr, so
that stdout holds the continuation and nothing else.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hadron.cli import console
from hadron.cli.options import (
    GroupedCommand,
    engine_options,
    logit_bias,
    option,
    sampling_options,
    structured_outputs,
    token_ids,
)
from hadron.errors import HadronError, UsageError

if TYPE_CHECKING:
    from hadron.engine.events import TokenEvent
    from hadron.engine.request import Logprob, RequestOutput
    from hadron.llm import LLM, Prompt
    from hadron.sampling_params import SamplingParams

    Row = dict[int, Logprob]

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "glm53f-tiny-mxfp4"
SHIPPED_NOTE = "note: this is the small model that ships with Hadron; it knows little (docs/models.md)"

#: Seconds of work before a progress bar is worth showing.
_PATIENCE = 0.5
_UNITS = {"headers": "shards", "answers": "requests", "log-likelihoods": "requests", "windows": "windows"}


@click.command(
    cls=GroupedCommand,
    epilog="Exit codes: 0 done; 1 the checkpoint or its results have errors; 2 wrong usage or unreadable input; "
    "130 interrupted.",
)
@click.argument("model", required=False)
@click.argument("source", metavar="[-]", required=False)
@option("--prompt", metavar="TEXT", group="The prompt", help="Text to continue.")
@option("--prompt-ids", metavar="IDS", group="The prompt", help="Token ids to continue, such as 5,9,2.")
@option(
    "--apply-chat-template",
    is_flag=True,
    group="The prompt",
    help="Take the text for what a user says, and answer it.",
)
@sampling_options
@engine_options
@option("--json", "as_json", is_flag=True, group="Output", help="Print one JSON object when done.")
def command(
    model: str | None,
    source: str | None,
    prompt: str | None,
    prompt_ids: str | None,
    apply_chat_template: bool,
    as_json: bool,
    stop_token_ids: str | None,
    **settings: Any,
) -> int:
    """Continue a prompt with MODEL: a folder, or a Hub id, which is downloaded.

    Without MODEL, the small model that ships with Hadron is used, which knows little beyond word problems. `-`
    reads the prompt from standard input.

    \b
    Examples:
      hadron generate --apply-chat-template --prompt 'Who are you?'
      hadron generate path/to/checkpoint --prompt 'The river is' --max-tokens 32
      hadron generate path/to/checkpoint --prompt-ids 5,9,2 --temperature 0 --json
      echo 'The river is' | hadron generate path/to/checkpoint -
    """
    try:
        return _generate(model, source, prompt, prompt_ids, apply_chat_template, as_json, stop_token_ids, settings)
    except HadronError as error:
        if as_json:
            click.echo(json.dumps({"error": error.parts()}, ensure_ascii=False))
        raise


def _generate(
    model: str | None,
    source: str | None,
    prompt: str | None,
    prompt_ids: str | None,
    apply_chat_template: bool,
    as_json: bool,
    stop_token_ids: str | None,
    settings: dict[str, Any],
) -> int:
    if model == "-" and source is None:
        model, source = None, "-"
    text = _prompt(source, prompt, prompt_ids)
    if apply_chat_template and not isinstance(text, str):
        raise UsageError(
            "the chat template takes text",
            where="--apply-chat-template",
            found="--prompt-ids",
            accepted="--prompt TEXT, or - to read standard input",
            hint="leave the flag out: ids are taken as they are",
        )
    from hadron.sampling_params import NAMES, SamplingParams

    settings["logit_bias"] = logit_bias(settings["logit_bias"])
    settings["structured_outputs"] = structured_outputs(settings["structured_outputs"])
    settings["stop_token_ids"] = token_ids(stop_token_ids, "--stop-token-ids") or ()
    params = SamplingParams(**{name: settings.pop(name) for name in NAMES})
    if model is None:
        click.echo(SHIPPED_NOTE, err=True)
    llm = load(model or str(SHIPPED), settings)
    if apply_chat_template:
        answer = partial(llm.chat, [{"role": "user", "content": text}], params)
    else:
        answer = partial(llm.generate, text, params)
    if as_json:
        (output,) = answer()
        click.echo(json.dumps({"outputs": output_values(output)}, ensure_ascii=False))
    else:
        _stream(llm, answer, params)
    return 0


def _prompt(source: str | None, prompt: str | None, prompt_ids: str | None) -> Prompt:
    """The one prompt that was given; `UsageError` for none or several."""
    given = [
        name
        for name, value in (("--prompt", prompt), ("--prompt-ids", prompt_ids), (repr(source), source))
        if value is not None
    ]
    if len(given) != 1 or source not in (None, "-"):
        raise UsageError(
            "there must be one prompt",
            where="hadron generate",
            found=" and ".join(given) or "none",
            accepted="one of --prompt TEXT, --prompt-ids IDS, or - to read standard input",
            hint="hadron generate --prompt 'The river is'",
        )
    ids = token_ids(prompt_ids, "--prompt-ids")
    if ids is not None:
        return {"prompt_token_ids": ids}
    return _standard_input() if prompt is None else prompt


def _standard_input() -> str:
    """All of stdin, without the newline that ends it."""
    data = sys.stdin.buffer.read()
    try:
        return data.decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UsageError(
            "standard input is not text",
            where=f"byte {error.start}",
            found=f"0x{data[error.start]:02x}",
            accepted="text in UTF-8",
            hint="convert it, with iconv for example",
        ) from error


def load(model: str, settings: dict[str, Any]) -> LLM:
    """The model, with progress on stderr. settings: the keywords of `LLM`."""
    from hadron.llm import LLM

    with Bars() as bars:
        return LLM(model, report=bars.report, **settings)


class Bars(ExitStack):
    """One progress bar after another, for whatever is being done; none for what is done at once."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._what = ""
        self._since = 0.0
        self._bar: console.Progress | None = None

    def report(self, what: str, done: int, total: int) -> None:
        """Show how far `what` has come; from any thread."""
        with self._lock:
            if what != self._what:
                self.close()
                self._what, self._since, self._bar = what, time.monotonic(), None
            if self._bar is None and done < total and time.monotonic() - self._since > _PATIENCE:
                self._bar = self.enter_context(console.progress(what, unit=_UNITS.get(what, "bytes")))
            if self._bar is not None:
                self._bar(done, total)


def _stream(llm: LLM, answer: Callable[..., list[RequestOutput]], params: SamplingParams) -> None:
    out = _Out()

    def on_token(_: int, event: TokenEvent) -> None:
        if params.n == 1:  # several come at once, and are written one after another when they are done
            out.write(_piece(llm, event.token_id, event.text))

    try:
        (output,) = answer(on_token=on_token)
    except BaseException:  # a failed step, or an interrupt: what is said next begins its own line
        out.end_line()
        raise
    for completion in output.outputs:
        if params.n > 1:
            out.write(f"[{completion.index}] ")
            out.write("".join(f"{i} " for i in completion.token_ids) if completion.text is None else completion.text)
        out.write("\n")
        for line in _logprob_lines(completion.token_ids, completion.logprobs):
            out.write(line + "\n")
    for line in _logprob_lines(output.prompt_token_ids, output.prompt_logprobs):
        out.write(line + "\n")
    if output.num_draft_tokens:
        click.echo(_accepted(output, llm.stats.drafts), err=True)


def _accepted(output: RequestOutput, checks: int) -> str:
    drafted, right = output.num_draft_tokens, output.num_accepted_tokens
    return (
        f"note: {right} of {drafted} guesses were right ({right / drafted:.0%}); {1 + right / checks:.2f} tokens a step"
    )


def _piece(llm: LLM, token: int | None, text: str) -> str:
    return text if llm.has_tokenizer else f"{token} "


class _Out:
    """stdout: on a terminal piece by piece and without escape codes, else as it is."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._open = False

    def write(self, text: str) -> None:
        """Write some of a text."""
        if text:
            sys.stdout.write(console.visible(text) if self._terminal else text)
            self._open = not text.endswith("\n")
        if self._terminal:
            sys.stdout.flush()

    def end_line(self) -> None:
        """Begin a new line, where one is begun."""
        if self._open:
            self.write("\n")


def _logprob_lines(ids: list[int], rows: Sequence[Row | None] | None) -> list[str]:
    lines = []
    for token, row in zip(ids, rows, strict=True) if rows is not None else ():
        if row is None:
            continue
        entries = [(token, row[token]), *((other, entry) for other, entry in row.items() if other != token)]
        cells = [
            f"{i} {json.dumps(e.decoded_token, ensure_ascii=False) + ' ' if e.decoded_token is not None else ''}"
            f"{e.logprob:.4f}"
            for i, e in entries
        ]
        lines.append("  ".join(cells))
    return lines


def output_values(output: RequestOutput) -> list[dict[str, Any]]:
    """A prompt's continuations as JSON has them: `prompt_token_ids, token_ids, text, finish_reason, logprobs`,
    and `prompt_logprobs` where they were asked for."""
    prompt: dict[str, Any] = {"prompt_token_ids": output.prompt_token_ids}
    if output.prompt_logprobs is not None:
        prompt["prompt_logprobs"] = _rows_value(output.prompt_token_ids, output.prompt_logprobs)
    return [
        prompt
        | {
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "logprobs": _rows_value(completion.token_ids, completion.logprobs),
        }
        for completion in output.outputs
    ]


def _rows_value(ids: list[int], rows: Sequence[Row | None] | None) -> list[dict[str, Any] | None] | None:
    if rows is None:
        return None
    return [
        None if row is None else {
            "token_id": token,
            "logprob": row[token].logprob,
            "rank": row[token].rank,
            "text": row[token].decoded_token,
            "top": [{"token_id": i, "logprob": e.logprob, "rank": e.rank, "text": e.decoded_token}
                    for i, e in row.items()],
        }
        for token, row in zip(ids, rows, strict=True)
    ]  # fmt: skip
