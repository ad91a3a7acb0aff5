"""Questions answered by calling a tool: offers, the call, the tool's result, the answer that says it.

The tools work: results are computed here, weekdays by `datetime`. Each sample offers a random few tools in random
order, described in one of several ways. A made-up `get_…` tool stands for whatever else a user may offer: its name
must be copied from the offer. Where a question needs none of the offered tools, none is called.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .about import small_talk
from .markup import TOOL, Message, Sample, assistant, call, user
from .problems import tell
from .source import Source, is_held_out
from .tool_phrases import (
    ADD_DAYS,
    BETWEEN,
    CALCULATE,
    CONVERT,
    LOOK_UP,
    STORIES,
    TODAY,
    WEATHER,
    WEEKDAY,
    WEEKDAY_AFTER,
)

MONTHS = (
    "January February March April May June July August September October November December".split()
)  # fmt: skip
UNABLE = "I have no tool for that."
WEATHERS = ("sunny", "rainy", "cloudy", "windy", "snowy", "foggy")
ATTRIBUTES = (
    "price phone room team level color rank score stock status owner address weight size age name date city country "
    "language title author year month number code key type brand model format length width depth volume power energy "
    "rate cost tax salary budget value sum balance account order ticket seat gate floor street zone region origin "
    "source target driver teacher doctor manager editor friend school office shop bank hotel garden bridge river "
    "season temperature pressure humidity wind distance duration deadline birthday nickname password signature "
    "license version priority category material shape texture flavor grade degree skill sport hobby job mood shift "
    "badge queue index quota limit speaker feed seed fee species meeting agreement"
).split()
TEST_ATTRIBUTES = "email height speed".split()
#: unit, the unit it becomes, factor
UNITS = (
    ("kilometers", "meters", Fraction(1000)), ("meters", "centimeters", Fraction(100)), ("hours", "minutes", Fraction(60)),
    ("minutes", "seconds", Fraction(60)), ("kilograms", "grams", Fraction(1000)), ("days", "hours", Fraction(24)),
    ("weeks", "days", Fraction(7)), ("miles", "kilometers", Fraction(1609, 1000)), ("feet", "inches", Fraction(12)),
    ("meters", "kilometers", Fraction(1, 1000)), ("grams", "kilograms", Fraction(1, 1000)), ("liters", "milliliters", Fraction(1000)),
    ("inches", "centimeters", Fraction(254, 100)), ("minutes", "hours", Fraction(1, 60)), ("kilometers", "miles", Fraction(1000, 1609)),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Use:
    """One use of tools. question: the user's words; calls: tool, arguments, result of each; value: what `said` says."""

    question: str
    calls: tuple[tuple[str, dict[str, Any], str], ...]
    said: str
    value: str


def shown(number: Fraction) -> str:
    """At most two decimals, without zeros at the end."""
    text = f"{float(round(number, 2)):.2f}"
    return text.rstrip("0").rstrip(".")


def calculator(source: Source) -> Use:
    """Numbers too large to do in one's head."""
    if source.chance(0.3):
        phrases, sign = source.pick(STORIES)
        a, b = source.number(200, 9999), source.number(12, 199)
        things = source.pick(("lamps", "books", "tickets", "cards", "coins", "cups"))
        question = source.phrase(phrases).format(a=a, b=b, t=things, n=source.name())
        text = f"{a}{sign}{b}"
    else:
        signs = [source.pick("+-*") for _ in range(source.number(1, 2))]
        numbers = [source.number(100, 9999)] + [source.number(12, 999) for _ in signs]
        text = str(numbers[0]) + "".join(sign + str(n) for sign, n in zip(signs, numbers[1:], strict=True))
        written = text
        if source.chance(0.4):
            for sign, word in (("+", " plus "), ("-", " minus "), ("*", " times ")):
                written = written.replace(sign, word)
        question = source.phrase(CALCULATE).format(e=written)
    result = str(evaluate(text))
    return Use(question, (("calculator", {"expression": text}, result),), f"The result is {result}.", result)


def evaluate(text: str) -> int:
    """An expression of whole numbers, `+`, `-` and `*`, with the usual order of operations."""
    total = 0
    for term in text.replace("-", "+-").split("+"):
        factors = term.split("*")
        product = 1
        for factor in factors:
            product *= int(factor)
        total += product
    return total


def convert(source: Source) -> Use:
    """A quantity in another unit."""
    of, to, factor = source.pick(UNITS)
    number = Fraction(source.number(2, 999)) if source.chance(0.6) else Fraction(source.number(11, 999), 10)
    text, result = shown(number), shown(number * factor)
    value = float(text) if "." in text else int(text)
    question = source.phrase(CONVERT).format(v=text, of=of, to=to)
    arguments = {"value": value, "from_unit": of, "to_unit": to}
    return Use(question, (("convert", arguments, result),), f"{text} {of} are {result} {to}.", result)


def day(source: Source) -> datetime.date:
    """A day from 1950 to 2059, of this side."""
    first, last = datetime.date(1950, 1, 1).toordinal(), datetime.date(2059, 12, 31).toordinal()
    while True:
        found = datetime.date.fromordinal(source.number(first, last))
        if is_held_out(found.isoformat()) is source.held_out:
            return found


def written(source: Source, date: datetime.date) -> str:
    """A date as people or as programs write it."""
    if source.chance(0.5):
        return date.isoformat()
    return f"{date.day} {MONTHS[date.month - 1]} {date.year}"


def weekday(source: Source) -> Use:
    """The day of the week of a date."""
    date = day(source)
    text, result = written(source, date), date.strftime("%A")
    question = source.phrase(WEEKDAY).format(d=text)
    return Use(question, (("weekday", {"date": date.isoformat()}, result),), f"{text} is a {result}.", result)


def days_between(source: Source) -> Use:
    """The days from one date to a later one."""
    start = day(source)
    result = str(source.number(2, 400))
    end = start + datetime.timedelta(int(result))
    question = source.phrase(BETWEEN).format(d=written(source, start), e=written(source, end))
    arguments = {"start": start.isoformat(), "end": end.isoformat()}
    return Use(question, (("days_between", arguments, result),), f"There are {result} days between them.", result)


def add_days(source: Source) -> Use:
    """A date some days after another."""
    start, days = day(source), source.number(2, 400)
    result = (start + datetime.timedelta(days)).isoformat()
    question = source.phrase(ADD_DAYS).format(d=written(source, start), k=days)
    return Use(
        question, (("add_days", {"date": start.isoformat(), "days": days}, result),), f"The date is {result}.", result
    )


def weekday_after(source: Source) -> Use:
    """Two calls, the second with the first one's result."""
    start, days = day(source), source.number(2, 400)
    date = start + datetime.timedelta(days)
    question = source.phrase(WEEKDAY_AFTER).format(d=written(source, start), k=days)
    result = date.strftime("%A")
    first = ("add_days", {"date": start.isoformat(), "days": days}, date.isoformat())
    second = ("weekday", {"date": date.isoformat()}, result)
    return Use(question, (first, second), f"It is a {result}.", result)


def today(source: Source) -> Use:
    """A call without arguments."""
    result = day(source).isoformat()
    return Use(source.phrase(TODAY), (("today", {}, result),), f"Today is {result}.", result)


def weather(source: Source) -> Use:
    """A result of words and a number."""
    city = source.made_name()
    result = f"{source.pick(WEATHERS)}, {source.number(1, 35)} degrees"
    question = source.phrase(WEATHER).format(c=city)
    return Use(question, (("weather", {"city": city}, result),), f"The weather in {city} is {result}.", result)


def attribute_of(source: Source) -> str:
    """What a made-up tool finds; in training often a word that means nothing, so that it has to be copied."""
    if source.held_out:
        return source.pick(TEST_ATTRIBUTES if source.chance(0.3) else ATTRIBUTES)
    return source.made_name().lower() if source.chance(0.4) else source.pick(ATTRIBUTES)


def look_up(source: Source) -> Use:
    """A tool of a name that depends on what it finds."""
    attribute = attribute_of(source)
    name = source.name(0.7)
    result = str(source.number(10, 9999)) if source.chance(0.5) else source.made_name().lower()
    question = source.phrase(LOOK_UP).format(a=attribute, n=name)
    said = f"The {attribute} of {name} is {result}."
    return Use(question, ((f"get_{attribute}", {"name": name}, result),), said, result)


def declared(source: Source, name: str) -> dict[str, Any]:
    """The definition of a tool in OpenAI's form, described in one of several ways."""
    text, number = {"type": "string"}, {"type": "number"}
    about, properties = {
        "calculator": (("Works out an expression", "Does arithmetic", "Calculates"), {"expression": text}),
        "convert": (
            ("Converts units", "Changes a unit", "Unit conversion"),
            {"value": number, "from_unit": text, "to_unit": text},
        ),
        "weekday": (("Weekday of a date", "Finds the day of the week"), {"date": text}),
        "days_between": (("Days between two dates", "Counts days"), {"start": text, "end": text}),
        "add_days": (("Adds days to a date", "Date some days later"), {"date": text, "days": {"type": "integer"}}),
        "today": (("The date today", "Says which day it is"), {}),
        "weather": (("Weather in a city", "Says how the weather is"), {"city": text}),
    }.get(name) or ((f"Looks up the {name[4:]}", f"Finds the {name[4:]} of something"), {"name": text})
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": source.pick(about), "parameters": parameters}}


USES: tuple[Callable[[Source], Use], ...] = (
    calculator, calculator, calculator, convert, convert, convert, weekday, weekday, days_between, add_days, weekday_after,
    today, weather, look_up, look_up,
)  # fmt: skip
NAMES = ("calculator", "convert", "weekday", "days_between", "add_days", "today", "weather")


def offers(source: Source, needed: Iterable[str], *, without: Collection[str] = ()) -> list[dict[str, Any]]:
    """What is needed and some others, in random order. without: what is not to be offered."""
    names = list(dict.fromkeys(needed))
    others = [name for name in (*NAMES, f"get_{attribute_of(source)}") if name not in names and name not in without]
    names += source.some(others, source.number(1 if names else 2, 3))
    return [declared(source, name) for name in source.some(names, len(names))]


def conversation(uses: Sequence[Use]) -> list[Message]:
    """Question, calls with their results, and answer of each use."""
    messages: list[Message] = []
    for use in uses:
        messages.append(user(use.question))
        for name, arguments, result in use.calls:
            messages += [call(name, arguments), {"role": "tool", "content": result}]
        messages.append(assistant(use.said))
    return messages


def no_call(source: Source) -> Sample:
    """Talk or a small problem that needs no tool, or a question whose tool is not offered."""
    choice = source.rng.random()
    if choice < 0.25:
        question, answer = small_talk(source)
        return Sample(TOOL, 0, [user(question), assistant(answer)], tools=offers(source, ()), answer=answer)
    if choice < 0.5:
        story = tell(source, source.number(1, 2))
        final = assistant(f"The answer is {story.value}.", "\n".join(story.thoughts))
        tools = offers(source, (), without=("calculator",))
        return Sample(TOOL, 2, [user(" ".join(story.sentences)), final], tools=tools, answer=str(story.value))
    use = source.pick(USES)(source)
    tools = None if source.chance(0.3) else offers(source, (), without=[name for name, _, _ in use.calls])
    return Sample(TOOL, 1, [user(use.question), assistant(UNABLE)], tools=tools, answer=UNABLE)


def tool(source: Source, level: int | None = None) -> Sample:
    """Level: uses in one conversation; a held-out sample ends at a call, at the answer after it, or needs no call."""
    if source.chance(0.1 if source.held_out else 0.25):
        return no_call(source)
    count = 1 + (source.rng.choices(range(3), (65, 27, 8))[0] if level is None else level)
    while True:
        source.novel = False
        uses = [source.pick(USES)(source) for _ in range(count)]
        if source.novel or not source.held_out:
            break
    messages = conversation(uses)
    tools = offers(source, [name for use in uses for name, _, _ in use.calls])
    if not source.held_out and source.chance(0.12):
        question, answer = small_talk(source)
        place = 0 if source.chance(0.5) else len(messages)
        messages[place:place] = [user(question), assistant(answer)]
    sample = Sample(TOOL, count, messages, tools=tools, answer=uses[-1].value)
    if source.held_out and source.chance(0.5):
        back = source.number(1, len(uses[-1].calls))
        name, arguments, _ = uses[-1].calls[-back]
        sample.messages, sample.step = messages[: -2 * back], "call"
        sample.answer = json.dumps({"name": name, "arguments": arguments})
    return sample
