"""Text that must follow a grammar: JSON, a regular expression, one of several texts, a grammar of one's own.

llguidance says before each token which may come; everything here is about asking it. A grammar is checked when
a request is, so that one which cannot be used is refused before anything runs. Where a prompt leaves a thought
open, the grammar begins after the thought.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hadron.errors import RequestError
from hadron.sampling_params import StructuredOutputsParams
from hadron.tokenizer.markup import Mark, Markup
from hadron.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    import llguidance

#: White space between the tokens of JSON: a blank, or a line's end and indentation. Without a bound, greedy models
#: write nothing else until they are cut.
_WHITE_SPACE = r"( |\n[ \t]{0,20})?"


class Grammars:
    """Grammars over one tokenizer. vocabulary: of the model's logits. eos: what ends a text."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._markup = Markup(tokenizer)
        self._vocabulary = vocabulary
        self._eos = sorted(eos)

    @cached_property
    def _llguidance(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer

        return LLTokenizer(self._tokenizer.serialized, n_vocab=self._vocabulary, eos_token=self._eos or None)

    def check(self, wanted: StructuredOutputsParams) -> None:
        """`RequestError` for a grammar that cannot be used."""
        from llguidance import LLMatcher

        failed, messages = LLMatcher.validate_grammar_with_warnings(_source(wanted), self._llguidance)
        if failed:
            raise _refused(wanted, messages[0])

    def matcher(self, wanted: StructuredOutputsParams, prompt: Sequence[int] = ()) -> Matcher:
        """A matcher at the beginning of the text that follows `prompt`."""
        from llguidance import LLMatcher

        inner = LLMatcher(self._llguidance, _source(wanted), log_level=0)
        if inner.is_error():
            raise _refused(wanted, inner.get_error())
        after = self.open_thought(prompt)
        if after is None:
            return Matcher(inner, wanted, self._vocabulary)
        calls = (self._markup.ids.get(mark) for mark in (Mark.CALL, Mark.CALL_END))
        barred = [token for token in (*self._eos, *calls) if token is not None and token < self._vocabulary]
        return Matcher(inner, wanted, self._vocabulary, after, all_but(barred, self._vocabulary))

    def open_thought(self, prompt: Sequence[int]) -> int | None:
        """The id that ends the thought which a prompt leaves open; None where it leaves none."""
        return self._markup.ids[Mark.THINK_END] if self._markup.open_thought(prompt) else None

    def thought_ends(self, prompt: Sequence[int], *, calls: bool) -> tuple[int, ...]:
        """The ids that end the thought which a prompt leaves open, its own end first; none where it leaves none.

        calls: a tool call ends it too.
        """
        end = self.open_thought(prompt)
        others = [self._markup.ids[Mark.CALL]] if calls and Mark.CALL in self._markup.ids else []
        return () if end is None else (end, *others)


class Matcher:
    """Where one text stands in its grammar. after: the id that must come before the grammar begins, outside: as
    `allowed`, what may come until then, which is all but what would end the text or begin a call."""

    def __init__(
        self,
        inner: llguidance.LLMatcher,
        wanted: StructuredOutputsParams,
        vocabulary: int,
        after: int | None = None,
        outside: torch.Tensor | None = None,
    ) -> None:
        self._inner = inner
        self._wanted = wanted
        self._after = after
        self._outside = outside
        self._words = torch.zeros(-(-vocabulary // 32), dtype=torch.int32, device="cpu")

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._after is None and self._inner.is_stopped()

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next, as `RowRules.allowed`, until the next call. `RequestError` where it gave up."""
        if self._after is not None:
            assert self._outside is not None
            return self._outside
        self._inner.unsafe_compute_mask_ptr(self._words.data_ptr(), self._words.nbytes)
        self._check()
        return self._words

    def accept(self, token: int) -> None:
        """Go on by a token that was allowed."""
        if self._after is not None:
            if token == self._after:
                self._after = None
            return
        self._inner.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._inner.is_error():
            raise _refused(self._wanted, self._inner.get_error())


def all_but(barred: Collection[int], vocabulary: int) -> torch.Tensor:
    """All tokens but some, as `RowRules.allowed`."""
    words = np.full(-(-vocabulary // 32), 0xFFFFFFFF, np.uint32)
    for token in set(barred):
        words[token // 32] ^= np.uint32(1 << token % 32)
    return torch.from_numpy(words.view(np.int32))


def spaced(schema: Any) -> Any:
    """A JSON schema that says what white space its texts may have, as it is where it says so itself."""
    if not isinstance(schema, Mapping):
        return schema
    own = schema.get("x-guidance", {})
    if not isinstance(own, Mapping) or {"whitespace_pattern", "whitespace_flexible"} & set(own):
        return schema
    return {**schema, "x-guidance": {"whitespace_pattern": _WHITE_SPACE, **own}}


def _source(wanted: StructuredOutputsParams) -> str:
    """What llguidance reads."""
    from llguidance import LLMatcher, grammar_from

    kind, value = wanted.chosen
    try:
        if kind == "json":
            schema = json.loads(value) if isinstance(value, str) else value
            return LLMatcher.grammar_from_json_schema(json.dumps(spaced(schema)))
        if kind == "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(spaced({"type": "object"})))
        if kind == "regex":
            return LLMatcher.grammar_from_regex(value)
        if kind == "choice":
            texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in value)
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
        return grammar_from("ebnf", value)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(wanted, str(error)) from error


def _refused(wanted: StructuredOutputsParams, reason: str) -> RequestError:
    kind, value = wanted.chosen
    return RequestError(
        "a grammar cannot be used",
        where=f"structured_outputs.{kind}",
        found=f"{' '.join(reason.split())[:300]}, in {str(value)[:80]!r}",
        accepted="a JSON schema, a regular expression, texts, or a grammar in Lark's or GBNF's syntax, "
        "within the features and limits of llguidance",
        hint="simplify it, or leave structured_outputs out",
    )
