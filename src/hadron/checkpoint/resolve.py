"""module -> scheme: facts first, declarations second, every contradiction named.

Works on checkpoint names, before anything is renamed. A stacked bank is identified by the matrices
it stacks. Findings are grouped: one problem for all modules that have it, so that a fault in 57,600
experts is one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial

from msgspec import Struct

from hadron.checkpoint.facts import Facts, Tensor
from hadron.checkpoint.formats.base import Claim, DecidedBy, Declaration, Rules, Source
from hadron.checkpoint.identify import ROLES, Identity, identify, show
from hadron.problems import Problem, Severity, problem
from hadron.quantization.scheme import NO_ACTIVATION, ActivationScheme, Granularity, QuantizationScheme, Storage

#: suffixes that engines store beside attention for quantized caches; nothing here reads them
CACHE_SCALES = frozenset({"k_scale", "v_scale", "q_scale", "prob_scale", "output_scale", "kv_scale"})
#: tensors that may lie in a file without belonging to the model
IGNORABLE = frozenset({"inv_freq"})

_RESHAPED = "config.json describes another model than the file holds, or the tensor was reshaped"
_INCOMPLETE = "the file is incomplete, or its names differ from those that are known"

_FACTS = DecidedBy(Source.FACTS)
_NONE = DecidedBy(Source.NONE)


class Resolved(Struct, frozen=True, gc=False):
    """How a module is stored and what its inputs are declared to be.

    tensors: role -> tensor name; nbytes: theirs, in the file.
    """

    scheme: QuantizationScheme
    activation: ActivationScheme
    storage: Storage
    tensors: dict[str, str]
    decided_by: DecidedBy
    nbytes: int


class Findings:
    """Problems on the way to being grouped: (code, found, accepted) -> names."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, str, str, str, str, Severity | None], list[str]] = {}

    def add(
        self,
        code: str,
        name: str,
        *,
        what: str,
        found: str,
        accepted: str,
        hint: str,
        severity: Severity | None = None,
    ) -> None:
        """Note `name` under everything that has the same texts."""
        self._groups.setdefault((code, what, found, accepted, hint, severity), []).append(name)

    def problems(self) -> list[Problem]:
        """One problem a group, its names counted in the message."""
        made = []
        for (code, what, found, accepted, hint, severity), names in self._groups.items():
            count = names[0] if len(names) == 1 else f"{len(names)} times, first {names[0]}"
            made.append(
                problem(
                    code, f"{what} ({count})", found=found, accepted=accepted, hint=hint, tensors=tuple(names),
                    severity=severity,
                )
            )  # fmt: skip
        return made


class Resolver:
    """Resolves modules one by one and remembers which tensors they claimed."""

    def __init__(self, facts: Facts, rules: Rules) -> None:
        self.facts = facts
        self.rules = rules
        self.findings = Findings()
        self.claimed: set[str] = set()  # module names, and full names of bare tensors
        self._unreadable = any(shard.data_start == 0 for shard in facts.shards)  # who knows what it holds
        self._left: list[tuple[str, Identity, bool]] = []
        self._identities: dict[object, Identity] = {}
        self._verdicts: dict[object, tuple[ActivationScheme, DecidedBy, tuple[partial[None], ...]]] = {}

    def resolve(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        linear: bool,
        bare: bool,
        bias: bool,
        stacked: bool = False,
        parts: Iterable[str] = (),
    ) -> Resolved | None:
        """The module `name` (a full tensor name when `bare`); None when it cannot be used, with a finding.

        shape: of the unpacked weight, leading expert axis included when `stacked`. linear: whether
        declarations for linear layers reach it. parts: checkpoint names of what it fuses.
        """
        beside = self._bare(name) if bare else self.facts.modules.get(name)
        if beside is None:
            if self._unreadable or not self.facts.unusable.isdisjoint(
                (name, f"{name}.weight", f"{name}.weight_packed")
            ):
                return None  # reported where its file was read
            self.findings.add(
                "HC301", name if bare else name + ".weight", what="missing", found="no such tensor",
                accepted=f"a weight for {list(shape)}" if len(shape) < 3 else "a stored weight",
                hint=_INCOMPLETE,
            )  # fmt: skip
            return None
        self.claimed.add(name)
        agreed = True
        if parts:
            claim, agreed = self.rules.claim_parts(name, parts, linear=linear)
        else:
            claim = self.rules.claim(name, linear=linear)
        if stacked and (odd := [t for t in beside.values() if t.shape and t.shape[0] != shape[0]]):
            self.findings.add(
                "HC303", name, what="a bank of experts has another number of them", found=show(odd[0]),
                accepted=f"{shape[0]} experts along the first axis of every tensor", hint=_RESHAPED,
            )  # fmt: skip
            return None
        identity = self._identify(shape[1:] if stacked else shape, beside, claim, stacked)
        if identity.fault is not None or identity.scheme is None:
            self._refuse(name, identity)
            return None
        join = name if bare else name + "."
        if identity.leftovers:
            self._left.append((join, identity, bare))
        tensors = {role: join + (_bare_suffix(suffix) if bare else suffix) for role, suffix in identity.roles}
        if bias and "bias" not in tensors:
            self.findings.add(
                "HC301", name + ".bias", what="missing", found="no such tensor", accepted="a bias",
                hint=_INCOMPLETE,
            )  # fmt: skip
        if not bias and "bias" in tensors:
            self.findings.add(
                "HC302", name + ".bias", what="a bias that the model does not have", found="a bias",
                accepted="no bias", hint="check `attention_bias` in config.json",
            )  # fmt: skip
        activation, decided_by, notes = self._verdict(claim, identity, linear, "input_scale" in tensors, agreed)
        for note in notes:
            note(name)
        return Resolved(identity.scheme, activation, identity.storage, tensors, decided_by, identity.nbytes)

    def _bare(self, name: str) -> dict[str, Tensor] | None:
        """The tensors of a parameter without a `.weight`; scales of a quantized bank share its name."""
        tensors = self.facts.tensors
        if name not in tensors:
            return None
        beside = {"weight": tensors[name]}
        for suffix in ROLES:
            if suffix.startswith("weight_") and (stored := name + _bare_suffix(suffix)) in tensors:
                beside[suffix] = tensors[stored]
                self.claimed.add(stored)
        return beside

    def _identify(
        self, shape: tuple[int, ...], beside: Mapping[str, Tensor], claim: Claim | None, stacked: bool
    ) -> Identity:
        hint = claim.declaration.scheme if claim else None
        key = (shape, hint, stacked, *[(suffix, t.dtype, t.shape) for suffix, t in beside.items()])
        found = self._identities.get(key)
        if found is None:
            if stacked:
                # A scalar belongs to all experts; everything else has one entry for each.
                beside = {suffix: Tensor(t.dtype, t.shape[1:], t.data_offsets) for suffix, t in beside.items()}
            found = self._identities[key] = identify(shape, beside, hint)
        return found

    def _refuse(self, name: str, identity: Identity) -> None:
        fault = identity.fault
        assert fault is not None
        self.findings.add(
            fault.code, name, what="a weight cannot be used", found=fault.found, accepted=fault.accepted,
            hint=_RESHAPED if fault.code == "HC303"
            else "if the quantizer meant this, its format is not known here; otherwise the file is damaged",
        )  # fmt: skip

    def _leftovers(self, join: str, identity: Identity, bare: bool) -> None:
        for suffix in identity.leftovers:
            full = join + (_bare_suffix(suffix) if bare else suffix)
            if full in self.claimed:  # a parameter of its own, such as a router's correction bias
                continue
            if suffix in CACHE_SCALES:
                self.findings.add(
                    "HC302", full, what="scales for quantized caches are not used", found=suffix,
                    accepted="BF16, F32 or FP8 caches, FP8 with a scale that each row is given when it is written",
                    hint="nothing to do", severity=Severity.NOTE,
                )  # fmt: skip
            elif "scale" in suffix or "zero_point" in suffix:
                scheme = identity.scheme.name if identity.scheme else "?"
                self.findings.add(
                    "HC305", full, what="a leftover scale", found=f"{suffix} beside a {scheme} weight",
                    accepted="scales that the weight's dtype needs",
                    hint="the weight was replaced after quantizing, or belongs to another format",
                )  # fmt: skip
            else:
                self.findings.add(
                    "HC302", full, what="a leftover tensor", found=suffix, accepted=", ".join(sorted(ROLES)),
                    hint="the file holds something that this model does not",
                )  # fmt: skip

    def _verdict(
        self, claim: Claim | None, identity: Identity, linear: bool, has_input_scale: bool, agreed: bool
    ) -> tuple[ActivationScheme, DecidedBy, tuple[partial[None], ...]]:
        key = (id(claim), identity.scheme, linear, has_input_scale, agreed)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._compare(claim, identity, linear, has_input_scale, agreed)
        return verdict

    def _compare(
        self, claim: Claim | None, identity: Identity, linear: bool, has_input_scale: bool, agreed: bool
    ) -> tuple[ActivationScheme, DecidedBy, tuple[partial[None], ...]]:
        scheme = identity.scheme
        assert scheme is not None
        notes: list[partial[None]] = []
        if not agreed:
            notes.append(
                partial(
                    self.findings.add, "HC401", what="parts of a fused weight are declared differently",
                    found=scheme.name, accepted="one declaration for all of its parts",
                    hint="the file decides; other engines may refuse or take the first",
                )
            )  # fmt: skip
        if claim is None or not claim.declaration.understood:
            return NO_ACTIVATION, _FACTS if scheme.quantized else _NONE, tuple(notes)
        declared = claim.declaration
        if declared.scheme == scheme or (declared.scheme is None and not scheme.quantized):
            activation = _activation(declared, has_input_scale)
            if activation.element and not activation.dynamic and not has_input_scale:
                notes.append(self._no_input_scale(activation))
            return activation, claim.decided_by, tuple(notes)
        if not linear:
            return NO_ACTIVATION, _FACTS, tuple(notes)
        notes.append(self._contradiction(claim, scheme))
        same_family = declared.scheme is not None and declared.scheme.element == scheme.element
        activation = _activation(declared, has_input_scale) if same_family else NO_ACTIVATION
        return activation, _FACTS, tuple(notes)

    def _no_input_scale(self, activation: ActivationScheme) -> partial[None]:
        return partial(
            self.findings.add, "HC407", what="declared activation quantization has no stored scale",
            found=f"{activation.name} without input_scale", accepted="an input_scale beside the weight",
            hint="weights-only runs are not affected; `--activation-quantization declared` is refused",
        )  # fmt: skip

    def _contradiction(self, claim: Claim, scheme: QuantizationScheme) -> partial[None]:
        declared = claim.declaration.scheme
        entry = f"{claim.decided_by.source} {claim.decided_by.entry}" if claim.decided_by.entry else "the configuration"
        claimed = declared.name if declared else "unquantized"
        if not scheme.quantized and claim.decided_by.source in (Source.GLOBAL, Source.TYPE):
            return partial(
                self.findings.add, "HC406", what=f"{scheme.name} although the configuration does not exclude it",
                found=scheme.name, accepted=f"{claimed} ({entry}), or an exclusion",
                hint="nothing to do: the file decides",
            )  # fmt: skip
        extent = (Granularity.BLOCK, Granularity.GROUP)
        sizes = declared is not None and declared.element == scheme.element
        sizes = sizes and declared.granularity in extent and scheme.granularity in extent  # type: ignore[union-attr]
        return partial(
            self.findings.add, "HC402" if sizes else "HC401", what="the configuration and the file disagree",
            found=f"{scheme.name} in the file", accepted=f"{claimed} ({entry})",
            hint="the file decides; correct the configuration for engines that believe it",
        )  # fmt: skip

    def unclaimed(self) -> None:
        """Note every tensor that no module claimed. Call once, after all modules are resolved."""
        for join, identity, bare in self._left:
            self._leftovers(join, identity, bare)
        for module, suffixes in self.facts.modules.items():
            if module in self.claimed:
                continue
            for suffix, tensor in suffixes.items():
                full = f"{module}.{suffix}" if module else suffix
                if full in self.claimed or suffix in IGNORABLE:
                    continue
                if suffix in CACHE_SCALES:
                    self._leftovers(f"{module}.", Identity(None, Storage(), (), (suffix,)), False)
                elif "scale" in suffix or "zero_point" in suffix:
                    self.findings.add(
                        "HC305", full, what="a scale without its weight", found=show(tensor),
                        accepted="a weight beside every scale", hint="the file is incomplete or was edited",
                    )  # fmt: skip
                else:
                    self.findings.add(
                        "HC302", full, what="belongs to nothing in the model", found=f"a tensor {suffix}",
                        accepted="tensors of the configuration's layers, experts and towers",
                        hint="compare config.json with the file: layers, experts, vision and MTP must agree",
                    )  # fmt: skip


def _bare_suffix(suffix: str) -> str:
    """`weight` -> ``, `weight_scale_inv` -> `_scale_inv`."""
    return suffix.removeprefix("weight")


def _activation(declared: Declaration, has_input_scale: bool) -> ActivationScheme:
    """The declared activation scheme; NVFP4 without a stored global scale takes it from the input."""
    activation = declared.activation
    if activation.scale == "e4m3" and not has_input_scale and not activation.dynamic:
        return ActivationScheme(
            activation.element, activation.granularity, activation.columns, "e4m3", True,
            activation.mx_mode, activation.reciprocal,
        )  # fmt: skip
    return activation
