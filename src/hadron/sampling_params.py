"""`SamplingParams`: what a caller may ask for in a request.

A field left at None is taken from the checkpoint's `generation_config.json` where that has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from hadron.errors import RequestError

#: What a field that may come from the checkpoint is when neither says anything.
FALLBACKS: dict[str, float | int | None] = {
    "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": None,
}  # fmt: skip
#: What such a field is called in `generation_config.json`, where not the same.
_IN_FILE = {"max_tokens": "max_new_tokens"}
MOST_LOGPROBS = 100
MOST_CONTINUATIONS = 128


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a text must be, in one of five ways. Raises `RequestError` for none or several.

    json: a JSON schema, an object or its text. json_object: any JSON object. regex: the whole text matches.
    choice: one of these texts. grammar: in the syntax of Lark or GBNF.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        choice = self.choice
        if choice is not None and (
            isinstance(choice, str) or not isinstance(choice, Sequence) or not choice
            or not all(isinstance(text, str) and text for text in choice)
        ):  # fmt: skip
            raise _refused("structured_outputs.choice", choice, "a list of texts, none of them empty")
        for name in ("regex", "grammar"):
            if not isinstance(getattr(self, name), str | None):
                raise _refused(f"structured_outputs.{name}", getattr(self, name), "text")
        if not isinstance(self.json, str | Mapping | None):
            raise _refused("structured_outputs.json", self.json, "a JSON schema, as an object or as text")
        if self.json_object not in (None, True, False):
            raise _refused("structured_outputs.json_object", self.json_object, "true or false")
        if len(self._given) != 1:
            raise _refused("structured_outputs", self._given, f"one of {', '.join(STRUCTURED)}")

    @property
    def chosen(self) -> tuple[str, Any]:
        """Which of the five, and its value."""
        (name,) = self._given
        return name, getattr(self, name)

    @property
    def _given(self) -> list[str]:
        return [name for name in STRUCTURED if getattr(self, name) not in (None, False)]


#: The ways to say what a text must be.
STRUCTURED = tuple(field.name for field in fields(StructuredOutputsParams))


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to continue one prompt. Raises `RequestError` for values that make no sense.

    max_tokens: most tokens to generate; None takes the file's max_new_tokens, else goes on until the context is full.
    temperature: 0 takes the likeliest token (lowest id on a tie). top_k: of how many tokens to choose
    (0 or -1: all). top_p: of the smallest set with that much probability. min_p: only tokens at least
    this fraction as likely as the likeliest. The order is temperature, top_k, top_p, min_p.
    repetition_penalty: divides positive logits (multiplies negative ones) of tokens in prompt or text. From 0.01 to
    100: beyond, logits would not stay finite.
    frequency_penalty, presence_penalty: taken from a token's logit for each time it is in the text, or once.
    logit_bias: id -> what is added to its logit.
    seed: with the same one, a token depends on its prefix alone. None draws a fresh one.
    n: how many continuations; the i-th takes seed + i.
    stop: strings that end the text, not part of it. stop_token_ids: ids that end it, part of the ids.
    min_tokens: neither end nor stop before so many. ignore_eos: go on past the model's own end tokens.
    logprobs: for each token its log-probability and that of the N likeliest, before temperature and before
    everything else that changes logits. prompt_logprobs: the same for the tokens of the prompt.
    thinking_budget: most tokens of the thought that a prompt leaves open; then it is closed.
    skip_special_tokens: leave markup out of the text. structured_outputs: what the text must be, a
    `StructuredOutputsParams` or a mapping of its fields.
    """

    max_tokens: int | None = 16
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    n: int = 1
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    ignore_eos: bool = False
    thinking_budget: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _integer("max_tokens", self.max_tokens, 1, None)
        _number("temperature", self.temperature, 0.0, 1000.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_below=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _integer("seed", self.seed, 0, 2**64 - 1)
        _integer("n", self.n, 1, MOST_CONTINUATIONS)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        _integer("thinking_budget", self.thinking_budget, 0, None)
        _integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise _refused("stop", self.stop, "a string or a list of strings, none of them empty")
        ids = self.stop_token_ids
        if not isinstance(ids, Sequence) or isinstance(ids, str | bytes) or not all(_is_integer(i) for i in ids):
            raise _refused("stop_token_ids", ids, "a list of token ids")
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping) or not all(_is_integer(i) and _is_bias(x) for i, x in bias.items()):
            raise _refused("logit_bias", bias, "a mapping from token ids to numbers from -100 to 100")
        object.__setattr__(self, "structured_outputs", _structured(self.structured_outputs))
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(ids))

    @property
    def structured(self) -> StructuredOutputsParams | None:
        """`structured_outputs` as it was normalized."""
        assert isinstance(self.structured_outputs, StructuredOutputsParams | None)
        return self.structured_outputs

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it was normalized."""
        return tuple(self.stop)

    def with_defaults(self, generation_config: Mapping[str, Any]) -> SamplingParams:
        """These parameters with every None filled in: from the checkpoint where it has a usable value.

        `do_sample: false` in the file means temperature 0.
        """
        given, _ = checkpoint_defaults(generation_config)
        return replace(self, **{key: given[key] for key in FALLBACKS if getattr(self, key) is None})


def checkpoint_defaults(generation_config: Mapping[str, Any]) -> tuple[dict[str, Any], list[RequestError]]:
    """What a `generation_config.json` makes of the defaults, and why it cannot of some: those fall back."""
    values = {key: generation_config.get(_IN_FILE.get(key, key)) for key in FALLBACKS}
    if generation_config.get("do_sample") is False:
        values["temperature"] = 0.0
    usable: dict[str, Any] = dict(FALLBACKS)
    refused = []
    for key, value in values.items():
        if value is None:
            continue
        try:
            SamplingParams(**{key: value})
        except RequestError as error:
            refused.append(_refused(_IN_FILE.get(key, key), value, error.accepted))
        else:
            usable[key] = value
    return usable, refused


def listed_end_tokens(generation_config: Mapping[str, Any]) -> tuple[list[int], RequestError | None]:
    """The ids in its `eos_token_id`, one or a list; none, and why, where that is neither."""
    value: Any = generation_config.get("eos_token_id")
    listed = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_integer(i) for i in listed):
        return [], _refused("eos_token_id", value, "a token id or a list of them")
    return listed, None


#: The names of all parameters; command-line flags are called the same.
NAMES = tuple(field.name for field in fields(SamplingParams))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _structured(given: Any) -> StructuredOutputsParams | None:
    if isinstance(given, StructuredOutputsParams | None):
        return given
    if not isinstance(given, Mapping) or not set(given) <= set(STRUCTURED):
        raise _refused("structured_outputs", given, f"an object with one of {', '.join(STRUCTURED)}")
    return StructuredOutputsParams(**given)


def _is_bias(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -100 <= value <= 100


def _integer(name: str, value: int | None, least: int, most: int | None) -> None:
    if value is None:
        return
    if not _is_integer(value) or value < least or (most is not None and value > most):
        raise _refused(name, value, f"an integer of at least {least}" + ("" if most is None else f", at most {most}"))


def _number(name: str, value: float | None, least: float, most: float, *, open_below: bool = False) -> None:
    if value is None:
        return
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise _refused(name, value, f"a number from {least:g} to {most:g}" + (", not 0" if open_below else ""))
    if open_below and value == least:
        raise _refused(name, value, f"a number above {least:g}, at most {most:g}")


def _refused(name: str, value: object, accepted: str) -> RequestError:
    return RequestError(
        f"{name} cannot be used",
        where=name,
        found=repr(value)[:120],
        accepted=accepted,
        hint=f"change {name}, or leave it out for the default",
    )
