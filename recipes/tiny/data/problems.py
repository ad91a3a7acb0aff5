"""Arithmetic word problems of one to four steps, a short chain of thought, a final number.

A problem is a story: sentences, and the steps they ask for (`37+25=62`). Where somebody gives to somebody, the thought
says first who does (`Hassan:37+25=62`): whether that is a plus then shows in the name. No number has more than two
digits: three are several times the training for a model this small, and say no more about an engine. `held_out`
samples use numbers that training never sees together (by the checksum of the steps), names of their own, and some
sentences of their own.
"""

from __future__ import annotations

from .about import small_talk
from .markup import PROBLEM, Message, Sample, assistant, user
from .problem_phrases import (
    ADD,
    BARE,
    BOTH,
    CHANGE,
    COST,
    DIVIDE,
    EXTRA,
    FEWER,
    GET_OFF,
    GET_ON,
    GROUPED,
    LEFT,
    MORE,
    NOW,
    PRICE,
    RATE,
    RATE_ADD,
    RATE_ASK,
    RATE_SUBTRACT,
    RIDE,
    RIDERS,
    SHARED,
    START,
    SUBTRACT,
    THAT_MANY,
    TIMES,
    WHO,
)
from .source import Phrases, Source, is_held_out

THINGS = (
    "apples books pens coins stamps cards stones shells marbles sweets cookies plums pears eggs roses cups plates "
    "tickets balls toys stickers beads keys boxes candles nuts lemons pencils photos maps"
).split()
GROUPS = ("boxes", "bags", "baskets", "shelves", "rows", "packs", "jars", "crates")
SYSTEM = ("You are a helpful assistant.", "Think step by step.", "You solve word problems.", "Answer the question.")

LARGEST = 99
SPELT = {"+": " plus ", "-": " minus ", "*": " times ", "/": " divided by "}


class Story:
    """A problem being told: sentences, steps, and the running value."""

    def __init__(self, source: Source) -> None:
        self.source = source
        first, second = source.names(2)
        self.words = {"n": first, "m": second, "t": source.pick(THINGS), "g": source.pick(GROUPS)}
        self.pronoun = source.pick(("he", "she"))
        self.sentences: list[str] = []
        self.steps: list[str] = []
        self.thoughts: list[str] = []  # the steps, some with a name in front
        self.value = 0
        self._alone = True  # nobody else was named yet, so that a pronoun is clear
        self._joins = False  # the sentence before begins with the first name and may go on with "and"

    def say(self, phrases: Phrases, **numbers: object) -> None:
        """One more sentence."""
        self._say(self.source.phrase(phrases), **numbers)

    def _say(self, phrase: str, **numbers: object) -> None:
        """One more sentence: now and then with a pronoun, or joined to the one before."""
        self._alone = self._alone and "{m}" not in phrase
        mine = phrase.startswith("{n} ") and not phrase.endswith("?")
        if mine and self._joins and self.source.chance(0.15):
            self.sentences[-1] = (
                f"{self.sentences[-1].removesuffix('.')} and {phrase[4:].format(**self.words, **numbers)}"
            )
            self._joins = False
            return
        if self.sentences and self._alone and self.source.chance(0.3):
            phrase = phrase.replace("{n} ", self.pronoun + " ", 1)
            phrase = phrase[0].upper() + phrase[1:]
        self.sentences.append(phrase.format(**self.words, **numbers))
        self._joins = mine

    def exchange(self, sign: str, number: int) -> None:
        """The one the story is about comes to have more or fewer, perhaps from or to somebody."""
        phrase = self.source.phrase(ADD if sign == "+" else SUBTRACT)
        self._say(phrase, b=number)
        giver = self.words["m" if sign == "+" else "n"] + ":" if "{m}" in phrase else ""
        self.step(self.value, sign, number, giver)

    def step(self, left: int, sign: str, right: int, giver: str = "") -> None:
        """One more step of the chain of thought."""
        self.value = {"+": left + right, "-": left - right, "*": left * right, "/": left // max(right, 1)}[sign]
        self.steps.append(f"{left}{sign}{right}={self.value}")
        self.thoughts.append(giver + self.steps[-1])

    def operand(self, signs: str) -> tuple[str, int]:
        """A sign that suits the running value, and the number beside it."""
        source, value = self.source, self.value
        divisors = [d for d in range(2, 10) if value % d == 0 and value // d >= 2] if "/" in signs else []
        while True:
            sign = source.pick(signs)
            if sign == "+" and value <= LARGEST - 2:
                return sign, source.number(2, LARGEST - value)
            if sign == "-" and value > 4:
                return sign, source.number(2, value - 1)
            if sign == "*" and value <= LARGEST // 2:
                return sign, source.number(2, min(9, LARGEST // value))
            if sign == "/" and divisors:
                return sign, source.pick(divisors)


def product(source: Source) -> tuple[int, int]:
    """Two numbers of a multiplication table."""
    k = source.number(2, 9)
    return k, source.number(2, min(LARGEST // k, 12))


def chain(story: Story, steps: int) -> None:
    """Someone has things, and they become more and fewer."""
    source = story.source
    opening = source.rng.random()
    if opening < 0.2:
        k, a = product(source)
        story.say(GROUPED, k=k, a=a)
        story.step(k, "*", a)
    elif opening < 0.3:
        k, share = product(source)
        story.say(SHARED, k=k, a=k * share)
        story.step(k * share, "/", k)
    else:
        story.value = source.number(3, 20) if source.chance(0.3) else source.number(10, 90)
        story.say(START, a=story.value)
    while len(story.steps) < steps:
        sign, b = story.operand("+++---*/")
        if sign in "+-":
            story.exchange(sign, b)
            continue
        story.say({"*": TIMES, "/": DIVIDE}[sign], b=b)
        story.step(story.value, sign, b)
    story.say(LEFT if story.steps[-1].count("-") and source.chance(0.4) else NOW)


def compare(story: Story, steps: int) -> None:
    """Somebody has more or fewer than somebody else, and perhaps together."""
    source = story.source
    first = story.value = source.number(5, 20) if source.chance(0.3) else source.number(12, 80)
    story.say(START, a=first)
    together = steps > 1 and source.chance(0.7)
    while len(story.steps) < steps - together - 1:
        sign, b = story.operand("+-")
        story.exchange(sign, b)
    first = story.value
    sign, b = story.operand("++--*")
    story.say({"+": MORE, "-": FEWER, "*": THAT_MANY}[sign], b=b)
    story.step(first, sign, b)
    if together:
        story.say(BOTH)
        story.step(first, "+", story.value)
    else:
        story.say(WHO)


def shopping(story: Story, steps: int) -> None:
    """Prices, and the change."""
    source = story.source
    k, a = product(source)
    story.say(PRICE, k=k, a=a)
    story.step(k, "*", a)
    change = steps > 1 and source.chance(0.5)
    while len(story.steps) < steps - change:
        b = source.number(2, max(2, (LARGEST - story.value) // 2))
        story.say(EXTRA, b=b)
        story.step(story.value, "+", b)
    if change:
        b = source.number(story.value + 1, LARGEST)
        story.say(CHANGE, b=b)
        story.step(b, "-", story.value)
    else:
        story.say(COST)


def rate(story: Story, steps: int) -> None:
    """So many a day, for some days."""
    k, a = product(story.source)
    story.say(RATE, k=k, a=a)
    story.step(a, "*", k)
    while len(story.steps) < steps:
        sign, b = story.operand("+-")
        story.say({"+": RATE_ADD, "-": RATE_SUBTRACT}[sign], b=b)
        story.step(story.value, sign, b)
    story.say(RATE_ASK)


def ride(story: Story, steps: int) -> None:
    """People get on and off."""
    story.value = story.source.number(20, 90)
    story.say(RIDE, a=story.value)
    while len(story.steps) < steps:
        sign, b = story.operand("+-")
        story.say({"+": GET_ON, "-": GET_OFF}[sign], b=b)
        story.step(story.value, sign, b)
    story.say(RIDERS)


def bare(story: Story, steps: int) -> None:
    """Numbers and signs alone, from left to right."""
    source = story.source
    if source.chance(0.25):
        k, a = product(source)
        text = f"{k}*{a}"
        story.step(k, "*", a)
    else:
        story.value = source.number(10, 90)
        text = str(story.value)
    while len(story.steps) < steps:
        signs = "+-/" if not story.steps and steps == 1 else "+-"
        sign, b = story.operand(signs)
        text += f"{sign}{b}"
        story.step(story.value, sign, b)
    if source.chance(0.5):
        for sign, spelt in SPELT.items():
            text = text.replace(sign, spelt)
    elif source.chance(0.3):
        for sign in SPELT:
            text = text.replace(sign, f" {sign} ")
    story.say(BARE, e=text)


FAMILIES = (chain, chain, chain, chain, compare, compare, shopping, rate, ride, bare)


def tell(source: Source, steps: int) -> Story:
    """A story of this side: its numbers are held out or not, as the source is."""
    while True:
        source.novel = False
        story = Story(source)
        source.pick(FAMILIES)(story, steps)
        kept = is_held_out("\n".join(story.steps), 10) is source.held_out
        if kept and max(map(int, story_numbers(story))) <= LARGEST and (source.novel or not source.held_out):
            return story


def story_numbers(story: Story) -> list[str]:
    """Every result and operand of the steps."""
    return [part for step in story.steps for part in step.replace("=", " ").translate(_SIGNS).split()]


_SIGNS = str.maketrans("+-*/", "    ")


def solved(source: Source) -> list[Message]:
    """An earlier turn: a problem and its answer, whose thoughts are gone."""
    story = tell(source, source.number(1, 2))
    return [user(" ".join(story.sentences)), assistant(f"The answer is {story.value}.", "\n".join(story.thoughts))]


def problem(source: Source, level: int | None = None) -> Sample:
    """One problem; some of training's follow earlier turns, have a system turn, or are answered without thoughts."""
    steps = 1 + (source.rng.choices(range(4), (30, 30, 24, 16))[0] if level is None else level)
    story = tell(source, steps)
    answer = f"The answer is {story.value}."
    question, thoughts = " ".join(story.sentences), "\n".join(story.thoughts)
    messages: list[Message] = []
    if source.chance(0.1):
        messages.append({"role": "system", "content": source.pick(SYSTEM)})
    if not source.held_out and source.chance(0.08):
        if source.chance(0.5):
            said, reply = small_talk(source)
            messages += [user(said), assistant(reply)]
        else:
            messages += solved(source)
    thinking = source.held_out or not source.chance(0.07)
    final = assistant(answer, thoughts) if thinking else assistant(f"{thoughts}\n{answer}")
    messages += [user(question), final]
    learned = {len(messages) - 1}
    return Sample(PROBLEM, steps - 1, messages, learned=learned, thinking=thinking, answer=str(story.value))
