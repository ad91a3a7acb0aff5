"""`EngineConfig`: how a model is to be run. Names are those of the flags of `hadron generate`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hadron.cache.spec import KV_CACHE_DTYPES
from hadron.platforms import numa
from hadron.preflight.wishes import Wishes, refused, whole_number

DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
KERNELS = ("auto", "cpu", "reference", "triton")
ACTIVATION_QUANTIZATION = ("none", "declared")
MLA_PREFILL = ("auto", "mqa", "dense_mha")
#: Most tokens that may be guessed in a step.
MOST_DRAFTS = 16
_SPECULATIVE = f'{{"method": "mtp", "num_speculative_tokens": 1 to {MOST_DRAFTS}}}'


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How a model is to be run; every field has a flag of the same name.

    kernels: the provider of kernels; `auto` takes the platform's order.
    dtype: of activations and caches; what is stored float32 is never computed with less.
    kv_cache_dtype: of the latents in the cache alone; `auto` is that of activations.
    device: where weights and caches are; `cuda` is also what torch calls AMD's GPUs.
    threads: of torch and of native kernels; None leaves torch's own choice.
    activation_quantization: `declared` emulates what the checkpoint declares for inputs of products.
    mla_prefill: `mqa` is the absorbed form; `dense_mha` expands keys and values where that is equal.
    max_model_len: most tokens of one request; None takes what fits, at most the model's own.
    max_num_batched_tokens: most tokens of a step, of all requests together; prompts are taken in pieces. More
    is faster for prompts, makes everybody else wait longer and needs more memory.
    max_num_seqs: most requests that run at a time; others wait.
    num_pages: pages of 64 tokens in the cache; None takes what memory_utilization leaves.
    memory_utilization: the fraction of the machine's memory that weights and caches may take.
    kv_cache_memory_bytes: bytes of all caches together, states and snapshots too, in place of that fraction.
    enable_prefix_caching: take the beginning of a prompt from the cache where an earlier request had it.
    prefix_cache_dir: a folder in which prefixes outlive the process; only its owner should read it.
    prefix_cache_bytes: most bytes there of one model with one set of options.
    debug_nonfinite: look at every layer's output and name the one that first computed NaN or infinity.
    prefault: read every page of the weights before the first token.
    mlock: keep the pages of the weights in memory; needs a limit on locked memory above their size.
    numa: whose memory the pages of the weights lie in, on a machine with several nodes: `interleave` takes
    turns, `bind:<node>` one node; `auto` interleaves where there are several, `none` leaves it to the system.
    speculative_config: `{"method": "mtp", "num_speculative_tokens": k}` lets the checkpoint's multi-token-prediction
    layer guess k tokens ahead, which the model checks in one step; None guesses nothing. Texts are the same.
    """

    kernels: str = "auto"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    activation_quantization: str = "none"
    mla_prefill: str = "auto"
    max_model_len: int | None = None
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 16
    num_pages: int | None = None
    memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    prefix_cache_dir: str | os.PathLike[str] | None = None
    prefix_cache_bytes: int = 16 << 30
    debug_nonfinite: bool = False
    prefault: bool = False
    mlock: bool = False
    numa: str = "auto"
    speculative_config: Mapping[str, Any] | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """Tokens to guess in a step; 0 for none."""
        return 0 if self.speculative_config is None else int(self.speculative_config["num_speculative_tokens"])

    @property
    def wishes(self) -> Wishes:
        """What a plan is asked for."""
        return Wishes(**{field.name: getattr(self, field.name) for field in fields(Wishes)})

    @property
    def flags(self) -> str:
        """What `hadron check` must be given to plan alike, such as ` --kernels triton`."""
        asked = {
            "kernels": (self.kernels, "auto"), "device": (self.device, "cpu"),
            "activation-quantization": (self.activation_quantization, "none"),
            "kv-cache-dtype": (self.kv_cache_dtype, "auto"),
            "num-speculative-tokens": (self.num_speculative_tokens, 0),
        }  # fmt: skip
        return "".join(f" --{name} {value}" for name, (value, usual) in asked.items() if value != usual)

    def __post_init__(self) -> None:
        choices = {
            "kernels": KERNELS, "dtype": DTYPES, "kv_cache_dtype": KV_CACHE_DTYPES, "device": DEVICES,
            "activation_quantization": ACTIVATION_QUANTIZATION, "mla_prefill": MLA_PREFILL,
        }  # fmt: skip
        for name, accepted in choices.items():
            if getattr(self, name) not in accepted:
                raise refused(name, getattr(self, name), ", ".join(accepted))
        if self.threads is not None:
            whole_number("threads", self.threads)
        whole_number("max_num_batched_tokens", self.max_num_batched_tokens)
        whole_number("prefix_cache_bytes", self.prefix_cache_bytes)
        if not isinstance(self.prefix_cache_dir, str | os.PathLike | None) or self.prefix_cache_dir == "":
            raise refused("prefix_cache_dir", self.prefix_cache_dir, "the name of a folder, or nothing")
        if not isinstance(self.numa, str) or not numa.is_word(self.numa):
            raise refused("numa", self.numa, numa.ACCEPTED)
        self._check_speculation()
        _ = self.wishes  # which refuse sizes that make no sense
        if self.device != "cpu":
            for name, unused in {"prefault": (False,), "mlock": (False,), "numa": ("auto", "none")}.items():
                if getattr(self, name) not in unused:
                    nothing = "nothing with --device cuda: the weights are copied to the device"
                    raise refused(name, getattr(self, name), nothing)

    def _check_speculation(self) -> None:
        wanted = self.speculative_config
        if wanted is None:
            return
        keys = {"method", "num_speculative_tokens"}
        if not isinstance(wanted, Mapping) or set(wanted) != keys or wanted["method"] != "mtp":
            raise refused("speculative_config", wanted, _SPECULATIVE)
        count = wanted["num_speculative_tokens"]
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= MOST_DRAFTS:
            raise refused("speculative_config", wanted, _SPECULATIVE)
