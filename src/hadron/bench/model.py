"""`hadron bench decode` and `prefill`: a whole model, step by step, beside the limits of the machine.

A context is not computed but put there: pages of random latents and keys, as long as is asked, so that a
step behind 256 k tokens can be timed without the hours that they would take. Steps take what a model takes:
which values lie in the cache does not change how many bytes are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from hadron.batch import RequestStep, make_batch
from hadron.bench.limits import Arena, Clock, Probes
from hadron.bench.profile import Profile
from hadron.bench.report import ModelReport, Step
from hadron.bench.run import environment, fitting, level_of
from hadron.bench.weigh import Cost, context_bytes, token_cost
from hadron.cache.blocks import BlockPool
from hadron.cache.manager import CacheManager, SequenceCache
from hadron.cache.pages import Pages
from hadron.cache.spec import CacheSpec, cache_spec
from hadron.cache.states import States
from hadron.engine.build import build_model, threads
from hadron.engine.config import EngineConfig
from hadron.errors import CapacityError, UsageError
from hadron.models.language_model import LanguageModel, config_selection_budget
from hadron.preflight.build import make_plan

#: Bytes that the bandwidth is measured over.
ARENA = 1 << 30

Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    del done, total


@dataclass(frozen=True, slots=True)
class Asked:
    """contexts: tokens before the step. tokens: of a step, each in turn. steps: how many are timed."""

    contexts: tuple[int, ...] = (1024,)
    tokens: tuple[int, ...] = (1,)
    steps: int = 16
    warmup: int = 2
    profiled: int = 2


class Sequence:
    """One request with caches of its own, whose context need not have been computed."""

    def __init__(self, model: LanguageModel, spec: CacheSpec, capacity: int) -> None:
        blocks = -(-capacity // spec.page_size)
        self._model = model
        self._pages = Pages(spec, blocks, model.settings.device)
        self._states = States(spec, 2, model.settings.device)
        self._manager = CacheManager(spec, BlockPool(blocks, spec.page_size), self._pages, self._states)
        self._cache = self._manager.admit()
        random = torch.Generator().manual_seed(0)
        for tensor in (*self._pages.latents, *self._pages.index_keys):
            if tensor is not None:
                _fill(tensor, random)

    def place(self, context: int) -> None:
        """Let the sequence be `context` tokens long, whatever it was."""
        self._manager.release(self._cache)
        self._cache = self._manager.admit()
        self._manager.grow(self._cache, context)
        self._states.advance([self._cache.state_slot], [context])
        self._manager.commit([self._cache], [[0] * context])

    @property
    def cache(self) -> SequenceCache:
        """What the request holds."""
        return self._cache

    def step(self, ids: list[int]) -> torch.Tensor:
        """Take tokens and choose the likeliest next; float32 [1, vocabulary], the logits of the last."""
        self._manager.grow(self._cache, len(ids))
        with torch.inference_mode():
            hidden = self._model.forward(make_batch([RequestStep(self._cache, ids)], self._pages, self._states))
            logits = self._model.head(hidden[-1:])
            logits.best(1)
        self._manager.commit([self._cache], [ids])
        return logits.values


def _fill(tensor: torch.Tensor, random: torch.Generator) -> None:
    """Values near 1 in every page, one block of random numbers repeated: cheap, and no two pools tie often."""
    rows = tensor.view(-1, tensor.shape[-1])
    block = torch.randn(min(len(rows), 4099), rows.shape[1], generator=random).to(tensor.dtype)
    for start in range(0, len(rows), len(block)):
        part = rows[start : start + len(block)]
        part.copy_(block[: len(part)])


def measure(
    model: str | Path,
    config: EngineConfig,
    asked: Asked,
    *,
    isa: str | None = None,
    clock: Clock = time.perf_counter,
    progress: Progress = _silent,
) -> ModelReport:
    """Load and time. Errors of a plan, a build or too small a memory are the usual ones."""
    plan = make_plan(model, kernels=config.kernels, device=config.device, dtype=config.dtype)
    if plan.root is None:
        raise UsageError(
            "Only a checkpoint on this machine can be measured",
            where=str(model),
            found="the name of one on the Hub",
            accepted="a folder",
            hint=f"fetch it with `hf download {model}`, and give the folder that it prints",
        )
    profile = Profile(clock)
    with level_of(isa) as level, profile.installed():
        built = build_model(plan, config)
        assert plan.config is not None
        spec = cache_spec(plan.config, dtype=config.dtype, latents=plan.memory.cache_dtype)
        capacity = max(asked.contexts) + max(asked.tokens) * (asked.steps + asked.warmup + asked.profiled)
        sequence = _sequence(built, spec, capacity)
        count, cost = threads(config), token_cost(plan)
        probes = Probes(Arena(fitting(ARENA)), level, count, clock)
        steps = []
        points = [(context, tokens) for context in asked.contexts for tokens in asked.tokens]
        for i, (context, tokens) in enumerate(points):
            profile.reset()
            sequence.place(context)
            behind = context_bytes(spec, context, config_selection_budget(plan.config))
            steps.append(
                _timed(sequence, profile, probes, cost, behind, asked, tokens, context, clock, built.layer_count)
            )
            progress(i + 1, len(points))
        notes = [
            "The context is put into the caches, not computed; weights are read from the mapped file.",
            f"{asked.steps} steps each, without the profiler, whose {asked.profiled} steps come after; "
            "bytes are those of weights and scales, of the experts a token takes, and of its caches.",
        ]
        return ModelReport(
            environment(count, level), probes.summary(), str(model), built.layer_count, plan.bytes, cost, steps, notes
        )


def _sequence(model: LanguageModel, spec: CacheSpec, capacity: int) -> Sequence:
    try:
        return Sequence(model, spec, capacity)
    except RuntimeError as error:  # what torch's allocators raise
        raise CapacityError(
            "there is no memory for the caches",
            where=f"a context of {capacity} tokens",
            found=f"{capacity * spec.bytes_per_token:,} bytes asked for: {error}"[:300],
            accepted="a context that fits beside the weights",
            hint="give smaller --contexts",
        ) from error


def _timed(
    sequence: Sequence, profile: Profile, probes: Probes, cost: Cost, behind: int, asked: Asked, tokens: int,
    context: int, clock: Clock, layers: int,
) -> Step:  # fmt: skip
    random = torch.Generator().manual_seed(context + tokens)
    vocabulary = sequence.step([1]).shape[1]

    def once() -> None:
        if tokens > 1:  # the next piece of a prompt would be behind a longer context
            sequence.place(context)
        sequence.step(torch.randint(0, vocabulary, (tokens,), generator=random).tolist())

    for _ in range(asked.warmup - 1):
        once()
    seconds, bandwidth, peak = [], [probes.read()], [_peak(probes)]
    for turn in range(asked.steps):
        begin = clock()
        once()
        seconds.append(clock() - begin)
        if turn % 4 == 3 or turn == asked.steps - 1:
            bandwidth.append(probes.read())
            peak.append(_peak(probes))
    for _ in range(asked.profiled):
        with profile.step():
            once()
    median = _median(seconds)
    flops = (cost.flops * tokens + cost.head_flops) / median / 1e9
    # Several tokens take more experts and latents than one, how many more is theirs; their bytes are a lower bound.
    gbps = (cost.bytes + behind) / median / 1e9
    of = {"read_gbps": (gbps, _median(bandwidth)), probes.best_peak(): (flops, _median(peak))}
    limit = max(of, key=lambda name: of[name][0] / of[name][1])
    value, best = of[limit]
    return Step(
        context=context, context_bytes=behind, tokens=tokens, steps=asked.steps, ms=median * 1e3,
        tokens_per_second=tokens / median, gbps=gbps, gflops=flops, limit=limit, limit_value=best,
        fraction=value / best, profile=profile.breakdown(layers),
    )  # fmt: skip


def _peak(probes: Probes) -> float:
    value = probes.limit(probes.best_peak())
    assert value is not None
    return value


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]
