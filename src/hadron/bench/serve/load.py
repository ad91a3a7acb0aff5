"""What is sent to a server and when: lengths, prompts and arrivals, the same ones for the same seed.

Lengths, words and arrivals are drawn from streams of their own, so that another rate sends the same prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from hadron.errors import UsageError

CHAT, COMPLETIONS = "chat", "completions"
ENDPOINTS = (COMPLETIONS, CHAT)

#: Short and common, so that most tokenizers make one token of a word and the blank before it.
_COMMON = (
    "the of and to in is it you that he was for on are with as his they be at one have this from or had by hot but "
    "some what there we can out other were all your when up use word how said each she which do their time if will "
    "way about many then them would like so these her long make thing see him two has look more day could go come"
)
WORDS = tuple(_COMMON.split())


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of numbers of tokens. first, second: what its name says; at least 1 is drawn."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str, flag: str) -> Lengths:
        """`512`, `uniform:128:1024`, `normal:MEAN:DEVIATION` or `lognormal:MEAN:DEVIATION`; `UsageError`."""
        kind, _, rest = text.partition(":") if ":" in text else ("fixed", "", text)
        try:
            values = [float(word) for word in rest.split(":")]
        except ValueError:
            values = []
        wanted = {"fixed": 1, "uniform": 2, "normal": 2, "lognormal": 2}.get(kind)
        usable = wanted == len(values) and all(0 <= value <= 1 << 24 for value in values) and values[0] >= 1
        if not usable or (kind == "uniform" and values[0] > values[1]):
            raise UsageError(
                "a distribution of lengths cannot be read",
                where=flag,
                found=repr(text)[:80],
                accepted="512, uniform:LEAST:MOST, normal:MEAN:DEVIATION or lognormal:MEAN:DEVIATION, in tokens",
                hint="such as uniform:128:1024",
            )
        return cls(kind, *values)

    def draw(self, random: Random) -> int:
        """One length."""
        if self.kind == "uniform":
            return random.randint(math.ceil(self.first), math.floor(self.second))
        if self.kind == "normal":
            return max(1, round(random.gauss(self.first, self.second)))
        if self.kind == "lognormal":
            variance = math.log1p((self.second / self.first) ** 2)
            return max(1, round(random.lognormvariate(math.log(self.first) - variance / 2, math.sqrt(variance))))
        return round(self.first)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request. content: a text, token ids, or messages."""

    content: str | list[int] | list[dict[str, Any]]
    max_tokens: int

    def fields(self, endpoint: str) -> dict[str, Any]:
        """What the request's body says of it."""
        if endpoint == COMPLETIONS:
            return {"prompt": self.content, "max_tokens": self.max_tokens}
        messages = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        return {"messages": messages, "max_tokens": self.max_tokens}


@dataclass(frozen=True, slots=True)
class Load:
    """What to send. input_len: words or ids behind the shared prefix. prefixes: how many different ones, taken in
    turn; prefix_len: of each. ids: first and last token id to draw from; None draws words. lines: of a file, sent in
    turn instead of random prompts; 0 tokens to generate stands for a drawn number."""

    input_len: Lengths = field(default_factory=lambda: Lengths("fixed", 512))
    output_len: Lengths = field(default_factory=lambda: Lengths("fixed", 128))
    prefixes: int = 1
    prefix_len: int = 0
    ids: tuple[int, int] | None = None
    seed: int = 0
    lines: tuple[Prompt, ...] = ()

    def prompts(self, purpose: str = "measured") -> Iterator[Prompt]:
        """Without end. purpose: prompts for another one are others, with the same prefixes."""
        sizes, words = self._random(f"{purpose} lengths"), self._random(f"{purpose} words")
        if self.lines:
            for line in cycle(self.lines):
                yield line if line.max_tokens else Prompt(line.content, self.output_len.draw(sizes))
        shared = self._random("prefixes")
        heads = [self._draw(shared, self.prefix_len) for _ in range(self.prefixes)]
        for i in count():
            body = self._draw(words, self.input_len.draw(sizes))
            content: Any = heads[i % len(heads)] + body
            yield Prompt(content if self.ids is not None else " ".join(content), self.output_len.draw(sizes))

    def arrivals(self, rate: float) -> Iterator[float]:
        """Seconds at which requests are sent, without end: a Poisson process of `rate` a second, from 0 on."""
        at, random = 0.0, self._random("arrivals")
        while True:
            yield at
            at += random.expovariate(rate)

    def _random(self, purpose: str) -> Random:
        return Random(f"{self.seed} {purpose}")

    def _draw(self, random: Random, length: int) -> list[Any]:
        if self.ids is None:
            return random.choices(WORDS, k=length)
        first, last = self.ids
        return [random.randint(first, last) for _ in range(length)]


def read_lines(path: Path, endpoint: str) -> tuple[Prompt, ...]:
    """The prompts of a JSONL file: objects with `prompt` (a text, or token ids) or `messages`, and `max_tokens`.

    `UsageError` names the first line that is none, or that `endpoint` cannot take.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UsageError(
            "the file of prompts cannot be read", where="--dataset", found=f"{path}: {error.strerror}",
            accepted="a file of JSON objects, one a line", hint="check the path",
        ) from error  # fmt: skip
    found = [_line(line, endpoint, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise _refused(str(path), "an empty file")
    return tuple(found)


def _line(line: bytes, endpoint: str, where: str) -> Prompt:
    try:
        value = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise _refused(where, f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise _refused(where, f"JSON that is no object: {line[:60].decode(errors='replace')}")
    most = value.get("max_tokens", 0)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise _refused(where, f"max_tokens {most!r}"[:80])
    text, messages = value.get("prompt"), value.get("messages")
    if isinstance(messages, list) and endpoint == CHAT:
        return Prompt(messages, most)
    if isinstance(text, str) or (endpoint == COMPLETIONS and isinstance(text, list) and all(map(_is_id, text))):
        return Prompt(text, most)
    raise _refused(where, "no prompt that /" + ("chat/completions" if endpoint == CHAT else "completions") + " takes")


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _refused(where: str, found: str) -> UsageError:
    return UsageError(
        "a line of the file of prompts cannot be used", where=where, found=found,
        accepted='{"prompt": "a text"}, for completions also {"prompt": [5, 9]}, for chat also {"messages": [...]}; '
        'beside it "max_tokens"', hint="one JSON object a line",
    )  # fmt: skip
