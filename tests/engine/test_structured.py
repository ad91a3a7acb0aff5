"""Texts that must follow a grammar: what may come at each token, where it ends, and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

import hadron
from hadron import LLM, SamplingParams, StructuredOutputsParams
from hadron.engine.structured import Grammars, Matcher
from hadron.errors import RequestError
from hadron.tokenizer.tokenizer import Tokenizer
from tests.conftest import DATA, RANDOM
from tests.engine.masks import allowed

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["anna", "böb"]}, "age": {"type": "integer", "minimum": 3, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOKENIZER = Tokenizer.load(RANDOM)
END, USER = 480, TOKENIZER.token_id("<|user|>")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(RANDOM, threads=1)


def texts(llm: LLM, wanted: Any, count: int = 12, **params: Any) -> list[Any]:
    several = [
        SamplingParams(**{"max_tokens": 200, "temperature": 1.0, "seed": i, "structured_outputs": wanted} | params)
        for i in range(count)
    ]
    return [output.outputs[0] for output in llm.generate(["The river"] * count, several)]


def grammars() -> Grammars:
    return Grammars(TOKENIZER, 512, {END, USER})


def test_every_text_fits_its_schema(llm: LLM) -> None:
    done = [c for c in texts(llm, {"json": SCHEMA}) if c.finish_reason == "stop"]
    assert len(done) >= 3
    for completion in done:
        value = json.loads(completion.text)
        assert set(value) == {"name", "age"} and value["name"] in ("anna", "böb") and 3 <= value["age"] <= 120


def test_a_schema_may_be_text(llm: LLM) -> None:
    (schema, text) = (texts(llm, {"json": form}, 3) for form in (SCHEMA, json.dumps(SCHEMA)))
    assert schema == text


def test_any_object(llm: LLM) -> None:
    for completion in texts(llm, {"json_object": True}):
        assert completion.text.lstrip()[:1] == "{"
        if completion.finish_reason == "stop":
            assert isinstance(json.loads(completion.text), dict)


@pytest.mark.parametrize("wanted", [{"json": SCHEMA}, {"json": json.dumps(SCHEMA)}, {"json_object": True}])
def test_white_space_has_an_end(wanted: Any) -> None:
    """A greedy model would write nothing else until it is cut."""
    matcher = grammars().matcher(StructuredOutputsParams(**wanted))
    for token in TOKENIZER.encode("{", add_special_tokens=False):
        matcher.accept(token)
    blank, line = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in (" ", "\n"))
    assert allowed(matcher)[[blank, line]].all()
    matcher.accept(line)
    for _ in range(20):
        matcher.accept(blank)
    assert not allowed(matcher)[[blank, line]].any()


def test_a_schema_may_say_itself_what_white_space_it_has() -> None:
    schema = {"x-guidance": {"whitespace_flexible": False}, **SCHEMA}
    matcher = grammars().matcher(StructuredOutputsParams(json=schema))
    for token in TOKENIZER.encode("{", add_special_tokens=False):
        matcher.accept(token)
    assert not allowed(matcher)[TOKENIZER.encode(" ", add_special_tokens=False)[0]]


def test_thousands_of_choices() -> None:
    grammars().check(StructuredOutputsParams(choice=[f"word {i}" for i in range(5000)]))


def test_a_regular_expression_is_all_of_the_text(llm: LLM) -> None:
    for completion in texts(llm, {"regex": r"[a-c]{2,4}-[0-9]{3}"}):
        assert completion.finish_reason == "stop"
        assert re.fullmatch(r"[a-c]{2,4}-[0-9]{3}", completion.text)


def test_one_of_several_texts(llm: LLM) -> None:
    choice = ["yes", "no", 'say "why"', "Вчера"]
    found = {completion.text for completion in texts(llm, StructuredOutputsParams(choice=choice), 30)}
    assert found <= set(choice) and len(found) >= 2
    assert [completion.text for completion in texts(llm, {"choice": ["Вчера 😀"]}, 2)] == ["Вчера 😀"] * 2


@pytest.mark.parametrize(
    "grammar",
    [
        'start: "<" WORD ("," WORD)* ">"\nWORD: /[xy]{1,3}/',
        'root ::= "<" word ("," word)* ">"\nword ::= [xy] [xy]? [xy]?',
    ],
)
def test_a_grammar_in_either_syntax(llm: LLM, grammar: str) -> None:
    for completion in texts(llm, {"grammar": grammar}):
        if completion.finish_reason == "stop":
            assert re.fullmatch(r"<[xy]{1,3}(,[xy]{1,3})*>", completion.text)


@pytest.mark.parametrize("options", [{"ignore_eos": True}, {"min_tokens": 20}])
def test_the_grammar_has_the_last_word(llm: LLM, options: dict[str, Any]) -> None:
    for completion in texts(llm, {"choice": ["yes", "no"]}, 4, **options):
        assert (completion.text in ("yes", "no"), completion.finish_reason) == (True, "stop")


def test_log_probabilities_are_the_models(llm: LLM) -> None:
    (completion,) = texts(llm, {"choice": ["no"]}, 1, logprobs=0, temperature=0)
    free = llm.logits(llm.tokenizer.encode("The river"))[-1].astype(np.float64)
    expected = free - np.log(np.exp(free - free.max()).sum()) - free.max()
    row = completion.logprobs[0][completion.token_ids[0]]
    assert row.logprob == pytest.approx(expected[completion.token_ids[0]], abs=1e-6)


def test_it_is_the_same_beside_others_and_after_preemption(llm: LLM) -> None:
    alone = [texts(llm, {"json": SCHEMA}, i + 1, max_tokens=100)[i] for i in range(4)]
    tight = LLM(RANDOM, threads=1, num_pages=4, max_num_batched_tokens=9)
    assert texts(tight, {"json": SCHEMA}, 4, max_tokens=100) == alone


@pytest.mark.parametrize("asked", ["allowed", "accept"])
@pytest.mark.parametrize("beside", [0, 2])
def test_a_grammar_that_gives_up_fails_its_own_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, beside: int, asked: str
) -> None:
    """llguidance bounds what a step of a grammar may cost."""
    engine, prompt = llm._engine, tuple(TOKENIZER.encode("The river"))
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs={"regex": "[a-z ]*"}).with_defaults({})
    plain = SamplingParams(temperature=0, max_tokens=8).with_defaults({})
    (expected,) = llm.generate(["The river"], plain)

    def give_up(*given: Any) -> None:
        raise RequestError("a grammar cannot be used", where="regex", found="x", accepted="y", hint="z")

    broken = engine.add("broken", prompt, params)
    others = [engine.add(str(i), prompt, plain) for i in range(beside)]
    engine.step()
    engine.step()
    monkeypatch.setattr(Matcher, asked, give_up)
    while engine.has_requests:
        engine.step()
    assert broken.finish_reason == "error"
    assert "a grammar cannot be used" in str(broken.error)
    assert [other.output_token_ids for other in others] == [expected.outputs[0].token_ids] * beside


def test_an_end_is_allowed_when_the_text_is_complete() -> None:
    matcher = grammars().matcher(StructuredOutputsParams(regex="ab*"))
    a, b = (TOKENIZER.encode(c)[0] for c in "ab")
    assert not allowed(matcher)[[END, USER]].any() and allowed(matcher)[a]
    matcher.accept(a)
    assert allowed(matcher)[[END, USER, b]].all() and not allowed(matcher)[a] and not matcher.finished
    matcher.accept(USER)
    assert matcher.finished


@pytest.mark.parametrize(
    ("prompt", "waits"),
    [("<|user|>hi<|assistant|><think>", True), ("<think>x</think>", False), ("hi", False), ("</think><think>", True)],
)
def test_the_grammar_begins_after_a_thought_that_the_prompt_leaves_open(prompt: str, waits: bool) -> None:
    matcher = grammars().matcher(StructuredOutputsParams(choice=["b"]), TOKENIZER.encode(prompt))
    a, b = (TOKENIZER.encode(c)[0] for c in "ab")
    if waits:
        ends = [END, USER, TOKENIZER.token_id("<tool_call>"), TOKENIZER.token_id("</tool_call>")]
        for token in (a, b, TOKENIZER.token_id("</think>")):
            assert np.flatnonzero(~allowed(matcher)).tolist() == sorted(ends), "what would leave the grammar out"
            assert not matcher.finished
            matcher.accept(token)  # type: ignore[arg-type]
    assert np.flatnonzero(allowed(matcher)).tolist() == [b]


@pytest.mark.parametrize(
    ("wanted", "where", "said"),
    [
        ({"json": {"type": "objct"}}, "json", "objct"),
        ({"json": "{"}, "json", ""),
        ({"json": {"type": "string", "format": "nope"}}, "json", "nope"),
        ({"regex": "(a"}, "regex", "unclosed"),
        ({"grammar": "start: missing"}, "grammar", "missing"),
        ({"grammar": "root ::= ("}, "grammar", ""),
    ],
)
def test_grammars_that_cannot_be_used_are_refused_before_anything_runs(
    llm: LLM, wanted: dict[str, Any], where: str, said: str
) -> None:
    with pytest.raises(hadron.RequestError, match="a grammar cannot be used") as caught:
        llm.generate("a", SamplingParams(structured_outputs=wanted))
    assert caught.value.where == f"structured_outputs.{where}"
    assert said in caught.value.found and "llguidance" in caught.value.accepted


@pytest.mark.parametrize(
    ("wanted", "where"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json_object": False}, "structured_outputs"),
        ({"schema": {}}, "structured_outputs"),
        ("json", "structured_outputs"),
        ({"choice": "ab"}, "structured_outputs.choice"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a", ""]}, "structured_outputs.choice"),
        ({"regex": 5}, "structured_outputs.regex"),
        ({"json": 5}, "structured_outputs.json"),
        ({"json_object": "yes"}, "structured_outputs.json_object"),
    ],
)
def test_wishes_that_make_no_sense_are_refused_by_name(wanted: Any, where: str) -> None:
    with pytest.raises(hadron.RequestError) as caught:
        SamplingParams(structured_outputs=wanted)
    assert caught.value.where == where and caught.value.hint


def test_a_grammar_needs_a_tokenizer() -> None:
    bare = LLM(DATA / "glm52-ct-w4a16", threads=1, kernels="reference")
    with pytest.raises(hadron.RequestError, match="a grammar needs a tokenizer") as caught:
        bare.generate({"prompt_token_ids": [1]}, SamplingParams(structured_outputs={"regex": "a"}))
    assert "tokenizer.json" in caught.value.found
