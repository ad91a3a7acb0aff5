"""`bench serve`: events, prompts, and what is measured against a server whose schedule is known."""

from __future__ import annotations

import asyncio
import random
from itertools import islice, pairwise
from pathlib import Path
from statistics import mean, pstdev
from types import SimpleNamespace
from typing import Any

import pytest

from hadron.bench.serve import report, run, summary
from hadron.bench.serve.client import Outcome
from hadron.bench.serve.events import EventParser
from hadron.bench.serve.load import WORDS, Lengths, Load, read_lines
from hadron.errors import UsageError
from tests.bench.endpoint import DONE, HEAD, Endpoint, endpoint, event, piece, status, talk, usage
from tests.server.running import running

STREAM = "﻿: comment\ndata: one\r\ndata: more\r\rdata:two é\n\nevent: x\ndata\ndata: \n\nid: 7\n\ndata: cut off\n"
EVENTS = ["one\nmore", "two é", "\n"]
#: Milliseconds by which a busy machine may be late; what tells one time from another is bounded below.
SLACK = 2000.0


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_however_their_bytes_are_cut(seed: int) -> None:
    data, draw, parser = STREAM.encode(), random.Random(seed), EventParser()
    found, at = [], 0
    while at < len(data):
        size = draw.choice([1, 1, 2, 5, 100]) if seed else 1
        found += parser.feed(data[at : at + size])
        at += size
    assert found == EVENTS


def test_an_event_that_is_no_utf8_is_refused() -> None:
    with pytest.raises(UnicodeDecodeError):
        list(EventParser().feed(b"data: \xff\n\n"))


def test_lengths_follow_their_distribution() -> None:
    draw = random.Random(0)

    def drawn(text: str) -> list[int]:
        lengths = Lengths.parse(text, "--input-len")
        return [lengths.draw(draw) for _ in range(4000)]

    assert set(drawn("512")) == {512}
    assert set(drawn("uniform:3:5")) == {3, 4, 5}
    normal, lognormal = drawn("normal:500:50"), drawn("lognormal:500:250")
    assert mean(normal) == pytest.approx(500, rel=0.02) and pstdev(normal) == pytest.approx(50, rel=0.1)
    assert mean(lognormal) == pytest.approx(500, rel=0.05) and pstdev(lognormal) == pytest.approx(250, rel=0.15)
    assert min(drawn("normal:2:50")) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "x", "uniform:5", "uniform:5:3", "normal:5", "zipf:1:2", "5:3", "nan", "inf"]
)
def test_lengths_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="a distribution of lengths cannot be read") as refused:
        Lengths.parse(text, "--output-len")
    assert refused.value.where == "--output-len" and repr(text) in refused.value.found


def test_prompts_are_drawn_from_the_seed_and_share_prefixes() -> None:
    load = Load(Lengths("uniform", 2, 9), Lengths("uniform", 1, 50), prefixes=2, prefix_len=3, seed=4)
    first, again = (list(islice(load.prompts(), 40)) for _ in range(2))
    assert first == again
    words = [str(prompt.content).split(" ") for prompt in first]
    assert {tuple(w[:3]) for w in words[::2]} != {tuple(w[:3]) for w in words[1::2]}
    assert len({tuple(w[:3]) for w in words}) == 2 and {len(w) for w in words} == set(range(5, 13))
    assert set().union(*words) <= set(WORDS)
    others = list(islice(load.prompts("warm-up"), 40))
    assert [str(p.content).split(" ")[:3] for p in others] == [w[:3] for w in words] and others != first
    assert list(islice(Load(seed=5).prompts(), 3)) != list(islice(Load(seed=6).prompts(), 3))


def test_prompts_of_ids_stay_in_their_range() -> None:
    ids = [prompt.content for prompt in islice(Load(ids=(300, 302), prefix_len=2).prompts(), 5)]
    assert {len(each) for each in ids} == {514}
    assert set().union(*map(set, ids)) == {300, 301, 302}  # type: ignore[arg-type]


def test_arrivals_are_a_poisson_process_of_the_rate() -> None:
    times = list(islice(Load(seed=1).arrivals(8), 8001))
    assert times[0] == 0 and times == list(islice(Load(seed=1).arrivals(8), 8001))
    waits = [b - a for a, b in pairwise(times)]
    assert mean(waits) == pytest.approx(1 / 8, rel=0.05) and pstdev(waits) == pytest.approx(1 / 8, rel=0.05)


def test_a_file_of_prompts_is_sent_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b", "max_tokens": 3}\n\n{"prompt": [5, 9]}\n')
    load = Load(output_len=Lengths("fixed", 7), lines=read_lines(path, "completions"))
    assert [(p.content, p.max_tokens) for p in islice(load.prompts(), 3)] == [("a b", 3), ([5, 9], 7), ("a b", 3)]
    path.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n{"prompt": "a"}')
    bodies = [line.fields("chat") for line in read_lines(path, "chat")]
    assert [b["messages"][0]["content"] for b in bodies] == ["hi", "a"]


@pytest.mark.parametrize(
    ("text", "kind", "found"),
    [
        ("", "chat", "an empty file"),
        ("{", "chat", ":1"),
        ('{"prompt": "a"}\n[1]', "chat", ":2"),
        ('{"prompt": [5]}', "chat", "no prompt that /chat/completions takes"),
        ('{"messages": []}', "completions", "no prompt that /completions takes"),
        ('{"prompt": ["a"]}', "completions", "no prompt that /completions takes"),
        ('{"prompt": "a", "max_tokens": "7"}', "completions", "max_tokens '7'"),
    ],
)
def test_a_file_that_cannot_be_sent_is_refused_with_its_line(tmp_path: Path, text: str, kind: str, found: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="a line of the file of prompts cannot be used") as refused:
        read_lines(path, kind)
    assert found in refused.value.where + refused.value.found
    with pytest.raises(UsageError, match="the file of prompts cannot be read"):
        read_lines(tmp_path / "none", kind)


def measured(made: Endpoint, **options: Any) -> summary.ServeReport:
    asked: dict[str, Any] = {"requests": 4, "warmups": 0, "load": Load(Lengths("fixed", 5), Lengths("fixed", 4))}
    return run.measure(run.Asked(made.url, **asked | options))


def test_times_are_those_of_the_schedule() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await talk(send, 0.2, 0.05, 0.05, 0.1)

    with endpoint(behave) as made:
        found = measured(made, requests=3, bounds={"ttft": 1000.0, "itl": 500.0})
        ttft, itl, tpot, whole = found.ttft_ms, found.itl_ms, found.tpot_ms, found.e2el_ms
        assert ttft is not None and itl is not None and tpot is not None and whole is not None
        assert 200 <= ttft.p50 < 200 + SLACK
        assert 50 <= itl.p50 < 50 + SLACK and 100 <= itl.max < 100 + SLACK
        assert 200 / 3 <= tpot.p50 < 200 / 3 + SLACK
        assert 400 <= whole.p50 < 400 + 2 * SLACK and ttft.max < whole.p50
        assert (found.sent, found.answered, found.failed, found.most_at_once) == (3, 3, 0, 1)
        assert (found.input_tokens, found.output_tokens, found.tokens_by) == (21, 12, "usage")
        assert 3 * 0.4 <= found.seconds < 3 * 0.4 + SLACK / 1000
        assert found.output_tokens_per_second == pytest.approx(12 / found.seconds)
        assert found.goodput == summary.Goodput({"ttft": 1000.0, "itl": 500.0}, 3 / found.seconds, 1.0)
        assert measured(made, requests=2, bounds={"ttft": 150.0}).goodput.fraction == 0  # type: ignore[union-attr]
        assert made.bodies[0] == {
            "model": "fake", "stream": True, "stream_options": {"include_usage": True},
            "prompt": made.bodies[3]["prompt"], "max_tokens": 4,
        }  # fmt: skip


def test_a_load_keeps_its_concurrency_and_sends_by_the_seed() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await talk(send, 0.05 + 0.02 * (number % 3))

    with endpoint(behave) as made:
        found = measured(made, requests=20, concurrency=5, warmups=1)
        assert made.at_once == found.most_at_once == 5
        assert len(made.bodies) == 21 and found.sent == 20
        sent = {body["prompt"] for body in made.bodies[1:]}
        assert sent == {p.content for p in islice(Load(Lengths("fixed", 5)).prompts(), 20)}
        assert made.bodies[0]["prompt"] not in sent  # warming up


def test_a_rate_sends_by_the_clock_while_others_run() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await talk(send, 0.3)

    with endpoint(behave) as made:
        found = measured(made, requests=12, rate=40.0)
        last = list(islice(Load().arrivals(40), 12))[-1]
        assert last + 0.3 <= found.seconds < last + 0.3 + SLACK / 1000
        assert made.at_once > 1 and found.late_ms < SLACK
        during = measured(made, requests=None, duration=0.2, rate=40.0)
        assert during.sent == sum(at < 0.2 for at in islice(Load().arrivals(40), 100))


def test_a_duration_ends_a_run_that_keeps_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the answers move."""
    now = 0.0

    async def behave(number: int, body: Any, send: Any) -> None:
        nonlocal now
        now += 0.15
        await talk(send, 0.0)

    monkeypatch.setattr(run, "time", SimpleNamespace(perf_counter=lambda: now))
    with endpoint(behave) as made:
        found = measured(made, requests=None, duration=0.4)
        assert (found.sent, found.failed, found.seconds) == (3, 0, pytest.approx(0.45))


FAULTS: dict[str, tuple[list[bytes], str]] = {
    "HTTP 429": ([status(429, {"error": {"message": "the queue is full"}}, "retry-after: 5")], "the queue is full"),
    "HTTP 500": ([status(500, b"<html>oops</html>")], "<html>oops</html>"),
    "HTTP 404": ([status(404, {"error": "no such model"})], "no such model"),
    "no stream": ([status(200, {"choices": [{"text": "a"}]})], "content-type 'application/json'"),
    "broken stream": ([HEAD, piece("a"), event(b"{broken"), DONE], "no JSON: "),
    "error in the stream": ([HEAD, piece("a"), event({"error": {"message": "it failed"}}), DONE], "it failed"),
    "cut off": ([HEAD, piece("a"), piece("b")], "the stream ended without [DONE]"),
    "no tokens": ([HEAD, usage(completion_tokens=0), DONE], "the answer was empty"),
    "disconnected": ([HEAD.replace(b"connection: close", b"content-length: 999"), piece("a")], "peer closed"),
}


def test_failures_are_counted_by_kind_and_measured_nowhere() -> None:
    kinds = list(FAULTS)

    async def behave(number: int, body: Any, send: Any) -> None:
        if number >= len(kinds):
            await talk(send, 0.01, 0.01)
            return
        for part in FAULTS[kinds[number]][0]:
            await send(part)

    with endpoint(behave) as made:
        found = measured(made, requests=len(kinds) + 3)
        assert [(f.kind, f.count) for f in found.failures] == [(kind, 1) for kind in sorted(kinds)]
        for failure in found.failures:
            assert FAULTS[failure.kind][1] in failure.example
        assert (found.sent, found.answered, found.failed) == (len(kinds) + 3, 3, len(kinds))
        assert (found.output_tokens, found.input_tokens) == (6, 21)
        assert len(made.bodies) == len(kinds) + 3  # nothing is sent twice
        shown = [line.text for line in report.lines(found)]
        assert "  1 HTTP 429: the queue is full" in shown


@pytest.mark.parametrize("data", [b"[1]", b'{"choices": {"a": 1}}', b'{"choices": ["a"]}', b"\xff"])
def test_events_of_another_shape_are_broken(data: bytes) -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await send(HEAD + piece("a") + event(data) + DONE)

    with endpoint(behave) as made:
        assert [f.kind for f in measured(made, requests=1).failures] == ["broken stream"]


def test_who_never_answers_is_a_timeout() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await send(HEAD)
        await asyncio.sleep(30)

    with endpoint(behave) as made:
        (failure,) = measured(made, requests=1, timeout=0.2).failures
        assert (failure.kind, failure.example) == ("timeout", "no end within 0.2 s (--timeout)")


def test_pieces_are_counted_where_the_server_counts_nothing() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "a"}, {"content": "b"}, {}]
        await send(HEAD + b"".join(event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas) + DONE)

    with endpoint(behave) as made:
        found = measured(made, requests=2, endpoint="chat", api_key="sesame", extra={"temperature": 0})
        assert (found.output_tokens, found.input_tokens, found.tokens_by) == (4, None, "pieces")
        assert made.bodies[0]["messages"][0]["role"] == "user" and made.bodies[0]["temperature"] == 0
        assert "authorization: bearer sesame" in made.heads[0].lower()
        assert any("each piece of an answer counts as one" in line.text for line in report.lines(found))


def test_tokens_without_text_count_but_not_the_mere_end() -> None:
    ends = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}

    async def behave(number: int, body: Any, send: Any) -> None:
        await send(HEAD + (piece("") + piece("a") if number else b"") + event(ends) + usage(completion_tokens=1) + DONE)

    with endpoint(behave) as made:
        found = measured(made, requests=2)
        assert (found.answered, found.output_tokens) == (2, 2)
        assert found.itl_ms is not None  # between the two of the second


def test_a_server_that_does_not_answer_at_all_is_an_error() -> None:
    async def behave(number: int, body: Any, send: Any) -> None:
        await send(status(401, {"error": {"message": "the API key is missing"}}))

    with endpoint(behave) as made:
        with pytest.raises(UsageError, match="the server cannot be measured") as refused:
            measured(made, warmups=1)
        assert refused.value.found == "HTTP 401: the API key is missing"
        gone = made.url
    with pytest.raises(UsageError, match="the server cannot be measured") as refused:
        run.measure(run.Asked(gone))
    assert refused.value.where == f"--base-url {gone}" and "hadron serve MODEL" in refused.value.hint


def test_figures_are_those_of_arithmetic() -> None:
    """Three requests written out by hand, in seconds; percentiles by linear interpolation."""
    outcomes = [
        Outcome(due=0.0, sent=0.0, ended=1.0, pieces=[0.1, 0.3, 0.9], prompt_tokens=10, completion_tokens=5),
        Outcome(due=0.5, sent=0.7, ended=2.0, pieces=[1.0], prompt_tokens=20, completion_tokens=1),
        Outcome(due=1.5, sent=1.5, ended=4.0, failure="HTTP 500", detail="oops"),
    ]
    found = summary.summarize("u", "chat", "m", outcomes, {"tpot": 150.0})
    assert (found.seconds, found.most_at_once, found.requests_per_second) == (4.0, 2, 0.5)
    assert found.late_ms == pytest.approx(200)
    assert (found.input_tokens_per_second, found.output_tokens_per_second) == (7.5, 1.5)
    ttft, itl, tpot, whole = found.ttft_ms, found.itl_ms, found.tpot_ms, found.e2el_ms
    assert ttft is not None and itl is not None and tpot is not None and whole is not None
    assert (ttft.mean, ttft.p90, ttft.max) == pytest.approx((300, 460, 500))
    assert (itl.p50, itl.max) == pytest.approx((400, 600))
    assert (tpot.p50, tpot.max) == pytest.approx((200, 200))
    assert whole.p50 == pytest.approx(1250)
    assert found.goodput == summary.Goodput({"tpot": 150.0}, 1 / 4, 1 / 3)  # the one of a token has no tpot


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_our_own_server_is_measured_by_its_own_counts(kind: str) -> None:
    with running() as server:
        asked = run.Asked(
            f"{server.url}/v1", endpoint=kind, requests=6, concurrency=3, extra={"ignore_eos": True, "temperature": 0},
            load=Load(Lengths("fixed", 20), Lengths("uniform", 2, 6), ids=(300, 400) if kind == "completions" else None),
        )  # fmt: skip
        found = run.measure(asked)
        assert (found.answered, found.failures, found.tokens_by, found.model) == (6, [], "usage", "tiny")
        assert found.output_tokens == sum(p.max_tokens for p in islice(asked.load.prompts(), 6))
        if kind == "completions":
            assert found.input_tokens == 6 * 20
        assert found.most_at_once == 3
