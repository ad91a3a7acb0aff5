"""Options that commands share, in the groups under which `--help` lists them.

Every field of `EngineConfig` and of `SamplingParams` has a flag of the same name; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import click

from hadron.cache.spec import KV_CACHE_DTYPES
from hadron.engine import config as engine
from hadron.engine.config import EngineConfig
from hadron.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

_DEFAULTS = EngineConfig()

_DRAFTS = "hadron.num_speculative_tokens"

NUMA = "[auto|none|interleave|bind:<node>]"
NUMA_HELP = "On which NUMA nodes the weights lie (docs/native.md)."


class GroupedOption(click.Option):
    """An option that knows the heading it is listed under."""

    def __init__(self, *arguments: Any, group: str, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.group = group


class GroupedCommand(click.Command):
    """A command whose help lists its options under their headings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one section for each heading, in the order of the options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx) if isinstance(parameter, click.Option) else None
            if record is not None:
                sections.setdefault(getattr(parameter, "group", "Other"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def option(*arguments: Any, group: str, **settings: Any) -> Callable[[F], F]:
    """`click.option` under a heading."""
    return click.option(*arguments, cls=GroupedOption, group=group, **settings)


def token_ids(text: str | None, flag: str) -> list[int] | None:
    """Ids written `1,2,3` or with blanks between them; `UsageError` for anything else."""
    if text is None:
        return None
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(
            "token ids cannot be read",
            where=flag,
            found=repr(text)[:80],
            accepted="whole numbers with commas between them, such as 5,9,2",
            hint="use --prompt for text",
        ) from None


def structured_outputs(text: str | None) -> dict[str, Any] | None:
    """A JSON object; `UsageError` for anything else."""
    if text is None:
        return None
    return json_object(text, "what the text must be", "--structured-outputs", '{"choice": ["yes", "no"]}')


def json_object(text: str, what: str, flag: str, example: str) -> dict[str, Any]:
    """What `flag` was given; `UsageError`, beginning with `what`, for anything but a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        value = error
    if isinstance(value, dict):
        return value
    raise UsageError(
        f"{what} cannot be read",
        where=flag,
        found=f"{text[:80]!r}" + (f": {value}" if isinstance(value, Exception) else ""),
        accepted=f"a JSON object, such as {example}",
        hint="quote it for the shell",
    )


def logit_bias(text: str | None) -> dict[int, float] | None:
    """Biases written `5=-1.5,9=2`; `UsageError` for anything else."""
    if text is None:
        return None
    try:
        pairs = [word.split("=") for word in text.split(",")]
        return {int(token): float(bias) for token, bias in pairs}
    except ValueError:
        raise UsageError(
            "biases of logits cannot be read",
            where="--logit-bias",
            found=repr(text)[:80],
            accepted="ids and numbers, such as 5=-1.5,9=2",
            hint="separate them with commas",
        ) from None


def _speculative_config(ctx: click.Context, _: click.Parameter, text: str | None) -> dict[str, Any] | None:
    """A JSON object, or what the short flag stands for; `UsageError` for anything else, and for both."""
    count = ctx.meta.get(_DRAFTS)
    if text is None:
        return None if count is None else {"method": "mtp", "num_speculative_tokens": count}
    if count is not None:
        raise UsageError(
            "drafting is asked for twice", where="--speculative-config", found="--num-speculative-tokens beside it",
            accepted="one of the two", hint=f"--num-speculative-tokens {count} is enough",
        )  # fmt: skip
    example = '{"method": "mtp", "num_speculative_tokens": 2}'
    return json_object(text, "how to draft", "--speculative-config", example)


def _short(ctx: click.Context, _: click.Parameter, count: int | None) -> None:
    ctx.meta[_DRAFTS] = count


def _choice(name: str, words: tuple[str, ...], text: str) -> Callable[[F], F]:
    return option(
        f"--{name.replace('_', '-')}", name, type=click.Choice(words), default=getattr(_DEFAULTS, name),
        show_default=True, group="How to run it", help=text,
    )  # fmt: skip


def _number(name: str, kind: type[int] | type[float], text: str) -> Callable[[F], F]:
    return option(
        f"--{name.replace('_', '-')}", name, type=kind, default=getattr(_DEFAULTS, name), show_default=True,
        group="How to run it", help=text,
    )  # fmt: skip


def _stacked(decorators: list[Callable[[F], F]], function: F) -> F:
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def plan_options(function: F) -> F:
    """The fields of `Wishes` but for drafting, which a plan and an engine are asked for in different words."""
    group = "How to run it"
    return _stacked(
        [
            _choice("kernels", engine.KERNELS, "Whose kernels to use."),
            _choice("dtype", engine.DTYPES, "Of activations and caches."),
            _choice(
                "kv_cache_dtype", KV_CACHE_DTYPES, "Of the latents in the cache; auto: as activations.",
            ),
            _choice("device", engine.DEVICES, "Where weights and caches are."),
            _choice(
                "activation_quantization", engine.ACTIVATION_QUANTIZATION,
                "declared: emulate what the checkpoint declares for activations.",
            ),
            _choice("mla_prefill", engine.MLA_PREFILL, "How prompts are attended to."),
            option("--max-model-len", type=int, group=group,
                   help="Most tokens of one request.  [default: what fits, at most the model's]"),
            _number("max_num_seqs", int, "Most requests that run at a time."),
            option("--num-pages", type=int, group=group,
                   help="Pages of 64 tokens in the cache.  [default: what --memory-utilization leaves]"),
            _number("memory_utilization", float, "Fraction of the memory for weights and caches."),
            option("--kv-cache-memory-bytes", type=int, group=group,
                   help="Bytes of all caches, in place of that fraction."),
            option("--enable-prefix-caching/--no-enable-prefix-caching", default=_DEFAULTS.enable_prefix_caching,
                   show_default=True, group=group, help="Take the beginnings of prompts from the cache."),
        ],
        function,
    )  # fmt: skip


def engine_options(function: F) -> F:
    """The fields of `EngineConfig`."""
    group = "How to run it"
    return _stacked(
        [
            plan_options,
            option("--threads", type=int, group=group, help="Threads to compute with.  [default: torch's choice]"),
            _number("max_num_batched_tokens", int, "Most tokens of one step, of all requests."),
            option("--prefix-cache-dir", metavar="DIR", group=group,
                   help="Keep the beginnings of prompts in this folder, for later runs."),
            _number("prefix_cache_bytes", int, "Most bytes in that folder for one model and set of options."),
            option("--debug-nonfinite", is_flag=True, group=group,
                   help="Name the layer that first computes NaN or infinity."),
            option("--prefault", is_flag=True, group=group, help="Read the weights before the first token."),
            option("--mlock", is_flag=True, group=group, help="Keep the weights in memory."),
            option("--numa", default=_DEFAULTS.numa, show_default=True, group=group, metavar=NUMA, help=NUMA_HELP),
            option("--num-speculative-tokens", type=int, metavar="K", group=group, is_eager=True, expose_value=False,
                   callback=_short,
                   help="Let the model's own layer for it guess K tokens ahead; texts are the same."),
            option("--speculative-config", metavar="JSON", group=group, callback=_speculative_config,
                   help='The same, as {"method": "mtp", "num_speculative_tokens": K}.'),
        ],
        function,
    )  # fmt: skip


def sampling_options(function: F) -> F:
    """The fields of `SamplingParams`."""
    group = "How to continue"
    own = "  [default: generation_config.json's, else {}]"
    return _stacked(
        [
            option("--max-tokens", type=int, default=256, show_default=True, group=group,
                   help="Most tokens to generate."),
            option("--temperature", type=float, group=group,
                   help="0 takes the likeliest token." + own.format("1")),
            option("--top-p", type=float, group=group,
                   help="Choose from the smallest set with this probability." + own.format("1")),
            option("--top-k", type=int, group=group,
                   help="Choose from this many tokens; 0: all." + own.format("0")),
            option("--min-p", type=float, group=group,
                   help="Only tokens at least this fraction as likely as the likeliest." + own.format("0")),
            option("--repetition-penalty", type=float, group=group,
                   help="Make tokens of prompt and text less likely, above 1." + own.format("1")),
            option("--frequency-penalty", type=float, default=0.0, show_default=True, group=group,
                   help="Taken from a token's logit for each time it is in the text."),
            option("--presence-penalty", type=float, default=0.0, show_default=True, group=group,
                   help="Taken from the logit of each token that is in the text."),
            option("--logit-bias", metavar="ID=X,...", group=group, help="Added to the logits of these ids."),
            option("--n", type=int, default=1, show_default=True, group=group, help="How many continuations."),
            option("--min-tokens", type=int, default=0, show_default=True, group=group,
                   help="Neither end nor stop before so many tokens."),
            option("--seed", type=int, group=group, help="Repeat the same choices.  [default: a fresh one]"),
            option("--stop", multiple=True, metavar="TEXT", group=group,
                   help="End before this text; may be given several times."),
            option("--stop-token-ids", metavar="IDS", group=group, help="End after one of these ids."),
            option("--ignore-eos", is_flag=True, group=group, help="Go on past the model's end tokens."),
            option("--thinking-budget", type=int, metavar="N", group=group,
                   help="Close the thought that the prompt leaves open after N tokens."),
            option("--logprobs", type=int, metavar="N", group=group,
                   help="Give each token's log-probability and the N likeliest."),
            option("--prompt-logprobs", type=int, metavar="N", group=group,
                   help="The same for the tokens of the prompt."),
            option("--structured-outputs", metavar="JSON", group=group,
                   help="What the text must be: an object with one of json (a schema), regex, choice, grammar, "
                   "json_object."),
            option("--skip-special-tokens/--no-skip-special-tokens", default=True, show_default=True, group=group,
                   help="Leave markup such as <|user|> out of the text."),
        ],
        function,
    )  # fmt: skip
