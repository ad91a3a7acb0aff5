"""Where randomness comes from: one `Source` a sample, which knows whether the sample is for training or held out.

Phrases come in two lists: what training may say, and what only the held-out sets say. A made-up name belongs to
one side by its checksum, so that the sides cannot meet. A held-out sample says about every second sentence in
held-out words, and at least one (`Source.novel` tells whether it did).
"""

from __future__ import annotations

import random
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

T = TypeVar("T")

ONSETS = ("b", "d", "f", "g", "h", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "tr", "sh")
VOWELS = "aeiou"
CODAS = ("", "", "", "l", "n", "r", "s", "m")

TRAIN_NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Ida Jack Karin Leo Maria Nora Oscar Paula Ravi Sara Tom Uma Victor "
    "Wendy Yusuf Zoe Adam Bella Carlos Diana Eric Fatima George Hana Ivan Julia Kofi Lina Mark Nina Omar Peter Rosa "
    "Sam Tina Walter Alice Bruno Chen Dora Elias Frida Gita Hugo Irene Jonas Kate Lars Mina Noah Olga Pablo".split()
)
TEST_NAMES = tuple(
    "Aisha Boris Celia Dmitri Elena Farid Gloria Hassan Ingrid Jorge Kira Liam Monika Nadia Otto Petra Ruben Silvia "
    "Tariq Vera".split()
)


@dataclass(frozen=True, slots=True)
class Phrases:
    """Ways to say one thing. train: what training says; test: what only held-out samples say."""

    train: tuple[str, ...]
    test: tuple[str, ...] = ()


def expand(*patterns: str, without: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Every way to take one alternative of each `[a|b]`; not those in the words of one of `without`, whoever is who and
    whatever adverb is in front."""
    found: dict[str, None] = {}
    held_out = {_core(phrase) for phrase in without}
    for pattern in patterns:
        parts = [part.split("|") for part in re.split(r"[\[\]]", pattern)]
        found |= dict.fromkeys(phrase for phrase in map("".join, product(*parts)) if _core(phrase) not in held_out)
    return tuple(found)


def _core(phrase: str) -> str:
    words = re.sub(r"^(then|later|now|in the end,|at the end,|please) ", "", phrase.lower())
    return re.sub(r"\{[nm]\}", "{}", words)


def is_held_out(text: str, of: int = 5) -> bool:
    """Whether a made-up name, or the numbers of a problem, belong to the held-out side: one in `of` does."""
    return zlib.crc32(text.encode()) % of == 0


class Source:
    """The random choices of one sample; the same key gives the same sample."""

    def __init__(self, key: str, *, held_out: bool = False) -> None:
        self.rng = random.Random(key)
        self.held_out = held_out
        self.novel = False

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.rng.random() < probability

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[int(self.rng.random() * len(options))]

    def some(self, options: Sequence[T], count: int) -> list[T]:
        """Different ones of the options, in random order."""
        return self.rng.sample(options, count)

    def number(self, low: int, high: int) -> int:
        """An integer from low to high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def phrase(self, phrases: Phrases) -> str:
        """A wording this side may use."""
        if self.held_out and phrases.test and self.chance(0.5):
            self.novel = True
            return self.pick(phrases.test)
        return self.pick(phrases.train)

    def made_name(self) -> str:
        """A name of random syllables, of this side."""
        while True:
            syllables = 2 if self.chance(0.5) else 3
            name = "".join(self.pick(ONSETS) + self.pick(VOWELS) for _ in range(syllables)) + self.pick(CODAS)
            known = name.capitalize() in TRAIN_NAMES or name.capitalize() in TEST_NAMES
            if is_held_out(name) is self.held_out and len(name) <= 9 and not known:
                return name.capitalize()

    def name(self, made: float = 0.45) -> str:
        """A person's name; made-up with this probability."""
        if self.chance(made):
            return self.made_name()
        return self.pick(TEST_NAMES if self.held_out else TRAIN_NAMES)

    def names(self, count: int, made: float = 0.45) -> list[str]:
        """Different names."""
        found: dict[str, None] = {}
        while len(found) < count:
            found[self.name(made)] = None
        return list(found)
