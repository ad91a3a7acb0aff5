"""`make_plan`: joins checkpoint facts, the family's inventory, kernels and platform into a `LoadPlan`.

Everything here is names and sizes; no tensor library is loaded. Nothing is refused early: whatever is
wrong is collected, and the plan is as complete as the checkpoint allows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any, cast

from hadron.attention.select import AttentionNeeds, select, selection_budget
from hadron.checkpoint.facts import Facts, read_facts
from hadron.checkpoint.formats import parse_rules
from hadron.checkpoint.formats.base import Rules
from hadron.checkpoint.garbage import paused_gc
from hadron.checkpoint.resolve import Resolver
from hadron.kernels import ops
from hadron.kernels import select as kernels_select
from hadron.kernels.catalog import Sizes
from hadron.kernels.select import KernelChoice, Refusal
from hadron.models.inventory import LINEAR_KINDS, ModuleKind, ModuleSpec, Section, Split
from hadron.models.registry import FAMILIES, ConfigModule, Family, FamilyConfig
from hadron.platforms import detect
from hadron.platforms.base import Platform
from hadron.preflight.findings import PlanFindings
from hadron.preflight.memory import plan_memory, tensor_bytes
from hadron.preflight.plan import AttentionPlan, LoadPlan, ModulePlan, runs
from hadron.preflight.wishes import Wishes
from hadron.problems import Problem, problem
from hadron.quantization.scheme import BF16, QuantizationScheme
from hadron.sampling_params import checkpoint_defaults, listed_end_tokens

if TYPE_CHECKING:
    from pathlib import Path

    from hadron.checkpoint.hub import Hub
    from hadron.checkpoint.source import Progress

#: the operation that reads a kind's weight
OPERATIONS: dict[ModuleKind, str] = {
    ModuleKind.EMBEDDING: "embedding",
    ModuleKind.LM_HEAD: "lm_head",
    ModuleKind.NORM: "norm",
    ModuleKind.ATTENTION: "linear",
    ModuleKind.INDEXER: "linear",
    ModuleKind.KDA: "linear",
    ModuleKind.CONV: "kda",
    ModuleKind.ROUTER: "router",
    ModuleKind.MLP: "mlp",
    ModuleKind.SHARED_EXPERT: "mlp",
    ModuleKind.EXPERT: "moe",
    ModuleKind.HYPER_CONNECTION: "hyper_connection",
    ModuleKind.MTP_PROJECTION: "linear",
}


def make_plan(
    model: str | Path,
    *,
    kernels: str = "auto",
    device: str = "cpu",
    dtype: str = "bfloat16",
    mla_prefill: str = "auto",
    activation_quantization: str = "none",
    kv_cache_dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    num_pages: int | None = None,
    memory_utilization: float = 0.9,
    kv_cache_memory_bytes: int | None = None,
    enable_prefix_caching: bool = True,
    num_speculative_tokens: int = 0,
    hub: Hub | None = None,
    progress: Progress | None = None,
) -> LoadPlan:
    """Plan the checkpoint in folder `model`, or of that Hub id; the other keywords are those of `Wishes`.

    `CheckpointError` when it cannot be read at all, `UsageError` for a device that is not there and sizes that
    make no sense, `CapacityError` where `kv_cache_memory_bytes` do not hold one request, `UnsupportedError` for a
    dtype that caches cannot have; all else is in the plan's problems.
    """
    wishes = Wishes(
        kernels=kernels, device=device, dtype=dtype, mla_prefill=mla_prefill,
        activation_quantization=activation_quantization, kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len, max_num_seqs=max_num_seqs, num_pages=num_pages,
        memory_utilization=memory_utilization, kv_cache_memory_bytes=kv_cache_memory_bytes,
        enable_prefix_caching=enable_prefix_caching, num_speculative_tokens=num_speculative_tokens,
    )  # fmt: skip
    platform = detect(device)
    facts = read_facts(model, hub=hub, **({"progress": progress} if progress else {}))
    with paused_gc():
        return plan_facts(facts, wishes, platform)


def plan_facts(facts: Facts, wishes: Wishes, platform: Platform) -> LoadPlan:
    """Plan a checkpoint whose facts are read."""
    problems = list(facts.problems)
    architecture, family = _family(facts.config, problems)
    config = None
    modules: list[ModulePlan] = []
    asked = _Asked(wishes, platform)
    if family is not None:
        module = cast(ConfigModule, importlib.import_module(family.config))
        config = module.read(facts.config, problems)
        rules = _rules(facts, problems)
        if config is not None:
            asked.sizes = config.sizes
            drafting = len(config.layers) if wishes.num_speculative_tokens else None
            planner = _Planner(facts, rules, asked, drafting)
            modules = planner.plan(list(module.inventory(config, facts)))
            problems += planner.problems()
    problems += _side_values(facts)
    findings = PlanFindings(config, modules, facts, wishes)
    attention = _attention(config, modules, wishes, asked, platform, problems)
    mtp = findings.mtp()
    memory = plan_memory(config, modules, platform, wishes, drafting=mtp.drafts > 0)
    problems += findings.problems(mtp, memory, platform)
    return LoadPlan(
        model=facts.model,
        root=facts.root,
        family=family.name if family else None,
        architecture=architecture,
        config=config,
        facts=facts,
        modules=tuple(modules),
        problems=tuple(problems),
        parameters=sum(prod(m.shape) + (m.shape[0] if "bias" in m.tensors else 0) for m in modules),
        bytes=tensor_bytes(facts),
        mtp=mtp,
        vision_present=any(m.spec.section is Section.VISION for m in modules),
        attention=attention,
        memory=memory,
        platform=platform,
        providers=asked.providers(),
        emulates=wishes.activation_quantization == "declared",
    )


def _side_values(facts: Facts) -> list[Problem]:
    """Values of `generation_config.json` that cannot be used, and so are not."""
    _, refused = checkpoint_defaults(facts.generation_config)
    _, end = listed_end_tokens(facts.generation_config)
    return [
        problem(
            "HC208", f"generation_config.json: {error.where} is ignored", found=error.found, accepted=error.accepted,
            hint="correct the file, or give the value on the command line", tensors=(error.where,),
        )
        for error in (*refused, *([end] if end else ()))
    ]  # fmt: skip


def _family(config: Mapping[str, Any], problems: list[Problem]) -> tuple[str | None, Family | None]:
    listed = config.get("architectures")
    names = [name for name in listed if isinstance(name, str)] if isinstance(listed, list) else []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    problems.append(
        problem(
            "HC202", "config.json: architectures", found=", ".join(names) or repr(listed)[:80],
            accepted=", ".join(FAMILIES), hint="only these model families can be planned",
        )
    )  # fmt: skip
    return (names[0] if names else None), None


def _rules(facts: Facts, problems: list[Problem]) -> Rules:
    """Rules from config.json, else from hf_quant_config.json; a disagreement of the two is noted."""
    text = facts.config.get("text_config")
    declared = None
    for part in (facts.config, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            declared = declared or part.get(key)
    if declared is not None and not isinstance(declared, Mapping):
        problems.append(
            problem(
                "HC201", "config.json: quantization_config", found=repr(declared)[:80], accepted="an object",
                hint="compare with what the quantizer wrote",
            )
        )  # fmt: skip
        declared = None
    rules = parse_rules(declared or facts.hf_quant_config, problems)
    if declared and facts.hf_quant_config:
        other = parse_rules(facts.hf_quant_config, [])
        differences = [
            what
            for what, ours, theirs in (
                ("method", rules.name, other.name),
                ("algorithm", rules.default and rules.default[1], other.default and other.default[1]),
                ("layers", rules.layers, other.layers),
                ("exclusions", set(rules.exclude.entries), set(other.exclude.entries)),
            )
            if ours != theirs
        ]
        if differences:
            problems.append(
                problem(
                    "HC206", "config.json and hf_quant_config.json disagree", found=", ".join(differences),
                    accepted="the same quantization in both",
                    hint="config.json is used, and the file decides; correct the other for engines that read it",
                )
            )  # fmt: skip
    return rules


def _attention(
    config: FamilyConfig | None,
    modules: list[ModulePlan],
    wishes: Wishes,
    asked: _Asked,
    platform: Platform,
    problems: list[Problem],
) -> AttentionPlan:
    if config is None:
        return AttentionPlan(None, None, ("the configuration could not be read",))
    indexer = config.indexer
    budget = selection_budget(
        indexer.topk, pooled=indexer.pooled, pool=indexer.pool, always_select_tail=indexer.always_select_tail
    )
    needs = AttentionNeeds(
        platform=platform.name, sparse=True, cache_dtype=wishes.latents, selection_budget=budget,
        speculative=wishes.num_speculative_tokens > 0,
        kernels=_mla_kernels(modules, asked),
    )  # fmt: skip
    choice = select(needs, prefill=wishes.mla_prefill)
    if choice.backend is None:
        problems.append(
            problem(
                "HC502", "attention", found="; ".join(choice.reasons), accepted="a backend that can serve the model",
                hint="let the backend and the prefill path be chosen automatically",
            )
        )  # fmt: skip
    return AttentionPlan(choice.backend, choice.prefill_path, choice.reasons)


def _mla_kernels(modules: list[ModulePlan], asked: _Asked) -> str:
    """The provider of `mla` that reads every `kv_b_proj`; `none` where there is none."""
    schemes = {module.scheme for module in modules if module.name.endswith(".kv_b_proj")}
    found = {asked.select("mla", scheme) for scheme in schemes or {BF16}}
    names = {"none" if isinstance(choice, Refusal) else choice.provider for choice in found}
    return names.pop() if len(names) == 1 else "reference"


class _Asked:
    """Whose kernels are asked for which operation. sizes: the model's, by operation."""

    #: Emulation quantizes between the products of a block, so blocks are put together from products; those are the
    #: reference's, since native ones would round once more what was quantized, and a native router reads no other.
    EMULATED = frozenset({"linear", "mlp", "moe", "router", "lm_head"})

    def __init__(self, wishes: Wishes, platform: Platform) -> None:
        self._usual = kernels_select.providers(wishes.kernels, platform.providers)
        self._emulates = wishes.activation_quantization == "declared"
        self.sizes: Mapping[str, Sizes] = {}

    def select(self, operation: str, scheme: QuantizationScheme = BF16) -> KernelChoice | Refusal:
        """The kernel that runs `operation` on weights of `scheme`."""
        asked = ("reference",) if self._emulates and operation in self.EMULATED else self._usual
        return kernels_select.select(operation, scheme, self.sizes.get(operation, ()), providers=asked)

    def providers(self) -> dict[str, str]:
        """operation -> whose kernels run it where its weights, if any, can be read."""
        choices = [self.select(operation) for operation in ops.OPERATIONS]
        return {choice.operation: choice.provider for choice in choices if not isinstance(choice, Refusal)}


class _Planner:
    """Resolves every module of an inventory and picks its kernel. drafting: the number of the multi-token-prediction
    layer, where it is to run."""

    def __init__(self, facts: Facts, rules: Rules, asked: _Asked, drafting: int | None = None) -> None:
        self.drafting = drafting
        self.facts = facts
        self.rules = rules
        self.resolver = Resolver(facts, rules)
        self.asked = asked
        self._specs: list[ModuleSpec] = []

    def plan(self, specs: list[ModuleSpec]) -> list[ModulePlan]:
        """One `ModulePlan` for every module that could be resolved, in the inventory's order."""
        self._specs = specs
        modules = []
        resolve = self.resolver.resolve
        for spec in specs:
            found = resolve(
                spec.name,
                spec.shape,
                linear=spec.kind in LINEAR_KINDS and (len(spec.shape) == 2 or spec.split is Split.EXPERTS),
                bare=spec.bare,
                bias=spec.bias,
                stacked=spec.split is Split.EXPERTS,
                parts=() if spec.split is Split.WHOLE else _part_names(spec),
            )
            if found is not None:
                modules.append(
                    ModulePlan(
                        spec, found.scheme, found.activation, found.storage, found.tensors, found.decided_by,
                        self._kernel(spec, found.scheme), found.nbytes,
                    )
                )  # fmt: skip
        self.resolver.unclaimed()
        self._unused_entries()
        return modules

    def problems(self) -> list[Problem]:
        """What resolving found."""
        return self.resolver.findings.problems() + self._entries

    def _unused_entries(self) -> None:
        names = dict.fromkeys(spec.name for spec in self._specs)
        for spec in self._specs:
            if spec.split is not Split.WHOLE:
                names.update(dict.fromkeys(_part_names(spec)))
        self._entries = self.rules.check(names)

    def _kernel(self, spec: ModuleSpec, scheme: QuantizationScheme) -> KernelChoice | None:
        operation = OPERATIONS.get(spec.kind)
        if operation is None or not runs(spec, self.drafting):
            return None
        choice = self.asked.select(operation, scheme)
        if not isinstance(choice, Refusal):
            return choice
        self.resolver.findings.add(
            "HC501", spec.name, what=f"no kernel for {operation} of {scheme.name}", found="; ".join(choice.reasons),
            accepted="a provider that can", hint="use --kernels auto or --kernels reference",
        )  # fmt: skip
        return None


def _part_names(spec: ModuleSpec) -> list[str]:
    """Checkpoint names that the parts of a fused or stacked module would have on their own."""
    prefix = spec.name.rpartition(".")[0] + "."
    experts = range(spec.shape[0]) if spec.split is Split.EXPERTS else (None,)
    names = []
    for expert in experts:
        for provided in spec.provides:
            leaf = provided.rpartition(".")[2]
            names.append(f"{prefix}{leaf}" if expert is None else f"{prefix}{expert}.{leaf}")
    return names
