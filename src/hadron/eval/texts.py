"""Texts to token ids as evaluations need them: what stands before a text, and where a continuation begins."""

from __future__ import annotations

from functools import cached_property

from hadron.errors import TokenizerError
from hadron.llm import LLM


class Texts:
    """The tokenizer of a model, for evaluations. `TokenizerError` where the checkpoint has none."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer
        end = self._tokenizer.end_id
        config = llm.plan.config
        ends = sorted(config.eos) if end is None and config is not None else [end]
        if not ends or ends[0] is None:
            raise TokenizerError(
                "a text of this checkpoint has no end",
                where=llm.plan.model,
                found="no eos_token in tokenizer_config.json, no eos_token_id in config.json",
                accepted="one of them: the first token of a text is predicted after it",
                hint="copy tokenizer_config.json from the original release",
            )
        #: The token that ends a text.
        self.end: int = ends[0]

    @cached_property
    def opening(self) -> list[int]:
        """What stands before a text: what the tokenizer itself puts there, else the token that ends another."""
        return self._tokenizer.encode("") or [self.end]

    def encode(self, text: str) -> list[int]:
        """With what the tokenizer itself puts around a text, unless this one brings its own markup at the beginning."""
        return self._tokenizer.encode(text, add_special_tokens=not text.startswith(self._marks))

    def plain(self, text: str) -> list[int]:
        """The text alone; markup in it becomes its own ids."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of both, as lm-eval divides them: white space between the two belongs to the continuation.

        The continuation's ids are those of both together after as many as the context alone has. A context
        without words is the opening.
        """
        words = context.rstrip()
        rest = context[len(words) :] + continuation
        if words:
            alone = self.encode(words)
            return alone, self.encode(words + rest)[len(alone) :]
        ids = self.plain(rest)
        opened = len(self.opening) == 1 and ids[:1] == self.opening and len(ids) > 1
        return (ids[:1], ids[1:]) if opened else (self.opening, ids)

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        return tuple(self._tokenizer.token_text(i) for i in sorted(self._tokenizer.special_ids))
