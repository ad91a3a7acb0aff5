"""`hadron bench serve`: any OpenAI-compatible server under load. It starts none, and loads no tensor library."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from hadron.errors import UsageError


@click.command(
    epilog="Exit codes: 0 done, whatever failed is in the report; 1 no request was answered; 2 wrong usage, or no "
    "server that answers."
)
@click.option(
    "--base-url", default="http://127.0.0.1:8000/v1", show_default=True, metavar="URL", help="Of the server, up to /v1."
)
@click.option("--model", metavar="NAME", help="What the server calls the model.  [default: its first]")
@click.option("--api-key", metavar="KEY", help="Sent as a bearer token.")
@click.option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="Which interface to send to.",
)
@click.option("--num-prompts", type=click.IntRange(min=1), help="Requests to send.  [default: 100, or --duration's]")
@click.option("--duration", type=click.FloatRange(min=0, min_open=True), metavar="S", help="Send for so many seconds.")
@click.option("--max-concurrency", type=click.IntRange(min=1), help="Keep so many requests running.  [default: 1]")
@click.option(
    "--request-rate",
    type=click.FloatRange(min=0, min_open=True),
    metavar="R",
    help="Instead: send so many a second, as a Poisson process.",
)
@click.option(
    "--input-len",
    default="512",
    show_default=True,
    metavar="LENGTH",
    help="Words of a prompt, or ids: 512, uniform:A:B, normal:MEAN:SD or lognormal:MEAN:SD.",
)
@click.option("--output-len", default="128", show_default=True, metavar="LENGTH", help="Most tokens of an answer.")
@click.option(
    "--prefix-len",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Words or ids before them that prompts share.",
)
@click.option(
    "--num-prefixes",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="How many different shared prefixes, taken in turn.",
)
@click.option("--prompt-ids", metavar="A-B", help="Send token ids drawn from this range instead of words.")
@click.option(
    "--dataset", type=click.Path(path_type=Path), metavar="FILE", help="Send the prompts of a JSONL file, in turn."
)
@click.option("--ignore-eos", is_flag=True, help="Ask for answers of full length, which vLLM and Hadron understand.")
@click.option("--extra-body", metavar="JSON", help='Fields of every request, such as {"temperature": 0}.')
@click.option("--seed", type=int, default=0, show_default=True, help="Of lengths, prompts and arrivals.")
@click.option(
    "--num-warmups",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Requests sent before, one after the other.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Seconds after which a request has failed.",
)
@click.option(
    "--goodput", metavar="NAME:MS,...", help="Count requests within bounds: ttft:500,itl:50; also tpot, e2el."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (docs/bench.md).")
def serve(as_json: bool, **given: Any) -> int:
    """Measure a running server: latencies, throughput, goodput.

    It sends random words to an OpenAI-compatible server, such as `hadron serve` starts, and reads the answers as they
    stream.

    \b
    Examples:
      hadron bench serve --max-concurrency 16 --input-len lognormal:512:256 --output-len 64 --ignore-eos
      hadron bench serve --base-url http://127.0.0.1:8000/v1 --request-rate 4 --duration 60 --goodput ttft:500,itl:50
    """
    from hadron.bench.serve import report, run
    from hadron.cli import console

    asked = _asked(**given)
    unit = "seconds" if asked.requests is None else "requests"
    with console.progress("sending", unit=unit) as advance:
        found = run.measure(asked, advance)
    if as_json:
        import msgspec

        sys.stdout.flush()
        sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n")
    else:
        console.write(report.lines(found))
    return 0 if found.answered else 1


def _asked(
    *, base_url: str, endpoint: str, num_prompts: int | None, duration: float | None, max_concurrency: int | None,
    request_rate: float | None, input_len: str, output_len: str, prefix_len: int, num_prefixes: int,
    prompt_ids: str | None, dataset: Path | None, ignore_eos: bool, extra_body: str | None, seed: int,
    num_warmups: int, goodput: str | None, **rest: Any,
) -> Any:  # fmt: skip
    from hadron.bench.serve.load import CHAT, Lengths, Load, read_lines
    from hadron.bench.serve.run import Asked

    if request_rate is not None and max_concurrency is not None:
        raise _refused("two ways to send exclude each other", "--request-rate and --max-concurrency",
                       "both", "one of them", "a rate sends by the clock, whatever is still running")  # fmt: skip
    if prompt_ids is not None and (endpoint == CHAT or dataset is not None):
        raise _refused("token ids cannot be sent", "--prompt-ids", "--dataset" if dataset else "--endpoint chat",
                       "--endpoint completions, and no --dataset", "leave it out")  # fmt: skip
    base_url = base_url.rstrip("/")
    if not base_url.startswith(("http://", "https://")):
        raise _refused("the server's address cannot be used", "--base-url", repr(base_url)[:80],
                       "http://HOST:PORT/v1 or https://...", "see `hadron bench serve --help`")  # fmt: skip
    load = Load(
        input_len=Lengths.parse(input_len, "--input-len"),
        output_len=Lengths.parse(output_len, "--output-len"),
        prefixes=num_prefixes,
        prefix_len=prefix_len,
        ids=_id_range(prompt_ids),
        seed=seed,
        lines=() if dataset is None else read_lines(dataset, endpoint),
    )
    return Asked(
        base_url=base_url if base_url.endswith("/v1") else f"{base_url}/v1",
        endpoint=endpoint,
        load=load,
        requests=num_prompts or (None if duration is not None else len(load.lines) or 100),
        duration=duration,
        rate=request_rate,
        concurrency=max_concurrency or 1,
        warmups=num_warmups,
        extra={**({"ignore_eos": True} if ignore_eos else {}), **_object(extra_body)},
        bounds=_bounds(goodput),
        **rest,
    )


def _id_range(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and int(first) <= int(last) < 2**31):
        raise _refused("a range of token ids cannot be read", "--prompt-ids", repr(text)[:80],
                       "two whole numbers with a dash between them, such as 300-999",
                       "take ids that are words in the model's vocabulary")  # fmt: skip
    return int(first), int(last)


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = {} if text is None else json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise _refused("fields for every request cannot be read", "--extra-body", repr(text)[:80],
                       'a JSON object, such as {"temperature": 0}', "quote it for the shell")  # fmt: skip
    return value


def _bounds(text: str | None) -> dict[str, float]:
    from hadron.bench.serve.summary import BOUNDS

    found: dict[str, float] = {}
    for word in [] if text is None else text.replace(",", " ").split() or [""]:
        name, _, value = word.partition(":")
        try:
            most = float(value)
        except ValueError:
            most = -1.0
        if name not in BOUNDS or not most > 0:
            raise _refused("bounds for goodput cannot be read", "--goodput", repr(word)[:80],
                           f"names and milliseconds, such as ttft:500,itl:50; names are {', '.join(BOUNDS)}",
                           "separate them with commas")  # fmt: skip
        found[name] = most
    return found


def _refused(what: str, where: str, found: str, accepted: str, hint: str) -> UsageError:
    return UsageError(what, where=where, found=found, accepted=accepted, hint=hint)
