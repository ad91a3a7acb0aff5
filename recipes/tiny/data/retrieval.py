"""Facts about made-up names, and questions about some of them, in several turns of one conversation.

The facts stand in random order, the questions ask for any of them, and each answer copies its fact's key and value
(or, where the question asks for that only, the value alone). Levels are numbers of facts: a few at level 0, at
level 3 many times what a selection of 64 tokens holds, with names that have several facts.
"""

from __future__ import annotations

from dataclasses import dataclass

from .markup import RETRIEVAL, Message, Sample, assistant, user
from .source import Phrases, Source

#: Numbers of facts and of questions, by level.
FACTS = ((4, 8), (9, 16), (17, 29), (30, 40))
QUESTIONS = ((4, 6), (6, 10), (8, 12), (8, 12))

COLORS = "red blue green black white yellow brown pink grey gold silver purple".split()
ITEMS = "key box lamp coat bag ring book cup hat chair bell rope map boat clock drum".split()
FOODS = "soup bread rice cheese fish cake honey apples plums beans corn eggs nuts salad tea milk".split()
JOBS = (
    "baker doctor farmer pilot teacher painter singer cook guard writer driver judge nurse miner smith tailor".split()
)
ANIMALS = "cat dog horse goat owl fox snake mouse duck bear wolf frog cow hen bee crow".split()


@dataclass(frozen=True, slots=True)
class Fact:
    """A kind of fact. said: the sentence, also the answer; asked: questions; brief: questions for the value alone."""

    said: str
    asked: Phrases
    brief: Phrases
    value: str


KINDS = (
    Fact(
        "The code of {n} is {v}.",
        Phrases(
            (
                "What is the code of {n}?",
                "Tell me the code of {n}.",
                "Which code does {n} have?",
                "What code belongs to {n}?",
                "Do you know the code of {n}?",
                "{n} has what code?",
                "Say the code of {n}.",
                "I need the code of {n}.",
                "The code of {n}, please.",
            ),
            ("Please tell me the code of {n}.", "{n} has which code?"),
        ),
        Phrases(
            (
                "Give only the code of {n}.",
                "Just the code of {n}.",
                "Nothing but the code of {n}.",
                "In short, the code of {n}.",
            ),
            ("Only the code of {n}, please.",),
        ),
        "code",
    ),
    Fact(
        "{n} keeps the {v}.",
        Phrases(
            (
                "What does {n} keep?",
                "Tell me what {n} keeps.",
                "Which thing does {n} keep?",
                "What is kept by {n}?",
                "Do you know what {n} keeps?",
                "Say what {n} keeps.",
                "{n} keeps which thing?",
                "I need to know what {n} keeps.",
            ),
            ("Please tell me what {n} keeps.", "{n} keeps what?"),
        ),
        Phrases(
            (
                "Give only what {n} keeps.",
                "Just what {n} keeps.",
                "Nothing but what {n} keeps.",
                "In short, what {n} keeps.",
            ),
            ("Only what {n} keeps, please.",),
        ),
        "thing",
    ),
    Fact(
        "{n} lives in {v}.",
        Phrases(
            (
                "Where does {n} live?",
                "In which place does {n} live?",
                "Tell me where {n} lives.",
                "Do you know where {n} lives?",
                "What is the place where {n} lives?",
                "Say where {n} lives.",
                "{n} lives in which place?",
                "I need to know where {n} lives.",
            ),
            ("Please tell me where {n} lives.", "{n} lives where?"),
        ),
        Phrases(
            (
                "Give only the place where {n} lives.",
                "Just where {n} lives.",
                "Nothing but where {n} lives.",
                "In short, where {n} lives.",
            ),
            ("Only where {n} lives, please.",),
        ),
        "place",
    ),
    Fact(
        "{n} is {v} years old.",
        Phrases(
            (
                "How old is {n}?",
                "What is the age of {n}?",
                "Tell me how old {n} is.",
                "Which age does {n} have?",
                "Do you know how old {n} is?",
                "Say how old {n} is.",
                "How many years old is {n}?",
                "I need the age of {n}.",
            ),
            ("Please tell me how old {n} is.", "{n} is how old?"),
        ),
        Phrases(
            (
                "Give only the age of {n}.",
                "Just the age of {n}.",
                "Nothing but the age of {n}.",
                "In short, the age of {n}.",
            ),
            ("Only the age of {n}, please.",),
        ),
        "age",
    ),
    Fact(
        "{n} works as a {v}.",
        Phrases(
            (
                "What does {n} work as?",
                "What is the job of {n}?",
                "Tell me the job of {n}.",
                "Which job does {n} have?",
                "Do you know the job of {n}?",
                "{n} works as what?",
                "Say what {n} works as.",
                "I need the job of {n}.",
            ),
            ("Please tell me the job of {n}.", "{n} has which job?"),
        ),
        Phrases(
            (
                "Give only the job of {n}.",
                "Just the job of {n}.",
                "Nothing but the job of {n}.",
                "In short, the job of {n}.",
            ),
            ("Only the job of {n}, please.",),
        ),
        "job",
    ),
    Fact(
        "{n} likes {v}.",
        Phrases(
            (
                "What does {n} like?",
                "Tell me what {n} likes.",
                "Which food does {n} like?",
                "What is liked by {n}?",
                "Do you know what {n} likes?",
                "Say what {n} likes.",
                "{n} likes which food?",
                "I need to know what {n} likes.",
            ),
            ("Please tell me what {n} likes.", "{n} likes what?"),
        ),
        Phrases(
            (
                "Give only what {n} likes.",
                "Just what {n} likes.",
                "Nothing but what {n} likes.",
                "In short, what {n} likes.",
            ),
            ("Only what {n} likes, please.",),
        ),
        "food",
    ),
    Fact(
        "{n} sits in room {v}.",
        Phrases(
            (
                "In which room does {n} sit?",
                "Which room is the room of {n}?",
                "Tell me the room of {n}.",
                "Which room does {n} sit in?",
                "Do you know the room of {n}?",
                "Where does {n} sit?",
                "Say which room {n} sits in.",
                "I need the room of {n}.",
            ),
            ("Please tell me the room of {n}.", "{n} sits in which room?"),
        ),
        Phrases(
            (
                "Give only the room of {n}.",
                "Just the room of {n}.",
                "Nothing but the room of {n}.",
                "In short, the room of {n}.",
            ),
            ("Only the room of {n}, please.",),
        ),
        "room",
    ),
    Fact(
        "The animal of {n} is a {v}.",
        Phrases(
            (
                "What is the animal of {n}?",
                "Tell me the animal of {n}.",
                "Which animal does {n} have?",
                "{n} has what animal?",
                "Do you know the animal of {n}?",
                "Say the animal of {n}.",
                "Which is the animal of {n}?",
                "I need the animal of {n}.",
            ),
            ("Please tell me the animal of {n}.", "{n} has which animal?"),
        ),
        Phrases(
            (
                "Give only the animal of {n}.",
                "Just the animal of {n}.",
                "Nothing but the animal of {n}.",
                "In short, the animal of {n}.",
            ),
            ("Only the animal of {n}, please.",),
        ),
        "animal",
    ),
)

OPENING = Phrases(
    (
        "Here are some facts.",
        "Remember these facts.",
        "Read this list.",
        "These things are known.",
        "Notes:",
        "Learn this.",
    ),
    ("Remember this list.", "Here are some notes.", "Read these facts."),
)
NOTED = ("Noted.", "I will remember that.", "All right.")


def value(source: Source, kind: Fact) -> str:
    """A random value of a kind of fact."""
    match kind.value:
        case "code":
            return str(source.number(1000, 9999))
        case "room":
            return str(source.number(100, 999))
        case "age":
            return str(source.number(2, 99))
        case "thing":
            return f"{source.pick(COLORS)} {source.pick(ITEMS)}"
        case "place":
            return source.made_name()
        case "job":
            return source.pick(JOBS)
        case "food":
            return source.pick(FOODS)
        case _:
            return source.pick(ANIMALS)


def facts(source: Source, count: int, *, shared: bool) -> list[tuple[Fact, str, str]]:
    """Different (kind, name, value) in random order. shared: whether a name may have facts of several kinds."""
    kinds = source.some(KINDS, source.number(1, 5))
    names = source.names(max(2, count * 2 // 3) if shared and len(kinds) > 1 else count, made=0.75)
    if len(names) == count:
        return [(kind, name, value(source, kind)) for name in names for kind in (source.pick(kinds),)]
    pairs = source.some([(kind, name) for name in names for kind in kinds], count)
    return [(kind, name, value(source, kind)) for kind, name in pairs]


def retrieval(source: Source, level: int | None = None) -> Sample:
    """A context of facts and questions about them, in turns; a held-out sample ends with the question that counts."""
    level = source.rng.choices(range(4), (22, 26, 30, 22))[0] if level is None else level
    known = facts(source, source.number(*FACTS[level]), shared=source.chance((0.1, 0.2, 0.4, 0.6)[level]))
    # one fact a line, or one after the other
    text = ("\n" if source.chance(0.6) else " ").join(kind.said.format(n=name, v=v) for kind, name, v in known)
    opening = source.phrase(OPENING)
    asked = source.some(known, min(len(known), source.number(*QUESTIONS[level])))
    if source.held_out:
        asked = asked[-source.number(1, 3) :]
    block = f"{opening}\n{text}"
    place = source.rng.random()
    messages: list[Message] = []
    if place < 0.25:
        messages.append({"role": "system", "content": block})
    elif place < 0.4:
        messages += [user(block), assistant(source.pick(NOTED))]
    learned, final = [], ""
    for i, (kind, name, v) in enumerate(asked):
        brief = source.chance(0.25)
        question = source.phrase(kind.brief if brief else kind.asked).format(n=name)
        if place >= 0.4 and i == 0:
            question = f"{block}\n{question}"
        messages.append(user(question))
        learned.append(len(messages))
        messages.append(assistant(f"{v}." if brief else kind.said.format(n=name, v=v)))
        final = v
    return Sample(RETRIEVAL, level, messages, learned=learned, useless={0: len(block)}, answer=final)
