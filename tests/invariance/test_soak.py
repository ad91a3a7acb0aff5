"""A machine that is always too small: many requests come, go, fail to fit and push each other out, with
prefixes in memory and on disk. Afterwards nothing is held, and a fixed request says what it said before."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from hadron import LLM, SamplingParams
from tests.conftest import DATA

FAMILIES = ("glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8")
FIXED = random.Random(2).choices(range(256), k=180)


def fixed(llm: LLM) -> Any:
    params = SamplingParams(temperature=1.1, seed=8, max_tokens=20, ignore_eos=True, logprobs=2)
    return llm.generate({"prompt_token_ids": FIXED}, params)[0].outputs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stored"), [(FAMILIES[0], False), (FAMILIES[1], True)])
def test_afterwards_everything_is_free_and_the_bits_are_the_same(name: str, stored: bool, tmp_path: Path) -> None:
    expected = fixed(LLM(DATA / name, threads=1))
    llm = LLM(
        DATA / name, threads=1, num_pages=10, max_num_seqs=5, max_num_batched_tokens=48,
        prefix_cache_dir=tmp_path if stored else None, prefix_cache_bytes=1 << 20,
    )  # fmt: skip
    engine, manager, chance = llm._engine, llm._engine._runner.manager, random.Random(4)
    number, ended = 0, 0
    while number < 110 or engine.has_requests:
        if number < 110 and chance.random() < 0.6:
            text = [*FIXED[: chance.choice((3, 64, 70, 130))], *chance.choices(range(256), k=chance.randrange(1, 60))]
            params = SamplingParams(
                temperature=chance.choice((0.0, 1.0)), max_tokens=chance.choice((2, 9, 230)), n=chance.choice((1, 1, 1, 3)),
                repetition_penalty=chance.choice((1.0, 1.3)), prompt_logprobs=chance.choice((None, None, 0)), ignore_eos=True,
            )  # fmt: skip
            engine.add_all(str(number), tuple(text), params.with_defaults({}), priority=chance.randrange(-1, 2))
            number += 1
        if chance.random() < 0.1:
            engine.abort(f"{chance.randrange(number + 1)}{chance.choice(('', '-1', '-2'))}")
        ended += sum(event.finish_reason is not None for event in engine.step())
    assert ended > 80
    assert engine.stats.preemptions > 5 and engine.stats.prefix_hits > 20 and engine.stats.failures == 0
    assert manager.blocks.free_blocks == 10
    assert manager.free_slots == 5 + manager.prefixes.limit - len(manager.prefixes)
    assert fixed(llm) == expected
    assert not engine._chooser._wishes
    if stored:
        sizes = [path.stat().st_size for path in tmp_path.glob("*/*.*") if path.suffix in (".page", ".state")]
        assert 0 < sum(sizes) <= 1 << 20
        assert fixed(LLM(DATA / name, threads=1, prefix_cache_dir=tmp_path)) == expected
