"""What word problems say: the sentences of each kind of step and question, those of training and those held out.

`{n}` is whom a story is about, `{m}` somebody else, `{t}` the things, `{g}` what holds them; other letters are numbers.
"""

from __future__ import annotations

from .source import Phrases, expand

START = Phrases(
    ("{n} has {a} {t}.", "{n} owns {a} {t}.", "At first {n} has {a} {t}.", "There are {a} {t} on {n}'s table.",
     "{n} starts with {a} {t}.", "{n} has collected {a} {t}.", "In {n}'s room there are {a} {t}.",
     "{n} counts {a} {t}.", "{n} begins the day with {a} {t}.", "{a} {t} are {n}'s.", "{a} {t} lie on the table of {n}.", "{n} holds {a} {t}.", "On Monday {n} had {a} {t}.",
     "{a} {t} are kept by {n}.", "The {a} {t} in the box are {n}'s.", "{n} found {a} {t} at home.", "When the day begins, {n} has {a} {t}."),
    ("In the morning {n} has {a} {t}.", "{a} {t} belong to {n}.", "At first there are {a} {t} in {n}'s room."),
)  # fmt: skip
GROUPED = Phrases(
    ("{n} has {k} {g} with {a} {t} each.", "There are {k} {g} with {a} {t} in each.", "{n} fills {k} {g} with {a} {t} each.",
     "{n} owns {k} {g}. Each holds {a} {t}.", "{n} buys {k} {g} of {a} {t} each.",
     "{n} packs {a} {t} into each of {k} {g}.", "{k} {g} are {n}'s. There are {a} {t} in each.", "In each of {k} {g} {n} has {a} {t}.",
     "{n} has {k} {g}, and each of them holds {a} {t}.", "There are {k} {g}. {n} puts {a} {t} into every one.",
     "At first there are {k} {g} with {a} {t} each."),
    ("At first {n} has {k} {g}. Each holds {a} {t}.", "There are {k} {g}. {n} packs {a} {t} into each."),
)  # fmt: skip
SHARED = Phrases(
    ("{n} has {a} {t} and divides them equally among {k} {g}, then takes one of the {g}.",
     "{a} {t} are shared equally by {k} people, one of them is {n}.",
     "{k} friends share {a} {t} equally. {n} is one of them.",
     "{n} shares {a} {t} equally with others, so that {k} people get the same.", "{k} people get {a} {t}, all the same number. {n} is one of them.",
     "{a} {t} go to {k} friends in equal parts. One part is {n}'s.", "{n} and others, {k} people in all, divide {a} {t} equally."),
    ("{k} people share {a} {t} equally. {n} is one of the people.", "{a} {t} are shared equally by {k} friends. {n} is one of them."),
)  # fmt: skip
_SUBTRACT_HELD_OUT = (
    "Later {n} loses {b} {t}.",
    "Then {n} gives {b} of the {t} to {m}.",
    "{n} throws away {b} of them.",
    "{n} sells {b} {t} to {m}.",
)
_ADD_HELD_OUT = (
    "Then {n} finds {b} {t}.",
    "Later {m} gives {b} more {t} to {n}.",
    "{n} picks up another {b}.",
    "{n} gets {b} {t} from {m}.",
)
ADD = Phrases(
    ("{n} buys {b} more.", "{n} finds {b} more {t}.", "{m} gives {n} {b} {t}.", "Then {n} gets {b} more.",
     "{n} picks up {b} {t}.", "{m} brings {n} {b} more {t}.", "Later {n} gets another {b} {t}.",
     "Then {n} buys {b} {t}.", "{n} wins {b} {t}.", "{m} sends {b} {t} to {n}.", "{b} more come from {m}.",
     "{m} gives {b} {t} to {n}.", "{m} gives {b} of them to {n}.", "{m} hands {b} more {t} to {n}.",
     "Then {m} gives {n} {b} more.", "{n} receives {b} {t} from {m}.", "Later {n} buys {b} {t} from {m}.",
     "{n} takes {b} {t} from {m}.", "Then {n} is given {b} {t}.", "{b} {t} come to {n} from {m}.",
     "{n} adds {b} more {t}.", "Later {b} {t} are added.",) * 4
    + expand(
        "[|Then |Later ]{m} [gives|hands|sends|brings|passes] [{b} {t}|{b} more {t}|{b} of the {t}|{b} of them] to {n}.",
        "[|Then |Later ]{m} [gives|hands|sends|brings] {n} [{b} {t}|{b} more {t}|{b} more].",
        "[|Then |Later ]{n} [gets|receives|takes|buys] [{b} {t}|{b} more {t}|{b} of the {t}|{b} of them] from {m}.",
        "[|Then |Later ]{n} [buys|wins|picks up|collects] [{b} {t}|{b} more {t}|{b} more|another {b}|another {b} {t}].",
        "[|Then |Later ]{n} finds [{b} more {t}|another {b} {t}].",
        without=_ADD_HELD_OUT + _SUBTRACT_HELD_OUT,
    ),
    _ADD_HELD_OUT,
)  # fmt: skip
SUBTRACT = Phrases(
    ("{n} gives {b} {t} to {m}.", "{n} loses {b}.", "{n} sells {b} of them.", "{n} gives {m} {b} {t}.",
     "{m} takes {b} {t} from {n}.", "Then {n} sells {b} {t}.", "{b} of the {t} get lost.",
     "{n} throws away {b} {t}.", "Later {n} gives away {b}.", "{b} break.", "{n} sends {b} {t} to {m}.",
     "Then {m} takes {b} of them.", "Later {n} gives {b} more to {m}.", "Then {n} hands {b} {t} to {m}.",
     "{m} buys {b} {t} from {n}.", "{m} receives {b} of them from {n}.",
     "{b} of {n}'s {t} break.", "Then {n} sells {b} of the {t} to {m}.", "{n} gives away {b} more {t}.",
     "Later {b} {t} are lost.", "Then {b} {t} are taken from {n}.",) * 4
    + expand(
        "[|Then |Later ]{n} [gives|hands|sends|brings|passes|sells] [{b} {t}|{b} more {t}|{b} of the {t}|{b} of them] to {m}.",
        "[|Then |Later ]{n} [gives|hands|sends|brings] {m} [{b} {t}|{b} more {t}|{b} more].",
        "[|Then |Later ]{m} [gets|receives|takes|buys] [{b} {t}|{b} more {t}|{b} of the {t}|{b} of them] from {n}.",
        "[|Then |Later ]{n} [loses|sells|gives away|throws away|breaks] [{b} {t}|{b} more {t}|{b} of the {t}|{b} of them|{b}].",
        without=_ADD_HELD_OUT + _SUBTRACT_HELD_OUT,
    ),
    _SUBTRACT_HELD_OUT,
)  # fmt: skip
_TIMES_HELD_OUT = (
    "Later {n} has {b} times as many {t}.",
    "After a week {n} has {b} times as many.",
)
TIMES = Phrases(
    ("Then {n} has {b} times as many.", "After a month {n} has {b} times as many {t}.", "The number of {t} grows to {b} times as many.", "A week later there are {b} times as many {t}.", "In a year {n} has {b} times as many.", "Then the {t} become {b} times as many.", "Soon there are {b} times as many.", "{n} comes to have {b} times as many {t}.", *expand("[Then|Later|Soon|In a week|After a month|After a year] {n} has {b} times as many[ {t}|].", without=_TIMES_HELD_OUT)),
    _TIMES_HELD_OUT,
)  # fmt: skip
_DIVIDE_HELD_OUT = (
    "Then {n} divides the {t} into {b} equal parts and keeps one.",
    "{n} splits the {t} equally among {b} bags and keeps one bag.",
)
DIVIDE = Phrases(
    ("{n} splits them into {b} equal parts and keeps one.",
     "{n} divides them equally among {b} bags and keeps one bag.",
     "{n} shares them equally, so that {b} people have the same.",
     "Then {n} splits all of them into {b} equal parts and keeps one of them.",
     "{n} puts them into {b} bags, the same number into each, and keeps one bag.",
     "The {t} are divided into {b} equal parts, and {n} keeps one.",) * 3
    + expand(
        "[|Then ]{n} [splits|divides|shares] [them|the {t}|all the {t}] [|equally ]among {b} [bags and keeps one bag|boxes and keeps one box|people and is one of them].",
        "[|Then ]{n} [splits|divides] [them|the {t}|all the {t}] into {b} equal parts and keeps one[| of them].",
        without=_DIVIDE_HELD_OUT,
    ),
    _DIVIDE_HELD_OUT,
)  # fmt: skip
_NOW_HELD_OUT = (
    "Now how many {t} does {n} have?",
    "In the end, how many {t} are there?",
    "How many {t} does {n} own now?",
)
NOW = Phrases(
    ("How many {t} does {n} have now?", "How many {t} does {n} have in the end?", "How many does {n} have now?", "How many {t} are there now?", "What number of {t} does {n} have now?", "How many {t} does {n} own at the end?", "In the end, how many {t} does {n} have?", "Now how many are there?", "How many {t} has {n} now?", "At the end, how many does {n} have?", "How many {t} are {n}'s now?", *expand("How many[ {t}|] does {n} [have|own|hold|keep] [now|in the end|at the end]?", "[Now|In the end,|At the end,] how many[ {t}|] does {n} [have|own|hold]?", "[Now|In the end,|At the end,] how many[ {t}|] are there?", "How many[ {t}|] are there [now|in the end|at the end]?", without=_NOW_HELD_OUT)),
    _NOW_HELD_OUT,
)  # fmt: skip
LEFT = Phrases(
    ("How many {t} are left?", "How many {t} does {n} have left?", "How many does {n} still have?",
     "How many {t} remain?", "How many {t} has {n} left?", "In the end, how many are left?", "How many are still {n}'s?", "How many {t} still remain?"),
    ("How many {t} does {n} still have?", "In the end, how many {t} are left?"),
)  # fmt: skip
_MORE_HELD_OUT = (
    "{m} owns {b} {t} more than {n}.",
    "{m} has {b} {t} more than {n}.",
)
MORE = Phrases(
    ("{m} has {b} more {t} than {n}.", "{m} has {b} more than {n}.", "{m} owns {b} more {t} than {n}.", "{m} counts {b} {t} more than {n}.", "{m} holds {b} more {t} than {n}.", "{m} has found {b} {t} more than {n}.", "Than {n}, {m} has {b} more.", "{m} owns {b} more than {n}.", *expand("{m} [has|owns|counts|holds|keeps] [{b} more {t}|{b} more|{b} {t} more] than {n}.", "{m} has found {b} more {t} than {n}.", without=_MORE_HELD_OUT)),
    _MORE_HELD_OUT,
)  # fmt: skip
_FEWER_HELD_OUT = (
    "{m} owns {b} {t} fewer than {n}.",
    "{m} has {b} {t} fewer than {n}.",
)
FEWER = Phrases(
    ("{m} has {b} fewer {t} than {n}.", "{m} has {b} fewer than {n}.", "{m} owns {b} fewer {t} than {n}.", "{m} counts {b} {t} fewer than {n}.", "{m} holds {b} fewer {t} than {n}.", "{m} has found {b} {t} fewer than {n}.", "Than {n}, {m} has {b} fewer.", "{m} owns {b} fewer than {n}.", *expand("{m} [has|owns|counts|holds|keeps] [{b} fewer {t}|{b} fewer|{b} {t} fewer] than {n}.", "{m} has found {b} fewer {t} than {n}.", without=_FEWER_HELD_OUT)),
    _FEWER_HELD_OUT,
)  # fmt: skip
_THAT_MANY_HELD_OUT = ("{m} counts {b} times as many {t} as {n}.",)
THAT_MANY = Phrases(
    ("{m} has {b} times as many {t} as {n}.", "{m} has {b} times as many as {n}.", "{m} owns {b} times as many {t} as {n}.", "{m} has found {b} times as many {t} as {n}.", "{m} holds {b} times as many as {n}.", *expand("{m} [has|owns|counts|holds|keeps|has found] {b} times as many[ {t}|] as {n}.", without=_THAT_MANY_HELD_OUT)),
    _THAT_MANY_HELD_OUT,
)  # fmt: skip
WHO = Phrases(
    (
        "How many {t} does {m} have?",
        "How many does {m} have?",
        "What number of {t} does {m} have?",
        "How many {t} are {m}'s?",
        "How many does {m} own?",
    ),
    ("How many {t} does {m} own?",),
)
BOTH = Phrases(
    ("How many {t} do {n} and {m} have together?", "How many {t} do they have in all?", "How many do they have together?", "In all, how many {t} do {n} and {m} have?",
     "Together, how many do {n} and {m} have?", "How many {t} is that for both?"),
    ("How many {t} do {n} and {m} have in all?", "Together, how many {t} do they have?"),
)  # fmt: skip
PRICE = Phrases(
    ("{n} buys {k} {t} for {a} dollars each.", "{n} buys {k} {t} at {a} dollars each.",
     "One of the {t} costs {a} dollars. {n} buys {k}.", "{k} {t} cost {a} dollars each. {n} buys them all.", "Each of the {t} costs {a} dollars. {n} buys {k} of these.",
     "{n} takes {k} {t}. Each costs {a} dollars.", "The price of the {t} is {a} dollars each. {n} gets {k}.",
     "{n} gets {k} {t}. One costs {a} dollars.", "At {a} dollars each, {n} buys {k} {t}."),
    ("{n} buys {k} {t}. They cost {a} dollars each.", "The {t} cost {a} dollars each. {n} buys {k} of them."),
)  # fmt: skip
EXTRA = Phrases(
    ("{n} also buys a bag for {b} dollars.", "{n} pays {b} dollars more for the way home.", "{n} also buys a box for {b} dollars.",
     "Then {n} buys a book for {b} dollars.", "A bag for {b} dollars is bought too.", "{n} also pays {b} dollars for a box.", "For {b} dollars {n} buys a map too."),
    ("{n} also buys a book for {b} dollars.", "Then {n} buys a bag for {b} dollars."),
)  # fmt: skip
COST = Phrases(
    (
        "How much does {n} pay?",
        "How many dollars does {n} pay?",
        "How much does it cost in all?",
        "In all, how much does {n} pay?",
        "How many dollars is that in all?",
        "What does {n} pay?",
        "How much is it together?",
    ),
    ("How many dollars does it cost in all?", "How much does {n} pay in all?"),
)
CHANGE = Phrases(
    ("{n} pays with {b} dollars. How much does {n} get back?", "{n} had {b} dollars. How much is left?",
     "Before this {n} had {b} dollars. How many dollars does {n} have now?", "{n} came with {b} dollars. How many dollars does {n} have left?",
     "Of {b} dollars, how many does {n} have left?", "{n} pays with {b} dollars. How many does {n} get back?", "{n} gives {b} dollars. How much comes back?"),
    ("{n} had {b} dollars. How many dollars are left?", "{n} pays with {b} dollars. How many dollars does {n} get back?"),
)  # fmt: skip
RATE = Phrases(
    ("{n} reads {a} pages a day for {k} days.", "{n} makes {a} {t} an hour and works {k} hours.",
     "{n} walks {a} miles a day for {k} days.", "For {k} days {n} makes {a} {t} a day.",
     "{n} saves {a} dollars a week for {k} weeks.", "In {k} days {n} reads {a} pages each day.", "For {k} hours {n} walks {a} miles an hour.",
     "{n} sells {a} {t} a day, and that for {k} days.", "Each week {n} gets {a} {t}, for {k} weeks.", "For {k} weeks {n} makes {a} {t} a week."),
    ("{n} makes {a} {t} a day for {k} days.", "For {k} days {n} reads {a} pages a day.", "For {k} weeks {n} saves {a} dollars a week."),
)  # fmt: skip
RATE_ADD = Phrases(
    (
        "The next day it is {b} more.",
        "After that come {b} more.",
        "Then {n} adds {b}.",
        "On the last day there are {b} more.",
        "Later {b} more are added.",
    ),
    ("The next day come {b} more.",),
)
RATE_SUBTRACT = Phrases(
    (
        "{b} of that do not count.",
        "Then {b} are taken away.",
        "After that {b} are gone.",
        "Later {b} of them get lost.",
        "{b} are lost on the way.",
    ),
    ("Then {b} are gone.",),
)
RATE_ASK = Phrases(
    (
        "How many is that in all?",
        "What is the total?",
        "How many are there in the end?",
        "How many does that make?",
        "In the end, how many are there?",
    ),
    ("In all, how many is that?", "What is the total in the end?"),
)
RIDE = Phrases(
    (
        "A bus carries {a} people.",
        "There are {a} people on a train.",
        "{a} people sit in a bus.",
        "A ship sails with {a} people.",
        "{a} people travel on a ship.",
        "In a train there are {a} people.",
        "{a} people are on a bus.",
    ),
    ("{a} people sit on a train.", "There are {a} people in a bus."),
)
GET_ON = Phrases(
    (
        "{b} people get on.",
        "At the next stop {b} get on.",
        "Then {b} more people come in.",
        "{b} more come in.",
        "At a stop {b} people come in.",
        "Then {b} get on.",
    ),
    ("At the next stop {b} more come in.",),
)
GET_OFF = Phrases(
    (
        "{b} people get off.",
        "At the next stop {b} get off.",
        "Then {b} people leave.",
        "{b} leave.",
        "At a stop {b} people get off.",
        "Then {b} get off.",
    ),
    ("At the next stop {b} people leave.",),
)
RIDERS = Phrases(
    (
        "How many people are there now?",
        "How many people are left?",
        "How many people ride on?",
        "How many are there now?",
        "In the end, how many people ride on?",
    ),
    ("Now how many people are there?",),
)
BARE = Phrases(
    (
        "What is {e}?",
        "{e} = ?",
        "How much is {e}?",
        "Calculate {e}.",
        "Work out {e}.",
        "{e} is how much?",
        "Can you tell me {e}?",
        "What does {e} make?",
        "Say what {e} gives.",
    ),
    ("Please work out {e}.", "Tell me what {e} is.", "How much does {e} make?"),
)
