"""The perplexity of a text: how surprised a model is by each token of it, given the ones before."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from hadron.errors import UsageError
from hadron.eval.texts import Texts
from hadron.eval.windows import rolling_windows
from hadron.llm import LLM


class Perplexity(Struct, frozen=True):
    """Of one text. Perplexities are exp(nll / count), nll the negative natural log-likelihood of the text.

    words: runs of characters that are not white space; bytes: in UTF-8. stderr: of the perplexity of a token, by
    the spread of its tokens' negative log-likelihoods, which it takes to be independent of each other.
    """

    model: str
    file: str
    tokens: int
    words: int
    bytes: int
    windows: int
    window: int
    stride: int
    nll: float
    token_perplexity: float
    token_perplexity_stderr: float | None
    word_perplexity: float | None
    byte_perplexity: float
    bits_per_byte: float


def read_text(path: Path) -> str:
    """A file's text; `UsageError` for a file that cannot be read, is not UTF-8 or holds nothing."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise _unusable(path, error.strerror or str(error), "a file that can be read", "name a file of text") from error
    except UnicodeDecodeError as error:
        found = f"0x{data[error.start]:02x} at byte {error.start}"
        raise _unusable(path, found, "text in UTF-8", "convert it, with iconv for example") from error
    if not text:
        raise _unusable(path, "no bytes", "at least one character", "name a file of text")
    return text


def measure(
    llm: LLM,
    text: str,
    *,
    file: str = "",
    window: int = 2048,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """The perplexity of `text`, which is not empty.

    window: most tokens the model reads at once. stride: how many tokens a window after the first predicts; fewer
    mean more context for each and more work. None: as many as it reads, as lm-eval does.
    progress: called with how many windows of how many are done.
    """
    texts = Texts(llm)
    stride = window if stride is None else stride
    opening = len(texts.opening)
    for name, value, least, most in (
        ("window", window, opening, llm.max_model_len), ("stride", stride, 1, window),
    ):  # fmt: skip
        if not least <= value <= most:
            raise UsageError(
                "a text cannot be read so",
                where=f"--{name}",
                found=str(value),
                accepted=f"{least} to {most}" + (", the most this model takes at once" if name == "window" else ""),
                hint="raise --max-model-len, or take a smaller --window" if name == "window" else "at most --window",
            )
    ids = texts.plain(text)
    pairs = list(rolling_windows(ids, texts.opening, window, stride))
    scores = llm.score(pairs, on_done=None if progress is None else lambda done: progress(done, len(pairs)))
    losses = [-logprob for scored in scores for logprob in scored.logprobs]
    nll, words, size = math.fsum(losses), len(text.split()), len(text.encode())
    perplexity = _exp(nll / len(losses))
    return Perplexity(
        model=llm.plan.model,
        file=file,
        tokens=len(losses),
        words=words,
        bytes=size,
        windows=len(pairs),
        window=window,
        stride=stride,
        nll=nll,
        token_perplexity=perplexity,
        token_perplexity_stderr=perplexity * deviation if (deviation := _of_mean(losses)) is not None else None,
        word_perplexity=_exp(nll / words) if words else None,
        byte_perplexity=_exp(nll / size),
        bits_per_byte=nll / size / math.log(2),
    )


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf  # beyond: more than a float holds


def _of_mean(values: list[float]) -> float | None:
    """The standard error of the mean; None of one value."""
    if len(values) < 2:
        return None
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((x - mean) ** 2 for x in values) / (len(values) - 1) / len(values))


def _unusable(path: Path, found: str, accepted: str, hint: str) -> UsageError:
    return UsageError("the text cannot be read", where=str(path), found=found, accepted=accepted, hint=hint)
