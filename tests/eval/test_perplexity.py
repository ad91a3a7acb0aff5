"""The perplexity of a text."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from hadron import LLM, UsageError
from hadron.eval.perplexity import measure, read_text
from tests.conftest import RANDOM
from tests.eval.own_tasks import llm

TEXT = "Rivers are long, and häufig alt. " * 8


def losses(llm: LLM, window: int, stride: int) -> list[float]:
    """Of every token, by logits: those of the window that predicts it."""
    end = llm.tokenizer.token_id("<|endoftext|>")
    assert end is not None
    whole = [end, *llm.tokenizer.encode(TEXT, add_special_tokens=False)]
    found: list[float] = []
    begin, stop = 1, min(len(whole), window + 1)
    while begin < len(whole):
        first = max(0, stop - 1 - window)
        rows = llm.logits(whole[first : stop - 1]).astype(np.float64)
        rows -= np.log(np.exp(rows - rows.max(1, keepdims=True)).sum(1, keepdims=True)) + rows.max(1, keepdims=True)
        found += [-float(rows[i - 1 - first, whole[i]]) for i in range(begin, stop)]
        begin, stop = stop, min(len(whole), stop + stride)
    return found


@pytest.mark.parametrize(("window", "stride"), [(128, None), (64, None), (64, 16), (2, 1)])
def test_it_is_a_direct_computation(llm: LLM, window: int, stride: int | None) -> None:
    wanted = losses(llm, window, stride or window)
    done: list[tuple[int, int]] = []
    found = measure(llm, TEXT, window=window, stride=stride, progress=lambda *counts: done.append(counts))
    assert (found.tokens, found.words, found.bytes) == (len(wanted), 6 * 8, len(TEXT.encode()))
    assert found.nll == pytest.approx(sum(wanted), abs=1e-4 * len(wanted))
    assert found.token_perplexity == pytest.approx(math.exp(np.mean(wanted)), rel=1e-4)
    error = np.std(wanted, ddof=1) / math.sqrt(len(wanted))
    assert found.token_perplexity_stderr == pytest.approx(found.token_perplexity * error, rel=1e-3)
    assert found.word_perplexity == pytest.approx(math.exp(sum(wanted) / 48), rel=1e-3)
    assert found.byte_perplexity == pytest.approx(math.exp(sum(wanted) / found.bytes), rel=1e-4)
    assert found.bits_per_byte == pytest.approx(sum(wanted) / found.bytes / math.log(2), rel=1e-4)
    assert done[-1] == (found.windows, found.windows)


def test_it_has_the_same_bits_in_any_batch() -> None:
    few, many = (
        LLM(RANDOM, kernels="cpu", threads=1, max_model_len=64, max_num_seqs=seqs, max_num_batched_tokens=tokens)
        for seqs, tokens in ((1, 17), (8, 256))
    )
    assert measure(few, TEXT, window=64, stride=16) == measure(many, TEXT, window=64, stride=16)


def test_a_text_of_one_token_has_no_standard_error(llm: LLM) -> None:
    found = measure(llm, "a", window=128)
    assert (found.tokens, found.windows, found.token_perplexity_stderr) == (1, 1, None)
    assert measure(llm, "  \n", window=128).word_perplexity is None


@pytest.mark.parametrize(
    ("window", "stride", "where", "accepted"),
    [(129, None, "--window", "1 to 128"), (64, 65, "--stride", "1 to 64"), (64, 0, "--stride", "1 to 64")],
)
def test_windows_that_do_not_fit_are_refused(
    llm: LLM, window: int, stride: int | None, where: str, accepted: str
) -> None:
    with pytest.raises(UsageError) as raised:
        measure(llm, TEXT, window=window, stride=stride)
    assert raised.value.where == where and raised.value.accepted.startswith(accepted)


@pytest.mark.parametrize(
    ("data", "found"),
    [(b"", "no bytes"), (b"abc\xff", "0xff at byte 3"), (None, "No such file or directory")],
)
def test_files_that_hold_no_text_are_refused(tmp_path: Path, data: bytes | None, found: str) -> None:
    path = tmp_path / "text.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(UsageError) as raised:
        read_text(path)
    assert raised.value.where == str(path) and raised.value.found == found
