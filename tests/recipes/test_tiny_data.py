"""The small models' data: the same every time, right, apart from the held-out sets, and in GLM's markup."""

from __future__ import annotations

import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

from hadron.tokenizer.answer import AnswerSplitter, Reasoning
from hadron.tokenizer.chat_template import ChatTemplate
from hadron.tokenizer.markup import Markup
from hadron.tokenizer.tokenizer import Tokenizer
from hadron.tokenizer.tool_calls import CallArguments, CallBegin, Content, Parameters
from recipes.tiny.data import about, make, problems, retrieval, source, tools
from recipes.tiny.data.markup import ANSWER, KINDS, PROBLEM, RETRIEVAL, STOP_TOKENS, TOOL, USELESS, Sample, weighted
from recipes.tiny.data.score import score
from tests.conftest import ROOT

SAMPLES, HELD_OUT = 600, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tiny")
    make.make(out, seed=3, samples=SAMPLES, held_out=HELD_OUT)
    return out


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture(scope="module")
def arrays(folder: Path) -> dict[str, np.ndarray]:
    return dict(np.load(folder / "train.npz"))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return [make.training_sample(3, index) for index in range(SAMPLES)]


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    for name in make.FILES:
        yield from map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines())


def test_the_same_seed_gives_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "recipes" / "tiny" / "make_data.py", "--seed", "3", "--samples", str(SAMPLES)]
    done = subprocess.run([*command, "--out", tmp_path], check=True, capture_output=True, text=True)
    assert done.stdout.startswith(f"{SAMPLES} samples, ")
    for name in ("train.npz", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "text.txt"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes(), name
    for name in make.FILES:  # the command writes more rows, which begin alike
        ours, theirs = ((path / f"{name}.jsonl").read_text().splitlines() for path in (folder, tmp_path))
        assert theirs[: len(ours)] == ours
        assert len(theirs) == (50 if name == "talk" else 1000)


def test_another_seed_gives_other_samples() -> None:
    assert weighted(make.training_sample(1, 0)) != weighted(make.training_sample(2, 0))


def test_arrays_are_as_the_trainer_reads_them(arrays: dict[str, np.ndarray], tokenizer: Tokenizer) -> None:
    assert {name: array.dtype.name for name, array in arrays.items()} == {
        "ids": "uint16", "weights": "uint8", "offsets": "int64", "kind": "uint8", "level": "uint8",
    }  # fmt: skip
    assert arrays["offsets"][0] == 0
    assert arrays["offsets"][-1] == len(arrays["ids"]) == len(arrays["weights"])
    assert len(arrays["kind"]) == len(arrays["level"]) == len(arrays["offsets"]) - 1 == SAMPLES
    assert set(arrays["weights"]) == {0, 1, 10}
    assert set(arrays["kind"]) == {0, 1, 2, 3}
    assert set(arrays["level"]) == {0, 1, 2, 3}
    assert arrays["ids"].max() < tokenizer.vocabulary_size == 1024


def test_samples_are_what_the_template_renders(
    folder: Path, tokenizer: Tokenizer, arrays: dict[str, np.ndarray], samples: list[Sample]
) -> None:
    template = ChatTemplate.load(folder)
    end = tokenizer.token_id("<|endoftext|>")
    for index, sample in enumerate(samples):
        ids = arrays["ids"][arrays["offsets"][index] : arrays["offsets"][index + 1]].tolist()
        rendered = template.render(sample.messages, tools=sample.tools, add_generation_prompt=False)
        assert [*tokenizer.encode(rendered, add_special_tokens=False), end] == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == weighted(sample)[0]


def test_prompts_are_what_the_template_renders(folder: Path) -> None:
    template = ChatTemplate.load(folder)
    for row in rows(folder):
        assert template.render(row["messages"], tools=row["tools"], add_generation_prompt=True) == row["prompt"]
    closed = template.render([{"role": "user", "content": "Hi"}], add_generation_prompt=True, enable_thinking=False)
    assert closed == "[gMASK]<sop><|user|>Hi<|assistant|><think></think>"


def test_transformers_reads_the_tokenizer_and_the_template(folder: Path, tokenizer: Tokenizer) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert theirs.eos_token == "<|endoftext|>"
    for row in rows(folder):
        prompt = theirs.apply_chat_template(
            row["messages"], tools=row["tools"], tokenize=False, add_generation_prompt=True
        )
        assert prompt == row["prompt"]
        assert theirs(prompt, add_special_tokens=False)["input_ids"] == tokenizer.encode(
            prompt, add_special_tokens=False
        )


def test_any_text_survives_and_digits_are_single(tokenizer: Tokenizer) -> None:
    for text in ("Müller costs 12€ · 漢字 🙂\t\r\n  x", "".join(map(chr, range(1, 0x250))), " 62", "DNA Bolar's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert {tokenizer.token_bytes(token) for token in range(256)} == {bytes((byte,)) for byte in range(256)}
    several = [t for t in range(1024) if re.search(rb"\d.|.\d", tokenizer.token_bytes(t)) and t < 1000]
    assert several == []
    assert tokenizer.encode(" 62")[-2:] == tokenizer.encode("62")
    assert tokenizer.encode(" Bolar")[1:] == tokenizer.encode("Bolar")  # a name is the same anywhere


def test_markup_is_one_token_each_and_special_as_glm_marks_it(folder: Path, tokenizer: Tokenizer) -> None:
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    special = {token["content"] for token in added if token["special"]}
    assert {"[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>"} <= special
    assert {"<think>", "</think>", "<tool_call>", "<arg_key>"} & special == set()
    assert Markup(tokenizer).has_thoughts
    assert Markup(tokenizer).has_calls
    stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [tokenizer.token_id(token) for token in STOP_TOKENS]


def thoughts_of(sample: Any) -> str:
    final = sample.messages[-1]
    return str(final.get("reasoning_content") or final["content"].rpartition("\n")[0])


def steps_of(thoughts: str) -> list[tuple[int, str, int, int]]:
    found = [re.fullmatch(_STEP, line) for line in thoughts.split("\n")]
    assert all(found), thoughts
    return [(int(m[2]), m[3], int(m[4]), int(m[5])) for m in found if m]


_STEP = r"(?:(\w+):)?(\d+)([-+*/])(\d+)=(\d+)"  # perhaps who gives, then what that makes


def test_a_thought_names_who_gives() -> None:
    gives = re.compile(r"(\w+) (?:gives|hands|sends|brings|passes) (?:(?!from)[^.])*\bto (\w+)\.")
    named = 0
    for index in range(400):
        sample = problems.problem(source.Source(f"g:{index}", held_out=index % 2 == 0), 3)
        question, thoughts = sample.messages[-2]["content"], thoughts_of(sample)
        found = [re.fullmatch(_STEP, line) for line in thoughts.split("\n")]
        by_sign = {sign: {m[1] for m in found if m and m[1] and m[3] == sign} for sign in "+-*/"}
        # who gives to the one it is about makes it more, and that one's gifts make it fewer
        assert len(by_sign["+"]) <= 1 and len(by_sign["-"]) <= 1 and not by_sign["+"] & by_sign["-"]
        assert not by_sign["*"] | by_sign["/"]
        for giver, taker in gives.findall(question):
            if giver not in ("He", "She", "he", "she") and "and" not in (giver, taker) and giver[0].isupper():
                assert giver in by_sign["+"] | by_sign["-"], (question, thoughts)
                named += 1
    assert named > 100


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("level", range(4))
def test_problems_are_right(level: int, held_out: bool) -> None:
    for index in range(150):
        sample = problems.problem(source.Source(f"p:{index}", held_out=held_out), level)
        final = sample.messages[-1]
        steps = steps_of(thoughts_of(sample))
        assert len(steps) == level + 1
        for left, sign, right, result in steps:
            assert Fraction(result) == {"+": Fraction(left + right), "-": Fraction(left - right),
                                        "*": Fraction(left * right), "/": Fraction(left, right)}[sign]  # fmt: skip
            assert 0 <= result < 1000
        assert final["content"].endswith(f"The answer is {steps[-1][-1]}.")
        assert sample.answer == str(steps[-1][-1])
        asked = [int(n) for n in re.findall(r"\d+", sample.messages[-2]["content"])]
        assert {steps[0][0], steps[0][2]} <= set(asked)


def test_problems_of_one_family_follow_from_their_text() -> None:
    """People on a bus: the text alone gives the answer."""
    for index in range(50):
        story = problems.Story(source.Source(f"ride:{index}"))
        problems.ride(story, 3)
        first, *others = story.sentences[:-1]
        people = int(re.findall(r"\d+", first)[0])
        for sentence in others:
            number = int(re.findall(r"\d+", sentence)[0])
            people += -number if re.search(r"off|leave", sentence) else number
        assert people == story.value


def test_tools_say_what_is_so() -> None:
    date = datetime.date.fromisoformat
    for index in range(300):
        key = source.Source(f"t:{index}")
        for use in (make_use(key) for make_use in dict.fromkeys(tools.USES)):
            for name, arguments, result in use.calls:
                match name:
                    case "weekday":
                        assert date(arguments["date"]).strftime("%A") == result
                    case "days_between":
                        assert str((date(arguments["end"]) - date(arguments["start"])).days) == result
                    case "add_days":
                        assert date(arguments["date"]) + datetime.timedelta(arguments["days"]) == date(result)
                    case "calculator":
                        assert re.fullmatch(r"[-+*0-9]+", arguments["expression"])
                        assert str(eval(arguments["expression"])) == result  # digits and signs only
                    case "convert":
                        units = {(of, to): factor for of, to, factor in tools.UNITS}
                        exact = Fraction(arguments["value"]) * units[arguments["from_unit"], arguments["to_unit"]]
                        assert abs(exact - Fraction(result)) <= Fraction(6, 1000)
            assert use.value == use.calls[-1][-1]
            assert use.value in use.said


def test_a_tool_that_is_not_offered_is_not_called(samples: list[Sample]) -> None:
    unable = [sample for sample in samples if sample.messages[-1]["content"] == tools.UNABLE]
    assert unable
    for sample in unable:
        offered = {tool["function"]["name"] for tool in sample.tools or ()}
        for words, needed in (("weekday|of the week", "weekday"), ("weather|warm", "weather"), ("Convert", "convert")):
            assert not (re.search(words, sample.messages[0]["content"]) and needed in offered)


def test_calls_are_of_offered_tools_and_results_are_used(samples: list[Sample]) -> None:
    chosen = [sample for sample in samples if sample.kind == TOOL]
    without = 0
    for sample in chosen:
        offered = {tool["function"]["name"]: tool["function"]["parameters"] for tool in sample.tools or ()}
        assert len(offered) != 1
        called = [c["function"] for message in sample.messages for c in message.get("tool_calls", ())]
        without += not called
        for function in called:
            assert list(function["arguments"]) == offered[function["name"]]["required"]
        for message, answer in zip(sample.messages, sample.messages[1:], strict=False):
            assert message["role"] != "tool" or message["content"] in str(answer)
    assert 0 < without < len(chosen) / 3


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("level", range(4))
def test_retrieved_values_stand_in_the_context(level: int, held_out: bool) -> None:
    for index in range(40):
        sample = retrieval.retrieval(source.Source(f"r:{index}", held_out=held_out), level)
        block = sample.messages[0]["content"][: sample.useless[0]]
        facts = re.split(r"(?<=\.)\s", block.split("\n", 1)[1])
        low, high = retrieval.FACTS[level]
        assert low <= len(facts) <= high
        assert len(set(facts)) == len(facts)
        for place in sample.learned or ():
            answer = sample.messages[place]["content"]
            if answer in facts:  # else the value alone, of the one fact that the question asks for
                continue
            name = re.findall(r"[A-Z][a-z]+", sample.messages[place - 1]["content"].rpartition("\n")[2])
            assert [
                fact
                for fact in facts
                if fact.endswith((f" {answer}", f" {answer[:-1]} years old.")) and set(name) & set(fact.split())
            ]
        assert sample.answer in block


def test_held_out_names_and_words_are_not_in_training(folder: Path, samples: list[Sample]) -> None:
    text = "\n".join(weighted(sample)[0] for sample in samples)
    said = set(re.findall(r"[A-Z][a-z]+", text))
    assert said & set(source.TEST_NAMES) == set()
    assert said & set(source.TRAIN_NAMES)
    for row in rows(folder):
        if row["kind"] == "retrieval":
            keys = set(re.findall(r"[A-Z][a-z]{4,}", row["target"])) - {"The"}
            assert not [name for name in keys & said if name not in source.TEST_NAMES]
    held_out = [phrase for phrases in every_phrase() for phrase in phrases.test]
    assert len(held_out) > 60
    for phrase in held_out:
        pattern = r"[\w.-]+".join(map(re.escape, re.split(r"\{\w+\}", phrase)))
        assert not re.search(rf"(?<![\w-]){pattern}(?![\w-])", text), phrase
    assert not set(tools.TEST_ATTRIBUTES) & set(re.findall(r"get_(\w+)", text))


def test_made_up_names_are_of_one_side() -> None:
    """Short ones such as Kira and Nina are also people's names of one side, and are not made."""
    ours, theirs = (
        {source.Source(f"n:{index}", held_out=held_out).made_name() for index in range(20_000)}
        for held_out in (False, True)
    )
    assert not ours & theirs
    assert not (ours | theirs) & {*source.TRAIN_NAMES, *source.TEST_NAMES}


def every_phrase() -> Iterator[source.Phrases]:
    for module in (problems, retrieval, tools):
        yield from (value for value in vars(module).values() if isinstance(value, source.Phrases))
    yield from (phrases for phrases, _ in about.INTENTS)
    yield from (phrases for phrases, _ in tools.STORIES)
    for kind in retrieval.KINDS:
        yield from (kind.asked, kind.brief)


def test_held_out_numbers_are_not_in_training(folder: Path, samples: list[Sample]) -> None:
    thoughts = {message.get("reasoning_content") for sample in samples for message in sample.messages} - {None}
    targets = {row["target"].split("</think>")[0] for row in rows(folder) if row["kind"] == "problem"}
    assert len(targets) > HELD_OUT / 2
    assert not targets & thoughts


def test_only_what_can_be_learned_has_weight(
    arrays: dict[str, np.ndarray], tokenizer: Tokenizer, samples: list[Sample]
) -> None:
    for index, sample in enumerate(samples):
        span = slice(arrays["offsets"][index], arrays["offsets"][index + 1])
        ids, weights = arrays["ids"][span].tolist(), arrays["weights"][span]
        learned = tokenizer.decode(
            [t for t, w in zip(ids, weights, strict=True) if w == ANSWER], skip_special_tokens=False
        )
        assert learned.endswith("<|endoftext|>")
        assert weights[-1] == ANSWER
        if sample.kind == PROBLEM:
            final = sample.messages[-1]
            thoughts = f"{final.get('reasoning_content', '')}</think>" if sample.thinking else ""
            assert learned == f"{thoughts}{final['content']}<|endoftext|>"
        if sample.kind == RETRIEVAL:
            assert learned.count("</think>") == len(sample.learned or ())
            assert learned.count("<|user|>") == learned.count("</think>") - 1
            block = weighted(sample)[1]
            start = weighted(sample)[0].index(sample.messages[0]["content"])
            assert set(block[start : start + sample.useless[0]]) == {USELESS}
        if sample.kind == TOOL:
            assert learned.count("<tool_call>") == learned.count("<|observation|>")
        unlearned = tokenizer.decode(
            [t for t, w in zip(ids, weights, strict=True) if w == 1], skip_special_tokens=False
        )
        assert not re.search(r"\d", unlearned)


def test_hadron_parses_the_targets(folder: Path, tokenizer: Tokenizer) -> None:
    markup = Markup(tokenizer)
    calls = 0
    for row in rows(folder):
        prompt = tokenizer.encode(row["prompt"], add_special_tokens=False)
        offered = (
            {t["function"]["name"]: Parameters(t["function"]["parameters"]) for t in row["tools"]}
            if row["tools"]
            else None
        )
        splitter = AnswerSplitter(tokenizer, markup, prompt, tools=offered)
        parts = []
        for token in tokenizer.encode(row["target"], add_special_tokens=False):
            parts += splitter.push(token, tokenizer.token_text(token))
        parts += splitter.finish(complete=True)
        thoughts = "".join(part.text for part in parts if isinstance(part, Reasoning))
        content = "".join(part.text for part in parts if isinstance(part, Content))
        if row["step"] == "call":
            calls += 1
            assert [part.name for part in parts if isinstance(part, CallBegin)] == [json.loads(row["answer"])["name"]]
            arguments = "".join(part.text for part in parts if isinstance(part, CallArguments))
            assert json.loads(arguments) == json.loads(row["answer"])["arguments"]
            assert (thoughts, content) == ("", "")
        else:
            assert f"{thoughts}</think>{content}" == row["target"]
            assert row["answer"] in content
    assert calls > HELD_OUT / 4


def test_scores_tell_right_from_wrong(folder: Path) -> None:
    kinds = set()
    for row in rows(folder):
        kinds.add((row["kind"], row["step"]))
        assert score(row, row["target"])
        assert score(row, row["target"] + "<|user|>The answer is 7.")
        assert not score(row, "")
        wrong = row["target"].replace("</think>", "</think>The answer is 9999. ").replace(row["answer"], "x")
        wrong = wrong.replace("</arg_value>", "1</arg_value>").replace("</tool_call>", "</tool_call>.")
        assert not score(row, wrong), (row["target"], wrong)
    assert kinds == {(kind, "answer") for kind in KINDS} | {("tool", "call")}


def test_rows_are_different_and_of_every_level(folder: Path) -> None:
    for name, kind in make.FILES.items():
        found = list(map(json.loads, (folder / f"{name}.jsonl").read_text().splitlines()))
        assert {row["kind"] for row in found} == {KINDS[kind]}
        assert len({row["prompt"] for row in found}) == len(found)
        if name in ("word_problems", "retrieval"):
            assert {row["level"] for row in found} == {0, 1, 2, 3}


def test_an_unfinished_thought_is_no_answer(folder: Path) -> None:
    row = next(row for row in rows(folder) if row["kind"] == "problem")
    assert not score(row, f"The answer is {row['answer']}.")
