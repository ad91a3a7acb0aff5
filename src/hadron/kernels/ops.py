"""The operations of the model: one list, the same names in every provider."""

from __future__ import annotations

from msgspec import Struct


class Operation(Struct, frozen=True):
    """An operation covers a sub-block. tolerance: largest error of another provider's result against
    `reference`, relative to the largest output."""

    name: str
    summary: str
    tolerance: float


OPERATIONS: dict[str, Operation] = {
    op.name: op
    for op in (
        Operation("linear", "x @ weight.T from the stored codes and scales", 1e-2),
        Operation("mlp", "gate and up, clamp, SiLU, product, down", 1e-2),
        Operation("moe", "routed experts, each token through its own, weighted and summed", 1e-2),
        Operation("router", "sigmoid scores, correction bias, group limits, top-k, weights", 1e-5),
        Operation("mla", "absorb the query, attend over selected latents, expand the output", 1e-2),
        Operation("indexer", "pool keys, score them for every head, select the best", 1e-3),
        Operation("kda", "short convolution, gates and the delta-rule recurrence", 1e-3),
        Operation("hyper_connection", "collapse and mix residual streams", 1e-4),
        Operation("norm", "RMS and layer norms", 1e-5),
        Operation("rope", "rotary position embedding", 1e-5),
        Operation("embedding", "rows of the embedding table", 0.0),
        Operation("lm_head", "logits, what changes them, and their best, draws or ranks", 1e-2),
        Operation("quantize", "emulate declared activation quantization", 0.0),
    )
}
