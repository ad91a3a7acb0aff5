"""Random tiny models of both families in transformers, and the same weights under our runtime names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextModel
from transformers.models.glm_moe_dsa import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from hadron.attention.select import AttentionNeeds, select
from hadron.batch import RequestStep, make_batch
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager, SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.spec import cache_spec
from hadron.cache.states import States
from hadron.models.glm5_next import config as glm5_next_config
from hadron.models.glm5_next.model import Glm5NextModel
from hadron.models.glm_moe_dsa import config as glm_moe_dsa_config
from hadron.models.glm_moe_dsa.model import GlmMoeDsaModel
from hadron.models.language_model import LanguageModel, config_selection_budget, model_settings

GLM_MOE_DSA: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "kv_lora_rank": 12, "q_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 10, "qk_nope_head_dim": 6,
    "index_topk": 8, "index_head_dim": 8, "index_n_heads": 12, "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "max_position_embeddings": 512,
}  # fmt: skip
GLM5_NEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 2, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "kv_lora_rank": 12, "q_lora_rank": 16, "v_head_dim": 10, "qk_nope_head_dim": 6, "index_topk": 8,
    "index_kpool": 4, "index_head_dim": 8, "index_n_heads": 12, "linear_head_dim": 8, "linear_num_heads": 2,
    "pad_token_id": None, "max_position_embeddings": 512, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
}  # fmt: skip


class DictWeights:
    """`hadron.layers.weights.Weights` over plain tensors: matrices under their module's name."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, name: str) -> DictLinear:
        return DictLinear(self.tensors[name], self.tensors.get(name + ".bias"))

    def tensor(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def to(self, device: str) -> DictWeights:
        """The same on another device."""
        return DictWeights({n: t.to(device) for n, t in self.tensors.items()})

    def cast(self, dtype: torch.dtype, keep: Sequence[str]) -> DictWeights:
        """Every tensor in `dtype`, but those whose name ends in one of `keep`."""
        return DictWeights({n: t if n.endswith(tuple(keep)) else t.to(dtype) for n, t in self.tensors.items()})


@dataclass(frozen=True)
class DictLinear:
    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() @ self.weight.float().T
        return (y if self.bias is None else y + self.bias.float()).to(x.dtype)

    def dequantized(self) -> torch.Tensor:
        return self.weight.float()


def randomize(module: nn.Module, seed: int) -> None:
    """Weights on which every part of a model matters: wide gates, uneven norms, real biases."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in sorted(module.state_dict().items()):
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("layernorm.weight", "norm.weight", "k_norm.weight", "hc.scale")):
            value = 1 + 0.3 * noise
        elif name.endswith(("correction_bias", "k_norm.bias")):
            value = 0.2 * noise
        elif tensor.dim() == 1 or name.endswith(("conv1d.weight", "kpool_compress_ape")):
            value = 0.5 * noise
        else:
            value = noise * tensor.shape[-1] ** -0.5
        if ".self_attn.o_proj" in name:
            # KDA's gated norm magnifies the rounding of outputs that nearly cancel; do not feed that on.
            value *= 0.4
        tensor.copy_(value)


def _attributes(name: str, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The runtime names and parts of one tensor of transformers' state dict."""
    name = name.removeprefix("model.")
    for ours, theirs in (("hc_attn_", "attn_hc."), ("hc_ffn_", "ffn_hc."), ("self_attn.", "self_attn.forget_gate.")):
        name = name.replace(theirs, ours)
    if name.endswith("mlp.experts.gate_up_proj"):
        base = name.removesuffix("gate_up_proj")
        halves = [(e, *bank.chunk(2)) for e, bank in enumerate(tensor)]
        return {f"{base}{e}.gate_proj": gate for e, gate, _ in halves} | {
            f"{base}{e}.up_proj": up for e, _, up in halves
        }
    if name.endswith("mlp.experts.down_proj"):
        base = name.removesuffix("down_proj")
        return {f"{base}{e}.down_proj": bank for e, bank in enumerate(tensor)}
    if name.endswith("self_attn.conv1d.weight"):
        base = name.removesuffix("conv1d.weight")
        return dict(zip((f"{base}{c}_conv1d" for c in "qkv"), tensor.chunk(3), strict=True))
    return {name.removesuffix(".weight"): tensor}


def runtime_weights(state: Mapping[str, torch.Tensor]) -> DictWeights:
    """transformers' state dict under runtime names."""
    return DictWeights({n: t for name, tensor in state.items() for n, t in _attributes(name, tensor).items()})


class Oracle:
    """A tiny model in transformers, its weights and our configuration of it."""

    def __init__(self, family: str, overrides: Mapping[str, Any], seed: int = 0, attention: str = "eager") -> None:
        torch.manual_seed(seed)
        self.family = family
        problems: list[Any] = []
        if family == "glm_moe_dsa":
            their = GlmMoeDsaConfig(**{**GLM_MOE_DSA, **overrides}, attn_implementation=attention)
            self.model: nn.Module = GlmMoeDsaForCausalLM(their).eval()
            self.config: Any = glm_moe_dsa_config.read({**their.to_dict(), **overrides}, problems)
        else:
            text = Glm5NextTextConfig(**{**GLM5_NEXT, **overrides}, attn_implementation=attention)
            self.model = nn.ModuleDict(
                {"model": Glm5NextTextModel(text), "lm_head": nn.Linear(text.hidden_size, text.vocab_size, bias=False)}
            ).eval()
            self.config = glm5_next_config.read({**text.to_dict(), **overrides}, problems)
        assert self.config is not None, problems
        with torch.no_grad():
            randomize(self.model, seed)
        if getattr(getattr(self.model, "config", None), "tie_word_embeddings", False):
            self.model.tie_weights()
        self.weights = runtime_weights(self.model.state_dict())
        if self.config.tied:
            del self.weights.tensors["lm_head"]

    def logits(self, ids: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
        """float32 [len(ids), vocabulary], in one piece or with a cache in pieces of `chunks`."""
        with torch.inference_mode():
            if not chunks:
                return self._run(torch.tensor([list(ids)]), None)[0][0]
            cache, out, start = None, [], 0
            for size in chunks:
                logits, cache = self._run(torch.tensor([list(ids[start : start + size])]), cache, use_cache=True)
                out.append(logits[0])
                start += size
            return torch.cat(out)

    def _run(self, ids: torch.Tensor, cache: Any, use_cache: bool = False) -> tuple[torch.Tensor, Any]:
        if self.family == "glm_moe_dsa":
            out = self.model(input_ids=ids, past_key_values=cache, use_cache=use_cache)
            return out.logits.float(), out.past_key_values
        out = self.model["model"](input_ids=ids, past_key_values=cache, use_cache=use_cache)
        return self.model["lm_head"](out.last_hidden_state).float(), out.past_key_values


def build(
    config: Any,
    weights: DictWeights,
    *,
    dtype: torch.dtype = torch.float32,
    prefill: str = "mqa",
    device: str = "cpu",
) -> LanguageModel:
    """Our model over `weights`, which lie on `device`."""
    needs = AttentionNeeds(device, True, str(dtype).removeprefix("torch."), False, config_selection_budget(config))
    settings = model_settings(config, dtype=dtype, device=device, attention=select(needs, prefill=prefill))
    kind = Glm5NextModel if hasattr(config, "kda") else GlmMoeDsaModel
    return kind(config, weights, settings)


class Run:
    """A model with caches of `pages` pages, and sequences by name."""

    def __init__(
        self, model: LanguageModel, config: Any, page_size: int = 16, pages: int = 32, slots: int = 8,
        latents: str | None = None,
    ) -> None:  # fmt: skip
        self.model = model
        dtype = str(model.settings.dtype).removeprefix("torch.")
        self.spec = cache_spec(config, dtype=dtype, latents=latents, page_size=page_size)
        self.pages = Pages(self.spec, pages, model.settings.device)
        self.states = States(self.spec, slots, model.settings.device)
        self.manager = CacheManager(self.spec, BlockPool(pages, page_size), self.pages, self.states)
        # What was never written must never be read.
        for tensor in (*self.pages.latents, *self.pages.index_keys):
            if tensor is not None:
                tensor.fill_(0xFF if tensor.dtype is torch.uint8 else float("nan"))  # bytes: NaN codes and scales

    def batch(self, steps: Sequence[tuple[SequenceCache, Sequence[int]]]) -> Any:
        for cache, ids in steps:
            self.manager.grow(cache, len(ids))
        return make_batch([RequestStep(cache, ids) for cache, ids in steps], self.pages, self.states)

    def step(self, *steps: tuple[SequenceCache, Sequence[int]]) -> list[torch.Tensor]:
        """Logits of all new tokens of each request."""
        with torch.inference_mode():
            batch = self.batch(steps)
            logits = self.model.logits(self.model.forward(batch))
        for cache, ids in steps:
            self.manager.commit([cache], [ids])
        return list(logits.split(list(batch.query_lens)))

    def logits(self, ids: Sequence[int], chunks: Sequence[int] = ()) -> torch.Tensor:
        """As `Oracle.logits`, in a sequence of its own."""
        cache, out, start = self.manager.admit(), [], 0
        for size in chunks or [len(ids)]:
            out += self.step((cache, ids[start : start + size]))
            start += size
        self.manager.release(cache)
        return torch.cat(out)


def tokens(count: int, seed: int = 0, vocabulary: int = 64) -> list[int]:
    """Random token ids."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected logit."""
    return float((found - expected).abs().max() / expected.abs().max())


glm_moe_dsa = partial(Oracle, "glm_moe_dsa")
glm5_next = partial(Oracle, "glm5_next")
