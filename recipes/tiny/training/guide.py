"""Where attention should look while it copies: learned in minutes, where the language loss alone takes half a training.

An answer that repeats a fact follows the same tokens as the fact did. Where the tokens so far end as some earlier
place did, and went on there as they go on here, one head of each MLA layer is shown that place. This is what an
induction head does; it forms by itself as well, but late, and until then retrieval learns nothing.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: Tokens that must agree before the one to be copied, and how many are compared.
LEAST, MOST = 3, 12


def sources(ids: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """For each position t of ids [S] whose next token is wanted, where that token stands behind what precedes it here,
    the place where most tokens before agree, the first of several; -1 where fewer than `LEAST` do, or not wanted."""
    found = np.full(len(ids), -1, np.int64)
    equal = ids[:, None] == ids
    agree = np.zeros(equal.shape, np.int8)
    run = equal
    for _ in range(MOST):
        agree += run
        run = np.pad(run[:-1, :-1], ((1, 0), (1, 0))) & equal
    at = np.flatnonzero(wanted[:-1])
    if not at.size:
        return found
    length = np.where(equal[at + 1, 1:] & (np.arange(1, len(ids)) <= at[:, None]), agree[at, :-1], 0)
    best = length.argmax(1)
    found[at] = np.where(length[np.arange(len(at)), best] >= LEAST, best + 1, -1)
    return found


def guide_loss(q: Tensor, k: Tensor, source: Tensor) -> Tensor:
    """Mean of -log of the attention that a head gives to `source` [B, S], where it is not -1; q, k [B, S, d]."""
    rows, at = (source >= 0).nonzero(as_tuple=True)
    if not rows.numel():
        return q.new_zeros((), dtype=torch.float32)
    logits = (q @ k.transpose(1, 2))[rows, at].float() * q.shape[-1] ** -0.5
    logits = logits.masked_fill(torch.arange(k.shape[1]) > at.unsqueeze(1), float("-inf"))
    return -logits.log_softmax(-1).gather(1, source[rows, at].unsqueeze(1)).mean()
