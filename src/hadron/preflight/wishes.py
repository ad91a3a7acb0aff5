"""`Wishes`: what a plan is asked for. Imports no planner, so that `--help` may know the defaults."""

from __future__ import annotations

from dataclasses import dataclass

from hadron.cache.spec import latent_dtype
from hadron.errors import UsageError


@dataclass(frozen=True)
class Wishes:
    """What the user asks of a plan; every field has a flag of the same name. `UsageError` for sizes that make no sense.

    kernels: `auto` or a provider's name. dtype: of activations and caches. mla_prefill: `auto`, `mqa` or
    `dense_mha`. activation_quantization: `declared` emulates what the checkpoint declares for inputs of products.
    kv_cache_dtype: of `cache.spec.KV_CACHE_DTYPES`. max_model_len: most tokens of one request; None takes what
    fits. max_num_seqs: most requests that run at a time. num_pages: pages of the cache; None takes what fits.
    memory_utilization: the fraction of the memory for weights and caches. kv_cache_memory_bytes: bytes of all
    caches together, in place of that fraction. enable_prefix_caching: whether states are kept for later requests.
    num_speculative_tokens: how many tokens the multi-token-prediction layer is to guess in a step, 0 for none.
    """

    kernels: str = "auto"
    device: str = "cpu"
    dtype: str = "bfloat16"
    mla_prefill: str = "auto"
    activation_quantization: str = "none"
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 16
    num_pages: int | None = None
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        whole_number("max_num_seqs", self.max_num_seqs)
        for name in ("max_model_len", "num_pages", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name))
        used = self.memory_utilization
        if not isinstance(used, int | float) or isinstance(used, bool) or not 0 < used <= 1:
            raise refused("memory_utilization", used, "a number above 0, at most 1")
        if self.num_pages is not None and self.kv_cache_memory_bytes is not None:
            raise refused("kv_cache_memory_bytes", self.kv_cache_memory_bytes, "either this or --num-pages, not both")

    @property
    def latents(self) -> str:
        """What latent rows are kept in; `UnsupportedError` for a word that is none."""
        return latent_dtype(self.kv_cache_dtype, self.dtype)


def whole_number(name: str, value: object) -> None:
    """`UsageError` for what is no whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise refused(name, value, "a whole number of at least 1, or nothing")


def refused(name: str, value: object, accepted: str) -> UsageError:
    """The error for a value of an option that cannot be used."""
    return UsageError(
        "An option cannot be used as given",
        where=f"--{name.replace('_', '-')}",
        found=repr(value),
        accepted=accepted,
        hint="see `hadron generate --help`",
    )
