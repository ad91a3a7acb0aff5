"""The embedding table, and the head that turns hidden states into logits; the two may share a table."""

from __future__ import annotations

import torch

from hadron.errors import RequestError
from hadron.kernels.provider import Provider
from hadron.layers.logits import Logits, Questions
from hadron.layers.weights import Weights


class Embedding:
    """Rows of a table [vocabulary, hidden]."""

    def __init__(self, name: str, vocabulary: int, weights: Weights, kernels: Provider) -> None:
        self.weight = weights.tensor(name)
        self.vocabulary = vocabulary
        self._rows = kernels.function("embedding", "rows")

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [tokens] -> float32 [tokens, hidden]; `RequestError` for an id outside the vocabulary."""
        outside = (ids < 0) | (ids >= self.vocabulary)
        if bool(outside.any()):
            raise RequestError(
                "A token id is outside the vocabulary", where="prompt token ids", found=str(int(ids[outside][0])),
                accepted=f"0 to {self.vocabulary - 1}", hint="use the tokenizer that belongs to this model",
            )  # fmt: skip
        out: torch.Tensor = self._rows(self.weight, ids)
        return out


class LmHead:
    """Logits in float32. `name` is the head's own weight; without one the table `tied` is used."""

    def __init__(self, name: str, tied: str, weights: Weights, kernels: Provider) -> None:
        self._questions = Questions.of(kernels)
        bind = kernels.function("lm_head", "bind")
        self._logits = weights.linear(name) if name in weights else bind(weights.tensor(tied))

    def __call__(self, hidden: torch.Tensor) -> Logits:
        """Logits of hidden [n, hidden], kept here until somebody asks for them."""
        # Widened first: a product returns its input's dtype, and logits are not rounded.
        return Logits(self._logits(hidden.float()), self._questions)
