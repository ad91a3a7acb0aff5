"""The loop on a model that is arithmetic: the next token is a function of every token before it.

It reads the tokens back from the pages and counts in the state slot, so a page, position or stamp that
is off changes what it says.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conftest import DATA
from hadron.batch import ForwardBatch, Selections
from hadron.cache.spec import CacheSpec, LayerCache
from hadron.engine.engine import Engine
from hadron.engine.runner import Runner
from hadron.errors import CapacityError, NumericsError, RequestError
from hadron.kernels.provider import Provider
from hadron.layers.logits import Logits
from hadron.sampling_params import SamplingParams
from hadron.tokenizer.tokenizer import Tokenizer

VOCABULARY = 481
END = 480


def digest(tokens: list[int]) -> int:
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 1_000_003
    return value


def next_token(tokens: list[int]) -> int:
    return digest(tokens) % VOCABULARY


def continuation(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Arithmetic:
    """Forward gives a digest of the whole prefix for each token; logits peak at the token it names."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.settings = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        self.steps: list[int] = []
        self.heads = 0
        self.fail_at = fail_at
        self.poisoned: int | None = None  # a token whose logits are not finite
        self.refused: int | None = None  # a token that a kernel refuses

    def forward(self, batch: ForwardBatch, trace: Any = None) -> torch.Tensor:
        batch.check_stamps()
        self.steps.append(batch.tokens)
        if self.refused in batch.token_ids.tolist():
            for slot in batch.state_slots:  # half of a step
                batch.states.kda[0][slot] += 100  # type: ignore[index]
            raise NumericsError("a kernel", where="row", found="a NaN", accepted="none", hint="none")
        batch.pages.write_latents(0, batch.slots, batch.token_ids.float()[:, None])
        rows = batch.pages.latent_rows(0)
        out = []
        for i, (start, count) in enumerate(zip(batch.context_lens, batch.query_lens, strict=True)):
            size = batch.pages.page_size
            slots = [int(batch.block_tables[i, p // size]) * size + p % size for p in range(start + count)]
            prefix = [int(rows[s]) for s in slots]
            state = batch.states.kda[0]
            assert state is not None
            assert int(state[batch.state_slots[i]]) == start
            state[batch.state_slots[i]] += count
            digests = [digest(prefix[: p + 1]) for p in range(start, start + count)]
            out += [-1 if self.poisoned in prefix else value for value in digests]
        batch.advance()
        return torch.tensor(out, dtype=torch.float64)[:, None]

    def head(self, hidden: torch.Tensor) -> Logits:
        self.heads += hidden.shape[0]
        logits = torch.zeros(hidden.shape[0], VOCABULARY)
        logits[torch.arange(hidden.shape[0]), hidden[:, 0].long() % VOCABULARY] = 5
        logits[hidden[:, 0] < 0, 5] = float("nan")
        if self.fail_at is not None and self.heads >= self.fail_at:
            logits[-1, 3] = float("nan")
        return Logits.of(logits, Provider())


def engine(*, chunk_size: int = 4, max_context: int = 64, has_state: bool = True, **options: Any) -> tuple[Engine, Any]:
    model: Any = Arithmetic(options.pop("fail_at", None))
    if not has_state:
        model.forward = stateless(model)
    layer = LayerCache(latent_width=1, kda=(1, 1) if has_state else ())
    spec = CacheSpec((layer,), pool=1, dtype="float32", page_size=4, latents="float32")
    caches = {key: options.pop(key) for key in ("max_num_seqs", "num_pages", "prefix_snapshots") if key in options}
    runner = Runner(model, spec, max_model_len=max_context, **caches)
    settings = {"vocabulary": VOCABULARY, "max_position": 1000, "eos": frozenset({END}), "tokenizer": None} | options
    return Engine(runner, max_num_batched_tokens=chunk_size, **settings), model


def stateless(model: Arithmetic) -> Any:
    def forward(batch: ForwardBatch, trace: Any = None) -> torch.Tensor:
        model.steps.append(batch.tokens)
        batch.pages.write_latents(0, batch.slots, batch.token_ids.float()[:, None])
        rows = batch.pages.latent_rows(0)[:, 0]
        size, table = batch.pages.page_size, batch.block_tables[0]
        end = batch.context_lens[0] + batch.query_lens[0]
        prefix = [int(rows[int(table[p // size]) * size + p % size]) for p in range(end)]
        batch.advance()
        out = [digest(prefix[: p + 1]) for p in range(batch.context_lens[0], end)]
        return torch.tensor(out, dtype=torch.float64)[:, None]

    return forward


def run(e: Engine, prompt: list[int], **params: Any) -> Any:
    filled = SamplingParams(**({"temperature": 0} | params)).with_defaults({})
    e.check_params(filled)
    request = e.add("r", e.check_prompt(prompt, "prompt"), filled)
    while e.has_requests:
        e.step()
    return request.output().outputs[0]


PROMPT = [5, 9, 2, 7, 1, 8, 4, 3, 6, 11, 12]


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 5, 10, 11, 12, 100])
def test_a_prompt_in_pieces_gives_the_same_tokens(chunk_size: int) -> None:
    e, model = engine(chunk_size=chunk_size)
    assert run(e, PROMPT, max_tokens=20, ignore_eos=True).token_ids == continuation(PROMPT, 20)
    whole, rest = divmod(len(PROMPT), chunk_size)
    assert model.steps == [chunk_size] * whole + [rest] * bool(rest) + [1] * 19
    assert model.heads == 20, "logits are computed where a token is chosen, nowhere else"


@pytest.mark.parametrize("chunk_size", [1, 3, 50])
def test_logits_have_a_row_for_every_token(chunk_size: int) -> None:
    e, _ = engine(chunk_size=chunk_size)
    logits = e.logits(e.check_prompt(PROMPT, "prompt"))
    assert logits.dtype == np.float32
    assert logits.shape == (len(PROMPT), VOCABULARY)
    assert logits.argmax(-1).tolist() == [next_token(PROMPT[: i + 1]) for i in range(len(PROMPT))]


def test_br77_requests_none_of_which_can_move_end_the_step_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever on an engine that stands still."""
    e, _ = engine()
    e.add("r", tuple(PROMPT), SamplingParams(temperature=0, max_tokens=3).with_defaults({}))
    monkeypatch.setattr(e._scheduler, "_admit", lambda: None)
    with pytest.raises(AssertionError, match="requests wait, and none of them can move"):
        e.step()


def test_requests_follow_one_another_on_the_same_cache() -> None:
    e, _ = engine(max_context=32)
    for start in range(12):
        prompt = list(range(start, start + 20))
        assert run(e, prompt, max_tokens=13, ignore_eos=True).token_ids == continuation(prompt, 13)


def test_queued_requests_are_all_served_in_order() -> None:
    e, _ = engine()
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True).with_defaults({})
    requests = [e.add(str(i), (i + 1, i), params) for i in range(3)]
    order = []
    while e.has_requests:
        order += [event.request_id for event in e.step()]
    assert order == ["0"] * 3 + ["1"] * 3 + ["2"] * 3
    for i, request in enumerate(requests):
        assert request.output_token_ids == continuation([i + 1, i], 3)


@pytest.mark.parametrize("chunk_size", [1, 3, 5, 64])
@pytest.mark.parametrize("pages", [None, 9])
@pytest.mark.parametrize("snapshots", [0, 4])
def test_many_requests_at_once_give_what_each_gives_alone(chunk_size: int, pages: int | None, snapshots: int) -> None:
    """With few pages they push each other out; with snapshots they go on from where they were."""
    options = {"max_num_seqs": 4, "prefix_snapshots": snapshots} | ({"num_pages": pages} if pages else {})
    e, _ = engine(chunk_size=chunk_size, max_context=36, **options)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True).with_defaults({})
    prompts = [[*PROMPT[: 3 + i], i] for i in range(8)]
    requests = [e.add(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    while e.has_requests:
        e.step()
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.output_token_ids == continuation(prompt, 12)
    assert (e.stats.preemptions > 0) is (pages == 9)
    assert e.stats.generated_tokens == 8 * 12
    assert [r.output().num_preemptions for r in requests] == [r.num_preemptions for r in requests]


def test_a_request_that_fails_leaves_the_others_alone() -> None:
    e, model = engine(max_num_seqs=3, chunk_size=64)
    model.poisoned = 77
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True).with_defaults({})
    prompts = [PROMPT, [5, 77, 3], PROMPT[:4]]
    requests = [e.add(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    while e.has_requests:
        e.step()
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, NumericsError)
    for i in (0, 2):
        assert requests[i].output_token_ids == continuation(prompts[i], 6)


def test_a_step_that_fails_is_taken_again_by_each_alone() -> None:
    e, model = engine(max_num_seqs=3, chunk_size=64)
    model.refused = 77
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True).with_defaults({})
    prompts = [PROMPT, [5, 77, 3], PROMPT[:4]]
    requests = [e.add(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)]
    while e.has_requests:
        e.step()
    assert [r.finish_reason for r in requests] == ["length", "error", "length"]
    assert requests[1].error is not None and requests[1].error.found == "a NaN"
    for i in (0, 2):
        assert requests[i].output_token_ids == continuation(prompts[i], 6)


def test_an_unforeseen_error_ends_the_step_and_gives_everything_back() -> None:
    e, model = engine(max_num_seqs=2, chunk_size=64)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True).with_defaults({})
    requests = [e.add(str(i), tuple(PROMPT), params) for i in range(2)]
    forward, model.forward = model.forward, lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        e.step()
    assert not e.has_requests and [r.finish_reason for r in requests] == ["abort"] * 2
    model.forward = forward
    assert run(e, PROMPT, max_tokens=9, ignore_eos=True).token_ids == continuation(PROMPT, 9)


def test_an_aborted_request_is_gone_within_the_step() -> None:
    e, _ = engine(max_num_seqs=2, chunk_size=4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True).with_defaults({})
    first, second, third = (e.add(str(i), tuple(PROMPT), params) for i in range(3))
    e.step()
    assert e.abort("0") and e.abort("2") and not e.abort("2")
    while e.has_requests:
        assert "0" not in {event.request_id for event in e.step()}
    assert [r.finish_reason for r in (first, second, third)] == ["abort", "length", "abort"]
    assert second.output_token_ids == continuation(PROMPT, 6)


def test_the_load_is_what_is_held_at_the_moment() -> None:
    e, _ = engine(max_num_seqs=1, num_pages=8, chunk_size=100, prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True).with_defaults({})
    assert e.load == (0, 0, 0, 8, 1)
    for name in ("0", "1"):
        e.add(name, tuple(PROMPT), params)
    assert e.load == (2, 0, 0, 8, 1)
    e.step()
    assert e.load == (1, 1, 3, 8, 0)  # eleven tokens on pages of four
    e.abort_all()
    assert e.load == (0, 0, 0, 8, 1)


def test_several_continuations_of_one_prompt() -> None:
    e, model = engine(max_num_seqs=4, chunk_size=100, prefix_snapshots=4)
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=6, ignore_eos=True, n=3).with_defaults({})
    first, *others = e.add_all("a", tuple(PROMPT), params)
    while e.has_requests:
        e.step()
    output = first.output(*others)
    assert [c.index for c in output.outputs] == [0, 1, 2] and output.finished
    assert model.steps[:3] == [8, 3, 1 + 2 * 3], "the prompt is computed once, but for its open page"
    alone = [
        run(engine()[0], PROMPT, temperature=3.0, seed=5 + i, max_tokens=6, ignore_eos=True).token_ids for i in range(3)
    ]
    assert [c.token_ids for c in output.outputs] == alone
    assert len({tuple(ids) for ids in alone}) == 3


@pytest.mark.parametrize("caching", [False, True])
def test_no_continuation_begins_before_the_prompts_log_probabilities_are_known(caching: bool) -> None:
    snapshots = {"prefix_snapshots": 4} if caching else {"prefix_caching": False}
    e, _ = engine(max_num_seqs=4, chunk_size=5, **snapshots)
    params = SamplingParams(temperature=3.0, seed=5, max_tokens=2, ignore_eos=True, n=3, prompt_logprobs=1)
    first, *_ = e.add_all("a", tuple(PROMPT), params.with_defaults({}))
    while not (events := e.step()):
        pass
    assert events[0].index == 0 and len(first.prompt_logprobs) == len(PROMPT)
    e.abort_all()


@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_log_probabilities_of_the_prompt(chunk_size: int) -> None:
    e, _ = engine(chunk_size=chunk_size, prefix_snapshots=3, max_num_seqs=2)
    run(e, PROMPT, max_tokens=1)
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=1, ignore_eos=True).with_defaults({})
    request = e.add("a", tuple(PROMPT), params)
    e.add("b", tuple(PROMPT), SamplingParams(temperature=0, max_tokens=2).with_defaults({}))
    while e.has_requests:
        e.step()
    output = request.output()
    assert output.num_cached_tokens == 0, "what is found has no logits"
    assert e.stats.cached_tokens == 8, "the other one found it"
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(PROMPT)
    log_sum = np.log(np.exp(5) + VOCABULARY - 1)
    for i, row in enumerate(output.prompt_logprobs[1:], 1):
        best = next_token(PROMPT[:i])
        assert row is not None and set(row) == {best, PROMPT[i]}
        assert row[best].logprob == pytest.approx(5 - log_sum)
        assert row[PROMPT[i]].logprob == pytest.approx((5 if PROMPT[i] == best else 0) - log_sum)
    assert output.outputs[0].token_ids == continuation(PROMPT, 2)


def test_penalties_and_biases_reach_the_draw_and_not_the_log_probabilities() -> None:
    e, _ = engine()
    banned = next_token(PROMPT)
    out = run(e, PROMPT, max_tokens=1, logit_bias={banned: -100, 7: 50.0}, logprobs=1)
    assert out.token_ids == [7]
    assert out.logprobs[0][banned].rank == 1


def test_biases_outside_the_vocabulary_are_refused() -> None:
    e, _ = engine()
    with pytest.raises(RequestError, match="outside the vocabulary") as caught:
        e.check_params(SamplingParams(logit_bias={3: 1.0, 481: 1.0}).with_defaults({}))
    assert caught.value.where == "logit_bias.481"


def test_the_models_end_waits_for_the_least_number_of_tokens() -> None:
    prompt = next([a, b] for a in range(400) for b in range(3) if next_token([a, b]) == END)
    e, _ = engine()
    out = run(e, prompt, max_tokens=9, min_tokens=3)
    assert len(out.token_ids) >= 3 and out.token_ids[0] != END


def test_answers_hold_nothing_that_only_prompts_hold() -> None:
    e, _ = engine(prompt_only={next_token(PROMPT)})
    params = SamplingParams(temperature=0, max_tokens=1).with_defaults({})
    raw, answer = (e.add(str(i), tuple(PROMPT), params, answer=bool(i)) for i in range(2))
    while e.has_requests:
        e.step()
    assert raw.output_token_ids == [next_token(PROMPT)] != answer.output_token_ids


def test_requests_of_different_wishes_are_decided_by_one_question(monkeypatch: pytest.MonkeyPatch) -> None:
    wishes: list[dict[str, Any]] = [
        {}, {"logit_bias": {3: 1.5}}, {"logit_bias": {4: -1.0}}, {"presence_penalty": 0.5}, {"min_tokens": 9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1},
    ]  # fmt: skip
    e, _ = engine(chunk_size=100, prompt_only={7}, max_num_seqs=7, num_pages=70)
    calls: list[tuple[str, int]] = []
    for name in ("rule", "best"):
        asked = getattr(Logits, name)

        def counted(logits: Logits, first: Any, *rest: Any, asked: Any = asked, name: str = name, **more: Any) -> Any:
            calls.append((name, len(more["rows"] if name == "best" else first)))
            return asked(logits, first, *rest, **more)

        monkeypatch.setattr(Logits, name, counted)
    for i, wish in enumerate([*wishes, {}]):
        params = SamplingParams(temperature=0, max_tokens=9, **wish).with_defaults({})
        e.add(str(i), tuple(PROMPT), params, answer=i == len(wishes))
    for _ in range(3):
        e.step()
    calls.clear()
    assert len(e.step()) == 7
    assert calls == [("rule", 6), ("best", 7)]


def test_imposed_choices_are_not_found_by_others() -> None:
    e, model = engine(chunk_size=100, has_state=False)
    e.logits(tuple(PROMPT), Selections())
    model.steps.clear()
    run(e, PROMPT, max_tokens=1)
    assert model.steps == [len(PROMPT)]
    e.logits(tuple(PROMPT))
    model.steps.clear()
    run(e, [*PROMPT[:8], 1], max_tokens=1)
    assert model.steps == [1]


def test_whole_pages_of_an_earlier_prompt_are_used_again() -> None:
    e, model = engine(chunk_size=100, has_state=False)
    first = run(e, PROMPT, max_tokens=6, ignore_eos=True)
    model.steps.clear()
    assert run(e, [*PROMPT[:9], 99], max_tokens=6, ignore_eos=True).token_ids == continuation([*PROMPT[:9], 99], 6)
    assert model.steps[0] == 2, "8 of 10 tokens were cached"
    model.steps.clear()
    assert run(e, PROMPT, max_tokens=6, ignore_eos=True) == first


def test_the_last_token_that_fits_is_generated() -> None:
    e, _ = engine(max_context=16)
    out = run(e, PROMPT, max_tokens=None, ignore_eos=True)
    assert out.token_ids == continuation(PROMPT, 16 - len(PROMPT) + 1)
    assert out.finish_reason == "length"


def test_the_models_end_token_stops() -> None:
    prompt = next([a, b] for a in range(400) for b in range(3) if next_token([a, b]) == END)
    e, _ = engine()
    out = run(e, prompt, max_tokens=9)
    assert (out.token_ids, out.finish_reason, out.stop_reason) == ([END], "stop", None)
    out = run(e, prompt, max_tokens=9, ignore_eos=True)
    assert (out.token_ids, out.finish_reason) == (continuation(prompt, 9), "length")


def test_events_carry_the_text_and_the_end() -> None:
    tokenizer = Tokenizer.load(DATA / "tokenizer")
    e, _ = engine(tokenizer=tokenizer, eos=frozenset())
    params = SamplingParams(temperature=0, max_tokens=40).with_defaults({})
    request = e.add("x", tuple(PROMPT), params, "what it was")
    events = []
    while e.has_requests:
        events += e.step()
    out = request.output()
    assert [event.token_id for event in events] == out.outputs[0].token_ids == continuation(PROMPT, 40)
    assert "".join(event.text for event in events) == out.outputs[0].text == tokenizer.decode(out.outputs[0].token_ids)
    assert [event.finish_reason for event in events] == [None] * 39 + ["length"]
    assert (out.prompt, out.finished) == ("what it was", True)


def test_logprobs_name_their_tokens() -> None:
    tokenizer = Tokenizer.load(DATA / "tokenizer")
    e, _ = engine(tokenizer=tokenizer, eos=frozenset())
    out = run(e, PROMPT, max_tokens=3, logprobs=2)
    chosen = np.exp(5) / (np.exp(5) + VOCABULARY - 1)
    for token, row in zip(out.token_ids, out.logprobs, strict=True):
        assert next(iter(row)) == token
        assert len(row) == 2
        assert row[token].logprob == pytest.approx(np.log(chosen))
        assert row[token].decoded_token == tokenizer.token_text(token)
    assert out.cumulative_logprob == pytest.approx(3 * np.log(chosen))


def test_a_seed_gives_the_same_tokens_whatever_the_chunks() -> None:
    first, *others = [
        run(engine(chunk_size=c)[0], PROMPT, max_tokens=30, temperature=3.0, seed=11, ignore_eos=True).token_ids
        for c in (1, 4, 64)
    ]
    assert others == [first, first]
    assert first != run(engine()[0], PROMPT, max_tokens=30, temperature=3.0, seed=12, ignore_eos=True).token_ids
    unseeded = [run(engine()[0], PROMPT, max_tokens=30, temperature=3.0, ignore_eos=True).token_ids for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_a_prompt_beyond_the_models_context_is_refused_with_numbers() -> None:
    e, model = engine(max_position=10, max_context=64)
    with pytest.raises(RequestError, match="longer than the model's context") as caught:
        e.check_prompt(PROMPT, "prompts[3]")
    assert (caught.value.where, caught.value.found, caught.value.accepted) == ("prompts[3]", "11 tokens", "at most 10")
    assert model.steps == []


def test_a_prompt_beyond_the_cache_is_refused_with_numbers() -> None:
    e, _ = engine(max_context=8)
    with pytest.raises(CapacityError, match="does not fit into the cache") as caught:
        e.check_prompt(PROMPT, "prompt")
    assert caught.value.found == "11 tokens"
    assert caught.value.accepted == "at most 8 (the model itself could take 1000)"
    assert "--max-model-len" in caught.value.hint


def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    e, _ = engine()
    with pytest.raises(RequestError, match="stop strings need a tokenizer") as caught:
        e.check_params(SamplingParams(stop="x").with_defaults({}))
    assert caught.value.hint == "give the ids that end a text as stop_token_ids"


def test_stop_ids_outside_the_vocabulary_are_refused() -> None:
    e, _ = engine()
    with pytest.raises(RequestError) as caught:
        e.check_params(SamplingParams(stop_token_ids=[3, 481]).with_defaults({}))
    assert caught.value.where == "stop_token_ids[1]"


def test_after_a_failed_step_everything_is_given_back() -> None:
    e, model = engine(fail_at=3)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True).with_defaults({})
    request = e.add("r", tuple(PROMPT), params)
    events = []
    while e.has_requests:
        events += e.step()
    assert isinstance(request.error, NumericsError)
    assert request.error.where == f"position {len(PROMPT) + 2}, token 3"
    assert [event.token_id for event in events] == [*continuation(PROMPT, 2), None]
    assert (events[-1].finish_reason, request.output().outputs[0].finish_reason) == ("error", "error")
    assert e.stats.failures == 1
    model.fail_at = None
    assert run(e, PROMPT, max_tokens=9, ignore_eos=True).token_ids == continuation(PROMPT, 9)
