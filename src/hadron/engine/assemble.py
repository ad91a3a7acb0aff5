"""From a checkpoint's name to an engine: plan, fetch what is missing, build the model, size its caches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hadron.cache.spec import cache_spec
from hadron.checkpoint.hub import Hub
from hadron.engine.build import build_model
from hadron.engine.config import EngineConfig
from hadron.engine.engine import Engine
from hadron.engine.runner import Runner
from hadron.errors import CapacityError, PlanError
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from hadron.sampling_params import listed_end_tokens
from hadron.tokenizer import tokenizer as tokenizers
from hadron.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hadron.models.language_model import LanguageModel

#: Tokens of context that are always offered, also where the weights alone exceed the memory.
LEAST_CONTEXT = 4096
#: Fraction of a GPU's memory left for what a step computes.
WORKSPACE = 0.1

#: What is being done, how far (bytes or steps), of how much.
Report = Callable[[str, int, int], None]


class Assembled(NamedTuple):
    """An engine, with what it was made from. tokenizer is None where the checkpoint has none."""

    plan: LoadPlan
    engine: Engine
    tokenizer: Tokenizer | None


def assemble(model: str | Path, config: EngineConfig, report: Report, hub: Hub | None = None) -> Assembled:
    """The engine for a folder or a Hub id; of the latter the plan comes first, then the download.

    `PlanError` before any data is read where the plan holds errors.
    """
    hub = hub or Hub()
    plan = _plan(model, config, hub, report)
    if plan.root is None:
        plan = _plan(hub.download(str(model), report), config, hub, report)
    assert plan.config is not None
    assert plan.root is not None
    tokenizer = Tokenizer.load(plan.root) if (plan.root / tokenizers.FILE).is_file() else None
    language_model = build_model(plan, config, lambda p: report(p.phase, p.done, p.total))
    engine = Engine(
        _runner(language_model, plan, config),
        vocabulary=plan.config.vocabulary,
        max_position=plan.config.max_position,
        eos=end_tokens(plan),
        tokenizer=tokenizer,
        chunk_size=config.chunk_size,
    )
    return Assembled(plan, engine, tokenizer)


def _plan(model: str | Path, config: EngineConfig, hub: Hub, report: Report) -> LoadPlan:
    plan = make_plan(
        model,
        kernels=config.kernels,
        device=config.device,
        dtype=config.dtype,
        kv_cache_dtype=config.kv_cache_dtype,
        mla_prefill=config.mla_prefill,
        hub=hub,
        progress=report,
    )
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    return plan


def end_tokens(plan: LoadPlan) -> frozenset[int]:
    """Ids that end a text: those of `config.json` and of `generation_config.json`."""
    assert plan.config is not None
    listed, _ = listed_end_tokens(plan.facts.generation_config)
    return frozenset(plan.config.eos) | frozenset(listed)


def context_size(plan: LoadPlan, config: EngineConfig) -> int:
    """Tokens that the caches hold: what was asked for, else what the plan says fits; at most the model's."""
    assert plan.config is not None
    fits = plan.memory.max_context
    if config.device != "cpu":
        fits -= int(WORKSPACE * plan.platform.memory) // max(1, plan.memory.cache_per_token)
    return min(config.max_context or max(fits, LEAST_CONTEXT), plan.config.max_position)


def _runner(model: LanguageModel, plan: LoadPlan, config: EngineConfig) -> Runner:
    size = context_size(plan, config)
    assert plan.config is not None
    spec = cache_spec(plan.config, dtype=config.dtype, latents=plan.memory.cache_dtype)
    try:
        return Runner(model, spec, max_context=size)
    except RuntimeError as error:  # what torch's allocators raise
        raise CapacityError(
            "there is no memory for the caches",
            where=f"a context of {size} tokens",
            found=f"{size * spec.bytes_per_token + spec.bytes_per_sequence:,} bytes asked for: {error}"[:300],
            accepted=f"about {plan.memory.max_context} tokens by the plan",
            hint="give a smaller --max-context (max_context=)",
        ) from error
