"""`LLM`: the forms of prompts, outputs in vLLM's shape, defaults from the checkpoint, and every refusal."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hadron
from hadron import LLM, SamplingParams
from hadron.engine.events import TokenEvent
from hadron.tokenizer.chat_template import ChatTemplate
from tests.conftest import DATA, RANDOM

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
IDS = [5, 9, 2, 77, 30]
WITHOUT_TOKENIZER = DATA / "glm52-ct-w4a16"


def load(folder: Path = RANDOM, **options: Any) -> LLM:
    return LLM(folder, **({"kernels": "reference", "dtype": "float32", "threads": 1} | options))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load()


@pytest.fixture(scope="module")
def bare() -> LLM:
    return load(WITHOUT_TOKENIZER)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the model to change."""
    return Path(shutil.copytree(RANDOM, tmp_path / "model"))


def test_forms_of_a_prompt(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The river")
    forms: list[Any] = ["The river", {"prompt": "The river"}, {"prompt_token_ids": ids}]
    forms += [["The river"], [{"prompt_token_ids": np.array(ids)}], [{"prompt_token_ids": torch.tensor(ids)}]]
    outputs = [llm.generate(form, GREEDY) for form in forms]
    assert all(len(out) == 1 for out in outputs)
    assert {tuple(out[0].prompt_token_ids) for out in outputs} == {tuple(ids)}
    assert len({tuple(out[0].outputs[0].token_ids) for out in outputs}) == 1
    assert [out[0].prompt for out in outputs] == ["The river", "The river", None, "The river", None, None]


def test_outputs_have_the_shape_that_vllm_has(llm: LLM) -> None:
    (output,) = llm.generate("The river", GREEDY)
    completion = output.outputs[0]
    assert isinstance(output.prompt_token_ids, list)
    assert isinstance(completion.token_ids, list)
    assert all(type(i) is int for i in (*output.prompt_token_ids, *completion.token_ids))
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.logprobs, output.finished) == ("length", None, True)
    assert len(completion.token_ids) == 8


def test_without_a_tokenizer_ids_work_and_there_is_no_text(bare: LLM) -> None:
    (output,) = bare.generate({"prompt_token_ids": IDS}, GREEDY)
    assert (len(output.outputs[0].token_ids), output.outputs[0].text) == (8, None)
    assert not bare.has_tokenizer
    with pytest.raises(hadron.TokenizerError, match="has no tokenizer"):
        bare.generate("text", GREEDY)
    with pytest.raises(hadron.TokenizerError, match="has no chat template"):
        bare.chat([{"role": "user", "content": "hi"}], GREEDY)


def test_logits_choose_the_greedy_tokens(llm: LLM) -> None:
    (output,) = llm.generate({"prompt_token_ids": IDS}, GREEDY)
    tokens = output.outputs[0].token_ids
    logits = llm.logits([*IDS, *tokens])
    assert logits.dtype == np.float32
    assert logits.shape == (len(IDS) + 8, 512)
    assert logits.argmax(-1)[len(IDS) - 1 : -1].tolist() == tokens


def test_several_prompts_give_what_each_gives_alone(llm: LLM) -> None:
    prompts: list[Any] = ["The river", {"prompt_token_ids": IDS}, "How"]
    params = SamplingParams(max_tokens=12, temperature=1.5, seed=5, ignore_eos=True, logprobs=2)
    together = llm.generate(prompts, params)
    alone = [llm.generate(prompt, params)[0] for prompt in prompts]
    for ours, theirs in zip(together, alone, strict=True):
        a, b = ours.outputs[0], theirs.outputs[0]
        assert (a.token_ids, a.text, a.finish_reason) == (b.token_ids, b.text, b.finish_reason)
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, rel=1e-5)  # these kernels promise no bits


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    first, second = llm.generate(["a", "b"], [GREEDY, SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)])
    assert (len(first.outputs[0].token_ids), len(second.outputs[0].token_ids)) == (8, 3)


def test_tokens_are_reported_as_they_come(llm: LLM) -> None:
    events: list[tuple[int, TokenEvent]] = []
    outputs = llm.generate(["a", "b"], GREEDY, on_token=lambda i, event: events.append((i, event)))
    for i, output in enumerate(outputs):
        mine = [event for index, event in events if index == i]
        assert [event.token_id for event in mine] == output.outputs[0].token_ids
        assert "".join(event.text for event in mine) == output.outputs[0].text
        assert [event.finish_reason for event in mine] == [None] * 7 + ["length"]


def test_an_error_in_the_callback_leaves_the_model_usable(llm: LLM) -> None:
    def fail(_: int, __: TokenEvent) -> None:
        raise KeyError("mine")

    expected = llm.generate("a", GREEDY)[0].outputs
    with pytest.raises(KeyError, match="mine"):
        llm.generate(["a", "b"], GREEDY, on_token=fail)
    assert llm.generate("a", GREEDY)[0].outputs == expected


def test_a_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    text = llm.generate("a", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True))[0].outputs[0].text
    assert text is not None
    stop = text[10:13]
    (output,) = llm.generate("a", SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=stop))
    assert output.outputs[0].text == text[: text.index(stop)]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", stop)


def test_chat_renders_and_answers(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(messages, GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert output.prompt == "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>hi<|assistant|><think></think>"
    assert output.prompt_token_ids == llm.tokenizer.encode(output.prompt)
    assert output.prompt_token_ids[:3] == [llm.tokenizer.token_id(t) for t in ("[gMASK]", "<sop>", "<|system|>")]
    both = llm.chat([messages, [*messages, {"role": "assistant", "content": "yo"}, *messages]], GREEDY)
    assert [out.prompt.count("<|user|>") for out in both if out.prompt] == [1, 2]


def test_broken_tool_arguments_are_refused_by_place(llm: LLM) -> None:
    call = {"function": {"name": "f", "arguments": "{"}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    with pytest.raises(hadron.RequestError) as caught:
        llm.chat(messages, GREEDY)
    assert caught.value.where == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("part", ["image", "video"])
def test_pictures_are_refused_not_ignored(llm: LLM, part: str) -> None:
    with pytest.raises(hadron.RequestError, match="cannot be read") as caught:
        llm.chat([{"role": "user", "content": [{"type": part}]}], GREEDY)
    assert caught.value.where == "messages[0].content[0].type" and caught.value.found == repr(part)
    llm.__dict__["chat_template"] = ChatTemplate("{{ messages | length }}", where="drops parts")
    try:
        with pytest.raises(hadron.RequestError, match="cannot be read"):
            llm.chat([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": part}]}], GREEDY)
    finally:
        del llm.chat_template
    with pytest.raises(hadron.RequestError, match="cannot be read"):
        llm.generate(f"see <|{part}|>", GREEDY)


def test_sampling_defaults_come_from_the_checkpoint(copy: Path) -> None:
    config = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**config, "do_sample": False}))
    changed = load(copy)
    asked = SamplingParams(max_tokens=8, ignore_eos=True)
    expected = changed.generate("a", GREEDY)[0].outputs[0].token_ids
    assert changed.generate("a", asked)[0].outputs[0].token_ids == expected
    sampled = SamplingParams(max_tokens=8, ignore_eos=True, temperature=2.0, seed=1)
    assert changed.generate("a", sampled)[0].outputs[0].token_ids != expected


def test_end_tokens_come_from_both_files(copy: Path, llm: LLM) -> None:
    tokens = llm.generate("a", GREEDY)[0].outputs[0].token_ids
    first, second = tokens[2], tokens[5]
    assert tokens.index(first) == 2
    assert tokens.index(second) == 5
    greedy = SamplingParams(max_tokens=8, temperature=0)

    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": second}))
    (output,) = load(copy).generate("a", greedy)
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (tokens[:6], "stop")

    config = json.loads((copy / "config.json").read_text())
    config["text_config"]["eos_token_id"] = [first]
    (copy / "config.json").write_text(json.dumps(config))
    (output,) = load(copy).generate("a", greedy)
    assert output.outputs[0].token_ids == tokens[:3]
    assert output.outputs[0].text == llm.tokenizer.decode(tokens[:2])


def test_defaults_that_cannot_be_used_are_ignored_and_the_plan_says_so(copy: Path) -> None:
    (copy / "generation_config.json").write_text('{"temperature": "warm", "top_p": 0.5, "eos_token_id": "<|user|>"}')
    llm = load(copy)
    ignored = [p for p in llm.plan.problems if p.code == "HC208"]
    assert [p.tensors for p in ignored] == [("temperature",), ("eos_token_id",)]
    assert "temperature is ignored: found 'warm'; accepted a number" in ignored[0].message
    assert "found '<|user|>'; accepted a token id or a list of them" in ignored[1].message
    filled = SamplingParams().with_defaults(llm.plan.facts.generation_config)
    assert (filled.temperature, filled.top_p, filled.top_k) == (1.0, 0.5, 0)


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        (3, "prompt"),
        ({"text": "a"}, "prompt"),
        ({"prompt": 3}, "prompt"),
        (["a", 3], "prompts[1]"),
        ([[1, 2]], "prompt"),
    ],
)
def test_other_forms_of_a_prompt_are_refused(llm: LLM, prompt: Any, where: str) -> None:
    if isinstance(prompt, int):
        prompt = [prompt]
    with pytest.raises(hadron.RequestError, match="form that is not known") as caught:
        llm.generate(prompt, GREEDY)
    assert caught.value.where == where
    assert "prompt_token_ids" in caught.value.hint


@pytest.mark.parametrize("ids", ["123", 5, None])
def test_ids_must_be_a_list(llm: LLM, ids: Any) -> None:
    with pytest.raises(hadron.RequestError, match="not a list"):
        llm.generate({"prompt_token_ids": ids}, GREEDY)
    with pytest.raises(hadron.RequestError, match="not a list"):
        llm.logits(ids)


def test_nothing_runs_when_one_prompt_is_wrong(llm: LLM) -> None:
    seen: list[int] = []
    with pytest.raises(hadron.RequestError) as caught:
        llm.generate(["a", {"prompt_token_ids": [1, 512]}], GREEDY, on_token=lambda i, _: seen.append(i))
    assert caught.value.where == "prompts[1].prompt_token_ids[1]"
    assert caught.value.accepted == "an integer from 0 to 511"
    assert seen == []


def test_parameters_must_fit_the_prompts(llm: LLM) -> None:
    with pytest.raises(hadron.RequestError) as caught:
        llm.generate(["a", "b"], [GREEDY])
    assert caught.value.found == "1 for 2 prompt(s)"


def test_answers_hold_no_placeholders_of_pictures(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logit_bias={500: 100})
    assert llm.generate("a", params)[0].outputs[0].token_ids == [500] * 3
    assert 500 not in llm.chat([{"role": "user", "content": "a"}], params)[0].outputs[0].token_ids


def test_several_continuations_with_one_seed(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=2.0, seed=9, n=3, ignore_eos=True)
    (output,) = llm.generate("The river", params)
    alone = [llm.generate("The river", replace(params, n=1, seed=9 + i))[0].outputs[0].token_ids for i in range(3)]
    assert [c.token_ids for c in output.outputs] == alone
    assert [c.index for c in output.outputs] == [0, 1, 2]


def test_priorities_decide_who_goes_first() -> None:
    llm, order = load(max_num_seqs=1), []
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    llm.generate(["a", "b", "c"], params, priority=[1, 0, -1], on_token=lambda i, _: order.append(i))
    assert order == [2, 1, 0]
    for wrong in ([1], 5, [1, 2, "x"], "abc"):
        with pytest.raises(hadron.RequestError) as caught:
            llm.generate(["a", "b", "c"], params, priority=wrong)
        assert caught.value.where == "priority"


def test_what_was_counted() -> None:
    llm = load()
    llm.generate(["The river", "b"], GREEDY)
    stats = llm.stats
    assert (stats.generated_tokens, stats.prefix_too_short, stats.failures) == (16, 2, 0)
    assert stats.prompt_tokens == sum(len(llm.tokenizer.encode(text)) for text in ("The river", "b"))
    before = (stats.prefix_hits, stats.prefix_misses, stats.prefix_too_short)
    llm.generate({"prompt_token_ids": IDS * 20}, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert (stats.prefix_hits, stats.prefix_misses, stats.prefix_too_short) == before, "nothing was looked for"


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_a_prompt_that_does_not_fit_is_refused_with_numbers(llm: LLM) -> None:
    with pytest.raises(hadron.RequestError) as caught:
        llm.logits([1] * 4097)
    assert (caught.value.found, caught.value.accepted) == ("4097 tokens", "at most 4096")
    small = load(max_model_len=6)
    assert small.max_model_len == 6
    with pytest.raises(hadron.CapacityError) as caught_capacity:
        small.generate({"prompt_token_ids": [1] * 7}, GREEDY)
    assert caught_capacity.value.accepted == "at most 6 (the model itself could take 4096)"
    (output,) = small.generate({"prompt_token_ids": [1] * 5}, GREEDY)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (2, "length")


def test_bfloat16_is_near_float32(llm: LLM) -> None:
    """Median error: a single router choice that flips moves one row by much."""
    exact, near = llm.logits(IDS), load(dtype="bfloat16").logits(IDS)
    assert near.dtype == np.float32
    assert 0 < np.median(np.abs(near - exact)) < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize(
    ("options", "where"),
    [({"kernels": "fast"}, "--kernels"), ({"dtype": "float8"}, "--dtype"), ({"threads": 0}, "--threads"),
     ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"), ({"max_model_len": -1}, "--max-model-len"),
     ({"max_num_seqs": None}, "--max-num-seqs"), ({"num_pages": 0}, "--num-pages"),
     ({"kv_cache_memory_bytes": 0}, "--kv-cache-memory-bytes"),
     ({"memory_utilization": 1.5}, "--memory-utilization"), ({"memory_utilization": True}, "--memory-utilization")],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], where: str) -> None:
    with pytest.raises(hadron.UsageError) as caught:
        load(**options)
    assert caught.value.where == where


def test_a_plan_with_errors_is_refused(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "architectures": ["OtherForCausalLM"]}))
    with pytest.raises(hadron.PlanError, match="HC202") as caught:
        load(copy)
    assert [p.code for p in caught.value.problems] == ["HC202"]
    assert hadron.check(str(copy)).problems == caught.value.problems


def test_check_gives_the_plan(llm: LLM) -> None:
    plan = hadron.check(str(RANDOM))
    assert isinstance(plan, hadron.LoadPlan)
    assert plan.ok
    assert [m.name for m in plan.modules] == [m.name for m in llm.plan.modules]


@pytest.mark.parametrize("model", [None, 5, b"x"])
def test_a_model_that_is_no_path_is_refused(model: Any) -> None:
    with pytest.raises(hadron.UsageError, match="the model is not named") as caught:
        LLM(model)
    assert caught.value.found == repr(model) and "folder" in caught.value.accepted


@pytest.mark.parametrize(
    ("call", "where"),
    [
        (lambda m: m.generate(None), "prompts"),
        (lambda m: m.generate(5), "prompts"),
        (lambda m: m.generate([5]), "prompt"),
        (lambda m: m.generate("a", 5), "sampling_params"),
        (lambda m: m.generate("a", {"max_tokens": 1}), "sampling_params"),
        (lambda m: m.generate("a", [None]), "sampling_params"),
        (lambda m: m.chat(None), "messages"),
        (lambda m: m.chat([5]), "messages"),
        (lambda m: m.chat([{"role": "user", "content": "a"}], chat_template_kwargs=[1]), "chat_template_kwargs"),
        (
            lambda m: m.chat([{"role": "user", "content": "a"}], chat_template_kwargs={"messages": 1}),
            "chat_template_kwargs",
        ),
    ],
)
def test_arguments_of_another_form_are_refused(llm: LLM, call: Any, where: str) -> None:
    with pytest.raises(hadron.RequestError) as caught:
        call(llm)
    assert caught.value.where == where and caught.value.accepted and caught.value.hint
