"""Problems that only the whole plan shows: clashes, unequal pairs, MTP, memory, conversions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hadron.models.inventory import ModuleKind, Section, Split
from hadron.preflight.plan import MemoryPlan, ModulePlan, MtpPlan, runs
from hadron.problems import Problem, problem

if TYPE_CHECKING:
    from hadron.checkpoint.facts import Facts
    from hadron.models.registry import FamilyConfig
    from hadron.platforms.base import Platform
    from hadron.preflight.wishes import Wishes

#: leaves that engines like to fuse into one product
_PAIRS = (("gate_proj", "up_proj"), ("q_a_proj", "kv_a_proj_with_mqa"), ("wk", "weights_proj"), ("q_proj", "k_proj"))
_FUSABLE = frozenset(leaf for pair in _PAIRS for leaf in pair)
_PLAIN_KINDS = frozenset(
    {ModuleKind.EMBEDDING, ModuleKind.NORM, ModuleKind.CONV, ModuleKind.HYPER_CONNECTION, ModuleKind.PARAMETER}
)


class PlanFindings:
    """Looks at the planned modules together. config is None where it could not be read."""

    def __init__(
        self, config: FamilyConfig | None, modules: Sequence[ModulePlan], facts: Facts, wishes: Wishes
    ) -> None:
        self.config = config
        self.drafts = wishes.num_speculative_tokens
        self.emulates = wishes.activation_quantization == "declared"
        self.modules = modules
        self.facts = facts

    def problems(self, mtp: MtpPlan, memory: MemoryPlan, platform: Platform) -> list[Problem]:
        """Everything found."""
        found = [*self._stored_twice(), *self._unequal_pairs(), *self._kinds(), *self._conversions(memory)]
        if self.config is not None:
            found += [*self._mtp_problem(mtp), *self._vision()]
        if self.emulates:
            found += self._missing_scales(mtp)
        if memory.weights > platform.memory:
            found.append(
                problem(
                    "HC503", "the weights are larger than this machine's memory",
                    found=f"{memory.weights / 1e9:.1f} GB of weights",
                    accepted=f"up to {platform.memory / 1e9:.1f} GB on {platform.description}",
                    hint="it still runs, reading weights from the disk again and again; expect it to be slow",
                )
            )  # fmt: skip
        return found

    def mtp(self) -> MtpPlan:
        """Whether the multi-token-prediction layer is there and could draft."""
        if self.config is None:
            return MtpPlan(False, None, False, "the configuration could not be read")
        layer = len(self.config.layers)
        names = [m.name for m in self.modules if m.spec.section is Section.MTP]
        declared = self.config.mtp_layers > 0
        if not names:
            reason = f"config.json declares one, the file has no layer {layer}" if declared else "the model has none"
            return MtpPlan(False, layer if declared else None, False, reason)
        if not any(name.endswith("self_attn.indexer.wk") for name in names):
            return MtpPlan(True, layer, False, "it has no indexer tensors, and its attention selects by index_topk")
        if not self.drafts:
            return MtpPlan(True, layer, True, "complete; not loaded unless asked for (--num-speculative-tokens)")
        return MtpPlan(True, layer, True, f"complete; drafts {self.drafts} a step", self.drafts)

    def _mtp_problem(self, mtp: MtpPlan) -> list[Problem]:
        assert self.config is not None
        if mtp.usable:
            return []
        if self.drafts:
            return [
                problem(
                    "HC507", "the multi-token-prediction layer cannot draft", found=mtp.reason,
                    accepted=f"a complete layer {len(self.config.layers)} with its own indexer",
                    hint="leave --num-speculative-tokens (speculative_config=) out, or use a release with the layer",
                )
            ]  # fmt: skip
        if not mtp.present and not self.config.mtp_layers:
            return []
        return [
            problem(
                "HC504", "the multi-token-prediction layer cannot draft", found=mtp.reason,
                accepted=f"a complete layer {len(self.config.layers)} with its own indexer",
                hint="generation without speculation is not affected",
            )
        ]  # fmt: skip

    def _missing_scales(self, mtp: MtpPlan) -> list[Problem]:
        """A run without a static scale would emulate nothing."""
        missing = {
            m.name: m.activation.name
            for m in self.modules
            if runs(m.spec, mtp.layer if mtp.drafts else None)
            and m.activation.element is not None
            and not m.activation.dynamic
            and "input_scale" not in m.tensors
        }
        if not missing:
            return []
        name, scheme = next(iter(missing.items()))
        more = f" and {len(missing) - 1} more modules" if len(missing) > 1 else ""
        return [
            problem(
                "HC508", f"the activation quantization of {name}{more} cannot be emulated",
                found=f"{scheme} without a stored input_scale",
                accepted="an input_scale beside every weight whose activation is static",
                hint="use --activation-quantization none (activation_quantization=)", tensors=tuple(missing),
            )
        ]  # fmt: skip

    def _vision(self) -> list[Problem]:
        declared = getattr(self.config, "vision", None) is not None
        if not declared or any(m.spec.section is Section.VISION for m in self.modules):
            return []
        return [
            problem(
                "HC506", "the vision tower is absent", found="a vision_config and no model.visual tensors",
                accepted="both, or neither", hint="text works; images will be refused",
            )
        ]  # fmt: skip

    def _stored_twice(self) -> list[Problem]:
        sources: dict[str, list[str]] = defaultdict(list)
        for module in self.modules:
            for provided in module.spec.provides:
                if module.spec.split is not Split.EXPERTS:
                    sources[provided].append(module.name)
                else:
                    for expert in range(module.shape[0]):
                        sources[provided.replace("{e}", str(expert))].append(module.name)
        twice = {name: tuple(dict.fromkeys(names)) for name, names in sources.items() if len(names) > 1}
        if not twice:
            return []
        name, names = next(iter(twice.items()))
        more = f" and {len(twice) - 1} more" if len(twice) > 1 else ""
        return [
            problem(
                "HC306", f"{name}{more} is stored more than once", found=" and ".join(names), accepted="one of them",
                hint="remove one of the two copies from the checkpoint",
                tensors=tuple(dict.fromkeys(n for listed in twice.values() for n in listed)),
            )
        ]  # fmt: skip

    def _unequal_pairs(self) -> list[Problem]:
        schemes: dict[str, tuple[str, str]] = {}
        for module in self.modules:
            head, _, leaf = module.name.rpartition(".")
            if leaf in _FUSABLE and module.spec.section is not Section.VISION:
                schemes[module.name] = (head, module.scheme.name)
        groups: dict[str, list[str]] = defaultdict(list)
        for first, second in _PAIRS:
            for name, (head, scheme) in schemes.items():
                if name.endswith("." + first) and (other := schemes.get(f"{head}.{second}")) and other[1] != scheme:
                    groups[f"{first} {scheme}, {second} {other[1]}"].append(head)
        return [
            problem(
                "HC403", f"{len(heads)} pairs differ, first in {heads[0]}", found=found,
                accepted="any schemes: every part is multiplied on its own",
                hint="nothing to do; engines that fuse these two cannot load this", tensors=tuple(heads),
            )
            for found, heads in groups.items()
        ]  # fmt: skip

    def _kinds(self) -> list[Problem]:
        odd: dict[tuple[str, str], list[str]] = defaultdict(list)
        narrow = []
        for module in self.modules:
            if module.kind in _PLAIN_KINDS and module.scheme.quantized:
                odd[module.kind, module.scheme.name].append(module.name)
            elif module.spec.keep_float32 and module.scheme.bits < 32:
                narrow.append(module)
        found = [
            problem(
                "HC405", f"{len(names)} times, first {names[0]}", found=f"{scheme} for {kind}",
                accepted="f32, f16 or bf16", hint="these parameters cannot be quantized here", tensors=tuple(names),
            )
            for (kind, scheme), names in odd.items()
        ]  # fmt: skip
        if narrow:
            found.append(
                problem(
                    "HC307", f"{len(narrow)} parameters are stored with less than float32, first {narrow[0].name}",
                    found=", ".join(sorted({m.scheme.name for m in narrow})), accepted="f32",
                    hint="the original release stores these in float32, and rounding them ruins the model: "
                    "convert again from the original", tensors=tuple(m.name for m in narrow),
                )
            )  # fmt: skip
        return found

    def _conversions(self, memory: MemoryPlan) -> list[Problem]:
        layer = len(self.config.layers) if self.config is not None and self.drafts else None
        names = tuple(m.name for m in self.modules if m.storage.converts and runs(m.spec, layer))
        if not names:
            return []
        return [
            problem(
                "HC505", f"{len(names)} weights are rewritten row by row when they are loaded",
                found="transposed or interleaved 4-bit words", accepted="any layout",
                hint=f"it costs {memory.converted / 1e6:.1f} MB of memory and a moment at load", tensors=names,
            )
        ]  # fmt: skip
