"""Hadron as a model of lm-eval: its three kinds of request against the logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lm_eval.api.model import TemplateLM

from hadron import LLM, SamplingParams, TokenizerError, UsageError
from hadron.eval.model import HadronLM
from hadron.tokenizer.markup import Mark
from tests.conftest import DATA, RANDOM
from tests.eval.own_tasks import llm

CONTEXT, CONTINUATIONS = "The longest river in the world is", [" the Nile", " a", " long and old", " "]


def requests(*arguments: tuple[Any, ...]) -> list[Any]:
    return [SimpleNamespace(args=each) for each in arguments]


def log_softmax(llm: LLM, ids: list[int]) -> np.ndarray:
    rows = llm.logits(ids).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    return rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))


def test_loglikelihoods_are_those_of_the_logits(llm: LLM) -> None:
    found = HadronLM(llm).loglikelihood(requests(*((CONTEXT, c) for c in CONTINUATIONS)))
    begin = len(llm.tokenizer.encode(CONTEXT))
    for continuation, (logprob, is_greedy) in zip(CONTINUATIONS, found, strict=True):
        ids = llm.tokenizer.encode(CONTEXT + continuation)
        rows = log_softmax(llm, ids)
        wanted = sum(rows[i - 1, ids[i]] for i in range(begin, len(ids)))
        assert logprob == pytest.approx(wanted, abs=1e-4)
        assert is_greedy is all(rows[i - 1].argmax() == ids[i] for i in range(begin, len(ids)))


def test_what_the_model_says_is_greedy(llm: LLM) -> None:
    ids = llm.tokenizer.encode(CONTEXT)
    (said,) = llm.generate(CONTEXT, SamplingParams(max_tokens=3, temperature=0, repetition_penalty=1.0))
    scored = HadronLM(llm)._score("", [(ids, said.outputs[0].token_ids)])
    assert scored[0].is_greedy


def test_white_space_between_the_two_belongs_to_the_continuation(llm: LLM) -> None:
    model = HadronLM(llm)
    assert model.loglikelihood(requests((CONTEXT + " ", "the Nile"))) == model.loglikelihood(
        requests((CONTEXT, " the Nile"))
    )


@pytest.mark.parametrize("context", ["The river", "The river ", "The river \n\n", "<|user|>The river\n", "a"])
@pytest.mark.parametrize("continuation", ["Nile", " Nile", "s are long", "\n", ""])
def test_texts_are_divided_as_lm_eval_divides_them(llm: LLM, context: str, continuation: str) -> None:
    texts = HadronLM(llm)._texts
    theirs = SimpleNamespace(backend="causal", tok_encode=texts.encode)
    assert texts.pair(context, continuation) == TemplateLM._encode_pair(theirs, context, continuation)


def test_a_context_of_white_space_is_to_be_predicted(llm: LLM) -> None:
    texts = HadronLM(llm)._texts
    assert texts.pair(" \n", "Nile") == (texts.opening, texts.plain(" \nNile"))


def test_a_checkpoint_without_a_tokenizer_is_refused() -> None:
    bare = LLM(DATA / "glm52-ct-w4a16", kernels="reference", threads=1, max_model_len=64)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        HadronLM(bare)


def test_an_empty_context_is_the_end_of_another_text(llm: LLM) -> None:
    end = llm.tokenizer.token_id("<|endoftext|>")
    assert end is not None
    ids = llm.tokenizer.encode("the Nile", add_special_tokens=False)
    rows = log_softmax(llm, [end, *ids])
    ((logprob, _),) = HadronLM(llm).loglikelihood(requests(("", "the Nile")))
    assert logprob == pytest.approx(sum(rows[i, token] for i, token in enumerate(ids)), abs=1e-4)


def test_markup_in_a_context_is_markup(llm: LLM) -> None:
    texts = HadronLM(llm)._texts
    prompt = "<|user|>Hello<|assistant|>"
    ids = texts.encode(prompt)
    assert ids[0] == llm.tokenizer.token_id("<|user|>") and ids[-1] == llm.tokenizer.token_id("<|assistant|>")
    assert llm.tokenizer.decode(ids, skip_special_tokens=False) == prompt


def test_rolling_windows_add_up_to_a_direct_computation(llm: LLM) -> None:
    text = "A river is long. " * 40  # more than the 128 tokens that fit
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 2 * 128
    end = llm.tokenizer.token_id("<|endoftext|>")
    assert end is not None
    whole, wanted, begin = [end, *ids], 0.0, 1
    while begin < len(whole):  # each window ends 128 tokens after the last, and reads the 128 before its end
        stop = min(len(whole), begin + 128)
        read = whole[max(0, stop - 1 - 128) : stop - 1]
        rows = log_softmax(llm, read)
        wanted += sum(rows[len(read) - (stop - i), whole[i]] for i in range(begin, stop))
        begin = stop
    short = HadronLM(llm).loglikelihood(requests(("", "A river")))[0][0]
    found = HadronLM(llm).loglikelihood_rolling(requests((text,), ("A river",), ("",)))
    assert found[0] == pytest.approx(wanted, abs=1e-4 * len(ids))
    assert found[1:] == pytest.approx([short, 0.0], abs=1e-4)


def test_answers_end_before_a_stop_string_and_are_greedy(llm: LLM) -> None:
    model = HadronLM(llm)
    (whole,) = model.generate_until(requests((CONTEXT, {"until": [], "max_gen_toks": 12})))
    (expected,) = llm.generate(
        CONTEXT,
        SamplingParams(max_tokens=12, temperature=0, repetition_penalty=1.0, skip_special_tokens=False),
    )
    assert whole == expected.outputs[0].text
    stop = whole[4:6]
    settings = {"until": [stop, ""], "max_gen_toks": 12, "do_sample": False, "temperature": 0.7, "num_beams": 1}
    assert model.generate_until(requests((CONTEXT, settings))) == [whole[: whole.index(stop)]]
    assert model.generate_until(requests((CONTEXT, {"until": stop, "max_gen_toks": 12}))) == [
        whole[: whole.index(stop)]
    ]


def test_sampled_answers_repeat_with_their_seed_and_differ_from_each_other(llm: LLM) -> None:
    settings = {"do_sample": True, "temperature": 1.5, "max_gen_toks": 8}
    several = requests(*[(CONTEXT, settings)] * 3)
    first = HadronLM(llm, seed=5).generate_until(several)
    assert HadronLM(llm, seed=5).generate_until(several) == first
    assert HadronLM(llm, seed=50).generate_until(several) != first
    assert len(set(first)) > 1


def test_a_way_to_generate_that_is_not_known_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match=r"num_beams=4") as raised:
        HadronLM(llm).generate_until(requests((CONTEXT, {"until": [], "num_beams": 4})))
    assert raised.value.where == "generation_kwargs" and "temperature" in raised.value.accepted


def test_a_thought_is_no_part_of_the_answer(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    said = iter([("one\ntwo</think>\nfour\nfive", "length"), ("one", "length"), ("one\ntwo", "stop")])

    def generate(prompts: list[Any], params: list[SamplingParams], **_: Any) -> list[Any]:
        asked.extend(params)
        texts = [SimpleNamespace(text=text, finish_reason=reason) for text, reason in said]
        return [SimpleNamespace(outputs=[each]) for each in texts]

    model = HadronLM(llm)
    monkeypatch.setattr(llm, "generate", generate)
    prompt = f"<|user|>Hello<|assistant|>{Mark.THINK}"
    settings = {"until": ["\n"], "max_gen_toks": 8}
    assert model.generate_until(requests(*[(prompt, settings)] * 3)) == ["four", "", "one"]
    assert [params.stop for params in asked] == [()] * 3


def test_contexts_lose_their_beginning_and_are_counted(llm: LLM) -> None:
    model = HadronLM(llm)
    long = "river " * 300
    ((shortened, _), (fits, _)) = model.loglikelihood(requests((long, " Nile"), (CONTEXT, " Nile")))
    assert model.shortened == 1
    ids = llm.tokenizer.encode(long + " Nile")
    tail = len(ids) - len(llm.tokenizer.encode(long.rstrip()))
    rows = log_softmax(llm, ids[-129:-1])
    assert shortened == pytest.approx(sum(rows[-i, ids[-i]] for i in range(1, tail + 1)), abs=1e-4)
    assert fits != shortened
    model.generate_until(requests((long, {"max_gen_toks": 4})))
    assert model.shortened == 2


def test_conversations_go_through_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    assert HadronLM(llm).apply_chat_template(messages) == llm.chat_template.render(messages)
    switched = HadronLM(llm, switches={"enable_thinking": False}).apply_chat_template(messages)
    assert switched == llm.chat_template.render(messages, enable_thinking=False) != llm.chat_template.render(messages)


def test_lm_eval_knows_the_model_by_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("hadron") is HadronLM
    model = HadronLM.create_from_arg_string(f"pretrained={RANDOM},kernels=reference,max_model_len=64")
    assert model.max_length == 64
