"""From a checkpoint's name to an engine: plan, fetch what is missing, build the model, size its caches."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, cache_spec
from hadron.cache.states import States
from hadron.cache.stores import PrefixStore
from hadron.checkpoint.hub import Hub
from hadron.engine.build import Built, build_models
from hadron.engine.config import EngineConfig
from hadron.engine.engine import Engine
from hadron.engine.fingerprint import fingerprint
from hadron.engine.prefix_store import DiskPrefixes
from hadron.engine.runner import Runner
from hadron.errors import CapacityError, PlanError
from hadron.preflight.build import make_plan
from hadron.preflight.plan import LoadPlan
from hadron.sampling_params import listed_end_tokens
from hadron.tokenizer import tokenizer as tokenizers
from hadron.tokenizer.markup import TURNS
from hadron.tokenizer.tokenizer import Tokenizer

#: Kinds of `<kind>_token_id` in config.json, and markup: what only prompts hold. What opens a turn does too, unless it
#: ends the one before.
PLACEHOLDERS = (
    "image", "image_start", "image_end", "video", "video_start", "video_end",
)  # fmt: skip
MARKUP = ("[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<tool_response>", "</tool_response>", *TURNS)

logger = logging.getLogger("hadron.engine")

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
    built = build_models(plan, config, lambda p: report(p.phase, p.done, p.total))
    _log_kernels(plan)
    engine = Engine(
        _runner(built, plan, config),
        vocabulary=plan.config.vocabulary,
        max_position=plan.config.max_position,
        eos=end_tokens(plan, tokenizer),
        tokenizer=tokenizer,
        max_num_batched_tokens=config.max_num_batched_tokens,
        prefix_caching=config.enable_prefix_caching,
        turn_tokens=turn_tokens(tokenizer),
        prompt_only=prompt_only_tokens(plan, tokenizer),
    )
    return Assembled(plan, engine, tokenizer)


def _log_kernels(plan: LoadPlan) -> None:
    """One line for each kind of module, scheme and kernel, so that a log tells which way a model took."""
    ran = Counter((m.kind.value, m.scheme.name, m.kernel.name) for m in plan.modules if m.kernel is not None)
    for (kind, scheme, kernel), count in sorted(ran.items()):
        logger.info("%s runs %d modules: %s, %s", kernel, count, kind, scheme)


def _plan(model: str | Path, config: EngineConfig, hub: Hub, report: Report) -> LoadPlan:
    plan = make_plan(model, **asdict(config.wishes), hub=hub, progress=report)
    if not plan.ok:
        raise PlanError(plan.model, plan.errors, config.flags)
    return plan


def end_tokens(plan: LoadPlan, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that end a text: all those of `config.json`, `generation_config.json` and the tokenizer that the model can
    say."""
    assert plan.config is not None
    listed, _ = listed_end_tokens(plan.facts.generation_config)
    own = None if tokenizer is None else tokenizer.end_id
    ids = {*plan.config.eos, *listed, *(() if own is None else (own,))}
    return frozenset(i for i in ids if 0 <= i < plan.config.vocabulary)


def prompt_only_tokens(plan: LoadPlan, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids that structure a prompt and have no place in an answer, such as placeholders of pictures."""
    assert plan.config is not None
    ids = {plan.facts.config.get(f"{kind}_token_id") for kind in PLACEHOLDERS}
    ids |= set() if tokenizer is None else {tokenizer.token_id(word) for word in MARKUP}
    vocabulary = range(plan.config.vocabulary)
    return frozenset(i for i in ids if isinstance(i, int) and i in vocabulary) - end_tokens(plan, tokenizer)


def turn_tokens(tokenizer: Tokenizer | None) -> frozenset[int]:
    """Ids of the markup that opens a turn, as far as the tokenizer knows it."""
    if tokenizer is None:
        return frozenset()
    return frozenset(token for word in TURNS if (token := tokenizer.token_id(word)) is not None)


def _store(plan: LoadPlan, config: EngineConfig, spec: CacheSpec) -> Callable[[Pages, States], PrefixStore] | None:
    """What opens the folder of prefixes, where one is wanted."""
    if config.prefix_cache_dir is None or not config.enable_prefix_caching:
        return None
    return partial(
        DiskPrefixes, Path(config.prefix_cache_dir), fingerprint(plan, config, spec), config.prefix_cache_bytes
    )


def _runner(built: Built, plan: LoadPlan, config: EngineConfig) -> Runner:
    assert plan.config is not None
    memory = plan.memory
    spec = cache_spec(plan.config, dtype=config.dtype, latents=memory.cache_dtype, drafting=built.mtp is not None)
    try:
        return Runner(
            built.model,
            spec,
            max_model_len=memory.max_context,
            max_num_seqs=memory.states,
            num_pages=memory.pages,
            prefix_snapshots=memory.snapshots,
            debug_nonfinite=config.debug_nonfinite,
            store=_store(plan, config, spec),
            mtp=built.mtp,
            drafts=plan.mtp.drafts,
        )
    except RuntimeError as error:  # what torch's allocators raise
        slots = memory.states + memory.snapshots
        asked = memory.pages * spec.bytes_per_page + slots * spec.bytes_per_sequence
        raise CapacityError(
            "there is no memory for the caches",
            where=f"{memory.pages} pages of {spec.page_size} tokens and {slots} states",
            found=f"{asked:,} bytes asked for: {error}"[:300],
            accepted="what the allocator has",
            hint="give a smaller --kv-cache-memory-bytes, --max-model-len, --num-pages or --max-num-seqs "
            "(kv_cache_memory_bytes=, max_model_len=, num_pages=, max_num_seqs=)",
        ) from error
