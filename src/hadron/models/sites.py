"""Pieces that both families are made of: MLA, indexer, MoE, MLP, embedding, head, the MTP extras.

A `Place` is where a layer lies: its checkpoint prefix (`model.layers.3.`), its runtime prefix
(`layers.3.`), its section, and what the file holds. Names and shapes are those of the published
files; the alternatives are what ModelOpt, in-memory Quark and a re-save by transformers write.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hadron.layers.dimensions import IndexerDimensions, KdaDimensions, MlaDimensions, MlpDimensions, MoeDimensions
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Split, Stored, stored_alternatives

#: where the text tower may lie: prefix of its layers, prefix of `lm_head`; the published spellings first
_TOWERS = (("model.", ""), ("model.language_model.", ""), ("language_model.model.", "language_model."), ("", ""))


def text_tower(stored: Stored, published: str) -> tuple[str, str]:
    """The prefix of the text tower's layers and that of the head, as `stored`; `published` where nothing is."""
    for prefix, head in _TOWERS:
        if f"{prefix}embed_tokens" in stored.modules:
            return prefix, head
    return published, ""


@dataclass(frozen=True, slots=True)
class Place:
    """A prefix in the checkpoint and the runtime prefix it stands for."""

    at: str
    to: str
    section: Section
    stored: Stored

    def below(self, part: str) -> Place:
        """The place `part` below this one."""
        return Place(self.at + part, self.to + part, self.section, self.stored)

    def one(
        self,
        name: str,
        kind: ModuleKind,
        shape: tuple[int, ...],
        *,
        bare: bool = False,
        bias: bool = False,
        keep_float32: bool = False,
        others: tuple[str, ...] = (),
    ) -> Iterator[ModuleSpec]:
        """A module that fills one parameter, stored as `name` or as one of the `others`."""
        alternatives = (
            (
                ModuleSpec(
                    self.at + stored_name, kind, self.section, shape, (self.to + name,),
                    bare=bare, bias=bias, keep_float32=keep_float32,
                ),
            )
            for stored_name in (name, *others)
        )  # fmt: skip
        return stored_alternatives(self.stored, alternatives)

    def norm(self, name: str, size: int, *, bias: bool = False) -> Iterator[ModuleSpec]:
        """A norm of `size`."""
        return self.one(name, ModuleKind.NORM, (size,), bias=bias)


def mla(layer: Place, d: MlaDimensions) -> Iterator[ModuleSpec]:
    """The projections and latent norms of `self_attn.`."""
    p, kind = layer.below("self_attn."), ModuleKind.ATTENTION
    yield from p.one("q_a_proj", kind, (d.q_rank, d.hidden), bias=d.bias)
    yield from p.norm("q_a_layernorm", d.q_rank)
    yield from p.one("q_b_proj", kind, (d.heads * (d.nope + d.rope), d.q_rank))
    yield from p.one("kv_a_proj_with_mqa", kind, (d.latent_width, d.hidden), bias=d.bias)
    yield from p.norm("kv_a_layernorm", d.kv_rank)
    yield from p.one("kv_b_proj", kind, (d.heads * (d.nope + d.v), d.kv_rank))
    yield from p.one("o_proj", kind, (d.hidden, d.heads * d.v), bias=d.bias)


def indexer(layer: Place, d: IndexerDimensions) -> Iterator[ModuleSpec]:
    """The parameters of `self_attn.indexer.`; a pooled indexer has a gate and a position table."""
    p = layer.below("self_attn.indexer.")
    yield from p.one("wq_b", ModuleKind.INDEXER, (d.heads * d.head_dim, d.q_rank))
    yield from p.one("wk", ModuleKind.INDEXER, (d.head_dim, d.hidden))
    yield from p.norm("k_norm", d.head_dim, bias=True)
    yield from p.one("weights_proj", ModuleKind.INDEXER, (d.heads, d.hidden))
    if d.pooled:
        yield from p.one("index_kpool_compress_gate", ModuleKind.PARAMETER, (d.head_dim, d.hidden), bare=True)
        yield from p.one("index_kpool_compress_ape", ModuleKind.PARAMETER, (d.pool, d.head_dim), bare=True)


def mlp(p: Place, kind: ModuleKind, d: MlpDimensions, *, bias: bool = False) -> Iterator[ModuleSpec]:
    """gate, up and down of a gated MLP at `p`; gate and up apart or as one `gate_up_proj`."""
    gate, up, both = (p.to + "gate_proj",), (p.to + "up_proj",), (p.to + "gate_proj", p.to + "up_proj")
    wide = (d.intermediate, d.hidden)
    yield from stored_alternatives(
        p.stored,
        (
            (
                ModuleSpec(p.at + "gate_proj", kind, p.section, wide, gate, bias=bias),
                ModuleSpec(p.at + "up_proj", kind, p.section, wide, up, bias=bias),
            ),
            (
                ModuleSpec(
                    p.at + "gate_up_proj", kind, p.section, (2 * d.intermediate, d.hidden), both, Split.ROWS, bias=bias
                ),
            ),
        ),
    )
    down = (p.to + "down_proj",)
    yield ModuleSpec(p.at + "down_proj", kind, p.section, (d.hidden, d.intermediate), down, bias=bias)


def moe(layer: Place, d: MoeDimensions) -> Iterator[ModuleSpec]:
    """Router, routed experts and the shared expert of `mlp.`."""
    p = layer.below("mlp.")
    yield from p.one("gate", ModuleKind.ROUTER, (d.experts, d.hidden))
    yield from p.one("gate.e_score_correction_bias", ModuleKind.PARAMETER, (d.experts,), bare=True, keep_float32=True)
    yield from _experts(p.below("experts."), d)
    if d.shared_intermediate:
        shared = MlpDimensions(d.hidden, d.shared_intermediate, d.limit)
        yield from mlp(p.below("shared_experts."), ModuleKind.SHARED_EXPERT, shared)


def _experts(p: Place, d: MoeDimensions) -> Iterator[ModuleSpec]:
    """Routed experts: three modules each, or stacked [experts, out, in] tensors without a suffix."""
    kind, section, stacked = ModuleKind.EXPERT, p.section, Split.EXPERTS
    gate, up, down = (p.to + "{e}." + name for name in ("gate_proj", "up_proj", "down_proj"))
    wide, fused = (d.experts, d.intermediate, d.hidden), (d.experts, 2 * d.intermediate, d.hidden)
    banks = (
        ModuleSpec(p.at + "gate_up_proj", kind, section, fused, (gate, up), stacked, bare=True),
        ModuleSpec(p.at + "gate_proj", kind, section, wide, (gate,), stacked, bare=True),
        ModuleSpec(p.at + "up_proj", kind, section, wide, (up,), stacked, bare=True),
        ModuleSpec(
            p.at + "down_proj", kind, section, (d.experts, d.hidden, d.intermediate), (down,), stacked, bare=True
        ),
    )
    found = [bank for bank in banks if bank.name in p.stored.tensors]
    yield from found
    if {name for bank in found for name in bank.provides} >= {
        gate,
        up,
        down,
    } and p.at + "0.down_proj" not in p.stored.modules:
        return
    expert = MlpDimensions(d.hidden, d.intermediate, d.limit)
    for e in range(d.experts):
        yield from mlp(p.below(f"{e}."), kind, expert)


def mtp_extras(layer: Place, hidden: int, vocabulary: int) -> Iterator[ModuleSpec]:
    """What a multi-token-prediction layer has beside its decoder block; embedding and head may be shared."""
    yield from layer.one("eh_proj", ModuleKind.MTP_PROJECTION, (hidden, 2 * hidden))
    for name in ("enorm", "hnorm", "shared_head.norm"):
        yield from layer.norm(name, hidden)
    for name, kind in (("embed_tokens", ModuleKind.EMBEDDING), ("shared_head.head", ModuleKind.LM_HEAD)):
        if any(f"{layer.at}{name}.{suffix}" in layer.stored.tensors for suffix in ("weight", "weight_packed")):
            yield from layer.one(name, kind, (vocabulary, hidden))


def stored_mtp_layers(prefix: str, first: int, declared: int, stored: Stored) -> range:
    """Indices of the multi-token-prediction layers the file holds: `layers.<number of layers>` and up."""
    held = 0
    while f"{prefix}layers.{first + held}.input_layernorm" in stored.modules and held < max(declared, 1):
        held += 1
    return range(first, first + held)


def kda_convolution(p: Place, d: KdaDimensions) -> Iterator[ModuleSpec]:
    """The short convolutions of q, k and v: three modules, or one `conv1d` with their rows in that order."""
    kind, names = ModuleKind.CONV, ("q_conv1d", "k_conv1d", "v_conv1d")
    apart = tuple(
        ModuleSpec(p.at + name, kind, p.section, (d.width, 1, d.conv_kernel), (p.to + name,)) for name in names
    )
    shape, provides = (3 * d.width, 1, d.conv_kernel), tuple(p.to + name for name in names)
    joined = (ModuleSpec(p.at + "conv1d", kind, p.section, shape, provides, Split.ROWS),)
    yield from stored_alternatives(p.stored, (apart, joined))
