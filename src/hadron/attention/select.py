"""Attention backends as rows of data; picks one for a model, or says why each cannot serve it.

A refusal is a value with its reason: an automatic choice may fall back and records why, a backend or
prefill path that the user named never does. No tensor library is imported; a test compares each row
with what its class declares.
"""

from __future__ import annotations

from msgspec import Struct

from hadron.errors import UnsupportedError


class BackendRow(Struct, frozen=True):
    """What a backend can do. path: `module:class`. platforms: names of `Platform`s. kernels: providers of
    `mla` that it runs on; it brings its own where there are none.

    is_sparse: attends over an indexer's selection. dense_mha_prefill: has `forward_mha`. cache_dtypes: of
    latent rows. speculative_verification: rows of several tokens are those of one by one.
    """

    name: str
    path: str
    platforms: tuple[str, ...]
    kernels: tuple[str, ...]
    is_sparse: bool
    dense_mha_prefill: bool
    cache_dtypes: tuple[str, ...]
    speculative_verification: bool


BACKENDS: tuple[BackendRow, ...] = (
    BackendRow(
        name="cpu",
        path="hadron.attention.cpu:CpuBackend",
        platforms=("cpu",),
        kernels=("cpu",),
        is_sparse=True,
        dense_mha_prefill=True,
        cache_dtypes=("float32", "bfloat16", "fp8_e4m3"),
        speculative_verification=True,
    ),
    BackendRow(
        name="reference",
        path="hadron.attention.reference:ReferenceBackend",
        platforms=("cpu", "cuda", "rocm"),
        kernels=(),
        is_sparse=True,
        dense_mha_prefill=True,
        cache_dtypes=("float32", "bfloat16", "fp8_e4m3"),
        speculative_verification=True,
    ),
)

PREFILL_PATHS = ("mqa", "dense_mha")


class AttentionNeeds(Struct, frozen=True):
    """What a model and a run ask of a backend. platform: a `Platform`'s name. kernels: the provider that
    runs `mla`. cache_dtype: of latent rows.

    selection_budget: context length up to which an indexer selects everything; 0 where it may leave
    something out at any length, so that dense prefill is never equal.
    """

    platform: str
    sparse: bool
    cache_dtype: str
    speculative: bool
    selection_budget: int
    kernels: str = "reference"


class AttentionChoice(Struct, frozen=True):
    """The chosen backend (None: none can serve) and prefill path, with why, and why not the others."""

    backend: str | None
    path: str | None
    prefill_path: str | None
    reasons: tuple[str, ...]

    def require(self) -> AttentionChoice:
        """Itself, or `UnsupportedError` with every reason when there is no backend."""
        if self.backend is None:
            raise UnsupportedError(
                "No attention backend can serve this model", where="attention backend", found="; ".join(self.reasons),
                accepted="one of " + ", ".join(row.name for row in BACKENDS),
                hint="let the backend and the prefill path be chosen automatically",
            )  # fmt: skip
        return self


def selection_budget(topk: int, *, pooled: bool, pool: int, always_select_tail: bool) -> int:
    """Context length up to which an indexer of these sizes selects every position; 0 for never."""
    return 0 if pooled and pool > 1 and not always_select_tail else topk


def refusals(row: BackendRow, needs: AttentionNeeds) -> tuple[str, ...]:
    """Every reason why `row` cannot serve, with the offending values."""
    reasons = []
    if needs.platform not in row.platforms:
        reasons.append(f"{row.name} runs on {', '.join(row.platforms)}, not on {needs.platform}")
    if row.kernels and needs.kernels not in row.kernels:
        reasons.append(f"{row.name} needs the mla kernels of {', '.join(row.kernels)}, not of {needs.kernels}")
    if needs.sparse != row.is_sparse:
        kinds = {True: "sparse", False: "dense"}
        reasons.append(
            f"{row.name} is a {kinds[row.is_sparse]} backend, the model's attention is {kinds[needs.sparse]}"
        )
    if needs.cache_dtype not in row.cache_dtypes:
        reasons.append(f"{row.name} reads caches of {', '.join(row.cache_dtypes)}, not of {needs.cache_dtype}")
    if needs.speculative and not row.speculative_verification:
        reasons.append(f"{row.name} does not verify speculative tokens")
    return tuple(reasons)


def dense_refusals(row: BackendRow, needs: AttentionNeeds) -> tuple[str, ...]:
    """Every reason why prefill with `row` may not take the dense path."""
    reasons = []
    if not row.dense_mha_prefill:
        reasons.append(f"{row.name} has no dense_mha prefill")
    if needs.sparse and needs.selection_budget == 0:
        reasons.append("dense_mha would attend to the open pool, which this model never selects (selection budget 0)")
    return tuple(reasons)


def select(
    needs: AttentionNeeds,
    *,
    backend: str = "auto",
    prefill: str = "auto",
    rows: tuple[BackendRow, ...] = BACKENDS,
) -> AttentionChoice:
    """The first backend of `rows` that can serve, or the one named, and its prefill path.

    prefill: `auto` (takes mqa), `mqa` or `dense_mha`. What is named and impossible gives a choice
    without a backend, whose reasons are all of them.
    """
    if prefill not in ("auto", *PREFILL_PATHS):
        return _none(f"there is no prefill path {prefill!r}: the paths are {', '.join(PREFILL_PATHS)}")
    asked = [row for row in rows if backend in ("auto", row.name)]
    if not asked:
        return _none(f"there is no backend {backend!r}: the backends are {', '.join(row.name for row in rows)}")
    refused: list[str] = []
    for row in asked:
        reasons = refusals(row, needs)
        if prefill == "dense_mha":
            reasons += dense_refusals(row, needs)
        if not reasons:
            why = f"{row.name}: {'named' if backend != 'auto' else 'first that can serve'}"
            return AttentionChoice(row.name, row.path, *_prefill(row, needs, prefill, [*refused, why]))
        refused += reasons
    return _none(*refused)


def _prefill(row: BackendRow, needs: AttentionNeeds, prefill: str, reasons: list[str]) -> tuple[str, tuple[str, ...]]:
    if prefill == "auto":
        against = dense_refusals(row, needs)
        reasons.append("mqa: " + ("; ".join(against) if against else "default, the same work in prefill and decode"))
        prefill = "mqa"
    else:
        reasons.append(f"{prefill}: named")
    return prefill, tuple(reasons)


def _none(*reasons: str) -> AttentionChoice:
    return AttentionChoice(None, None, None, reasons)
