"""The report of plans built by hand: what it counts, how it reads, and that it fits a screen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from hadron.checkpoint.facts import Facts, Shard, Tensor
from hadron.checkpoint.formats.base import DecidedBy, Source
from hadron.errors import UsageError
from hadron.kernels.cpu import native
from hadron.kernels.select import KernelChoice
from hadron.models.inventory import ModuleKind, ModuleSpec, Section
from hadron.platforms.base import Platform
from hadron.preflight import json_report, report
from hadron.preflight.plan import AttentionPlan, LoadPlan, MemoryPlan, ModulePlan, MtpPlan
from hadron.problems import Problem, Severity, problem
from hadron.quantization.scheme import (
    BF16,
    F32,
    MXFP4,
    NO_ACTIVATION,
    PLAIN_STORAGE,
    ActivationScheme,
    Element,
    Granularity,
    Packing,
    QuantizationScheme,
    Storage,
    fp8_block,
    int4_group,
)

MXFP4_DYNAMIC = ActivationScheme(Element.E2M1, Granularity.GROUP, 32, "e8m0", dynamic=True)
FP8_GROUP = ActivationScheme(Element.E4M3, Granularity.GROUP, 128, "float", dynamic=True)
LINEAR = KernelChoice("linear", "reference", "hadron.kernels.reference.linear:linear")
GLOBAL, FACTS = DecidedBy(Source.GLOBAL, "global_quant_config"), DecidedBy(Source.FACTS)
PLATFORM = Platform("cpu", "cpu", "Fictional CPU", 8, 64_000_000_000, ("avx2",), ("reference",), 1)
SIZES = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I32": 4}


class Plans:
    """Collects modules with their tensors and makes a plan of them."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.modules: list[ModulePlan] = []
        self.end = 0

    def add(
        self,
        name: str,
        kind: ModuleKind,
        shape: tuple[int, ...],
        scheme: QuantizationScheme,
        stored: dict[str, tuple[str, str, tuple[int, ...]]],
        *,
        activation: ActivationScheme = NO_ACTIVATION,
        section: Section = Section.TEXT,
        decided: DecidedBy = FACTS,
        kernel: KernelChoice | None = LINEAR,
        storage: Storage = PLAIN_STORAGE,
    ) -> None:
        """A module with the tensors role -> (suffix, dtype, shape)."""
        roles, nbytes = {}, 0
        for role, (suffix, dtype, size) in stored.items():
            length = SIZES[dtype]
            for dim in size:
                length *= dim
            self.tensors[name + suffix] = Tensor(dtype, size, (self.end, self.end + length), 0)
            self.end += length
            nbytes += length
            roles[role] = name + suffix
        spec = ModuleSpec(name, kind, section, shape, (name,))
        self.modules.append(ModulePlan(spec, scheme, activation, storage, roles, decided, kernel, nbytes))

    def plan(self, *problems: Problem, **changes: object) -> LoadPlan:
        """The plan, with any of its fields replaced."""
        shard = Shard("model.safetensors", None, self.end, 0, 0)
        facts = Facts("tiny", None, {}, None, {}, (shard,), self.tensors, {})
        fields: dict[str, object] = {
            "model": "tiny", "root": None, "family": "glm_moe_dsa", "architecture": "GlmMoeDsaForCausalLM",
            "config": None, "facts": facts, "modules": tuple(self.modules), "problems": problems,
            "parameters": sum(report.parameters(m) for m in self.modules), "bytes": self.end,
            "mtp": MtpPlan(False, None, False, "the configuration declares none"), "vision_present": False,
            "attention": AttentionPlan("reference", "mqa", ("`cpu` is not built",)),
            "memory": MemoryPlan(self.end, 0, 1152, 4_000_000, 4096, 64, 16, 9, 64_000_000_000, "bfloat16"), "platform": PLATFORM,
            "providers": {}, "emulates": False,
        }  # fmt: skip
        return LoadPlan(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture
def plans() -> Plans:
    """Two experts in MXFP4, a BF16 projection with a bias, a float32 parameter."""
    made = Plans()
    for expert in range(2):
        made.add(
            f"model.layers.0.mlp.experts.{expert}.up_proj", ModuleKind.EXPERT, (64, 128), MXFP4,
            {"weight": (".weight", "U8", (64, 64)), "scale": (".weight_scale", "U8", (64, 4))},
            activation=MXFP4_DYNAMIC, decided=GLOBAL,
        )  # fmt: skip
    made.add(
        "model.layers.0.self_attn.o_proj", ModuleKind.ATTENTION, (128, 32), BF16,
        {"weight": (".weight", "BF16", (128, 32)), "bias": (".bias", "BF16", (128,))},
    )  # fmt: skip
    made.add("model.layers.0.self_attn.A_log", ModuleKind.PARAMETER, (8,), F32, {"weight": ("", "F32", (8,))})
    return made


def text(plan: LoadPlan) -> list[str]:
    return [line.text for line in report.summary(plan)]


def row(lines: list[str], start: str) -> list[str]:
    (line,) = (line for line in lines if line.startswith(start))
    return line.split()


def test_counts_modules_parameters_and_bytes_by_kind(plans: Plans) -> None:
    lines = text(plans.plan())
    # 2 x 64 x 128 values; 2 x 64 x (64 + 4) bytes
    assert row(lines, "expert") == [
        "expert", "mxfp4", "2", "16.4K", "8.70", "kB", "reference", "global"
    ]  # fmt: skip
    # 128 x 32 + 128 values of two bytes
    assert row(lines, "attention  bf16") == [
        "attention", "bf16", "1", "4.22K", "8.45", "kB", "reference", "facts"
    ]  # fmt: skip
    assert row(lines, "mxfp4") == ["mxfp4", "mxfp4_dynamic", "2", "16.4K", "8.70", "kB"]
    assert lines[1] == "glm_moe_dsa (GlmMoeDsaForCausalLM), 20.6K parameters, 17.2 kB in 1 shard"
    assert lines[-1] == "OK: this checkpoint can be loaded (no problems)"


def test_one_kind_with_two_schemes_has_two_rows(plans: Plans) -> None:
    plans.add(
        "model.layers.1.mlp.experts.0.up_proj", ModuleKind.EXPERT, (64, 128), fp8_block(128, 128),
        {"weight": (".weight", "F8_E4M3", (64, 128)), "scale": (".weight_scale", "F32", (1, 1))},
        activation=FP8_GROUP,
    )  # fmt: skip
    kinds = [line.split()[:3] for line in text(plans.plan()) if line.startswith("expert")]
    assert kinds == [["expert", "mxfp4", "2"], ["expert", "fp8_e4m3_block_128x128", "1"]]


def test_the_machine_stands_on_a_line_of_its_own(plans: Plans) -> None:
    lines = text(plans.plan())
    memory = "memory     weights 17.2 kB, cache 1.15 kB a token (latents bfloat16), state 4.00 MB a sequence"
    assert memory in lines
    machine = [line for line in lines if "Fictional" in line or "64.0 GB" in line or "4,096" in line]
    level = native.level_name() if native.levels() else "no native kernels"
    assert machine[0].startswith(f"machine    cpu, Fictional CPU, 8 cores, {level}, 64.0 GB memory, ")
    assert "room for 4,096 tokens a request: 64 pages, 16 states, 9 snapshots" in " ".join(" ".join(lines).split())
    two = replace(plans.plan(), platform=msgspec.structs.replace(PLATFORM, nodes=2))
    assert any(f"Fictional CPU, 8 cores on 2 NUMA nodes, {level}" in line for line in text(two))


def test_converted_weights_are_told(plans: Plans) -> None:
    plans.add(
        "model.layers.1.mlp.up_proj", ModuleKind.MLP, (64, 128), int4_group(32, False),
        {"weight": (".weight", "I32", (128, 8)), "scale": (".weight_scale", "F32", (64, 4))},
        storage=Storage(Packing.INT4_COLUMNS),
    )  # fmt: skip
    plan = plans.plan(memory=MemoryPlan(22_000, 5_120, 1152, 0, 64, 1, 16, 0, 10**9, "bfloat16"))
    assert any("weights 22.0 kB (5.12 kB of it converted at load)" in line for line in text(plan))
    (kernel,) = (
        line.text for line in report.details(plan, report.select(plan, "*.1.mlp.up_proj")) if "kernel" in line.text
    )
    assert kernel == "  kernel        reference.linear, converted once at load"


def test_mtp_and_vision_are_told_apart_from_the_text_tower(plans: Plans) -> None:
    plans.add(
        "model.visual.blocks.0.attn.qkv", ModuleKind.VISION, (96, 32), BF16,
        {"weight": (".weight", "BF16", (96, 32))}, section=Section.VISION, kernel=None,
    )  # fmt: skip
    plans.add(
        "model.layers.1.eh_proj", ModuleKind.MTP_PROJECTION, (128, 256), BF16,
        {"weight": (".weight", "BF16", (128, 256))}, section=Section.MTP, kernel=None,
    )  # fmt: skip
    plan = plans.plan(mtp=MtpPlan(True, 1, True, "all of its tensors are here"), vision_present=True)
    lines = text(plan)
    mtp = "layer 1, usable: all of its tensors are here (1 module, 32.8K parameters, 65.5 kB: bf16)"
    assert f"mtp        {mtp}" in lines
    assert "vision     present, not run (1 module, 3.07K parameters, 6.14 kB: bf16)" in lines
    assert not any(line.startswith(("mtp_projection", "vision  bf16")) for line in lines)


def test_absent_parts_are_told_with_the_reason(plans: Plans) -> None:
    lines = text(plans.plan())
    assert "mtp        not in the file: the configuration declares none" in lines
    assert "vision     not in the file" in lines
    assert "attention  reference, prefill path mqa (`cpu` is not built)" in lines


def test_no_backend_and_no_family(plans: Plans) -> None:
    plan = plans.plan(attention=AttentionPlan(None, None, ("first", "second")), family=None, architecture="Odd")
    lines = text(plan)
    assert "attention  none (first; second)" in lines
    assert lines[1].startswith("unknown family (Odd), ")


def test_problems_are_grouped_and_ordered_by_severity(plans: Plans) -> None:
    missing = [
        problem(
            "HC301", f"model.layers.{i}.a.weight", found="nothing", accepted="BF16 [4, 4]",
            tensors=(f"model.layers.{i}.a.weight",), hint="fetch the checkpoint again",
        )
        for i in range(7)
    ]  # fmt: skip
    note = problem("HC204", "key x", found="x", accepted="known keys", hint="ignore it", tensors=("x",))
    plan = plans.plan(note, *missing)
    lines = text(plan)
    start = lines.index("error      HC301 a tensor is missing (7 times)")
    assert lines[start + 1 : start + 4] == [
        "           model.layers.0.a.weight: found nothing; accepted BF16 [4, 4]",
        "           also: model.layers.1.a.weight, model.layers.2.a.weight and 4 more",
        "           try: fetch the checkpoint again",
    ]
    assert lines[start + 4] == "note       HC204 the quantization configuration has a key that is not known"
    assert lines[-1] == "NOT OK: this checkpoint cannot be loaded (7 errors, 1 note)"
    roles = {line.text: line.role for line in report.summary(plan)}
    assert roles[lines[start]] is report.Role.ERROR
    assert roles[lines[start + 4]] is report.Role.NOTE
    assert roles[lines[-1]] is report.Role.ERROR


def test_a_long_name_is_never_cut(plans: Plans) -> None:
    long = "model." + "x" * 150 + ".weight"
    found = problem("HC302", "left over", found="it", accepted="nothing", tensors=(long, "b"), hint="delete it")
    assert any(long in line for line in text(plans.plan(found)))


def full_size() -> Plans:
    """As many and as different modules as the largest checkpoints have."""
    made, made_up = Plans(), {"weight": (".weight", "U8", (8, 8)), "scale": (".weight_scale", "U8", (8, 1))}
    for i in range(60_000):
        made.add(
            f"model.layers.{i // 770}.mlp.experts.{i}.up_proj", ModuleKind.EXPERT, (8, 16), MXFP4, made_up,
            activation=MXFP4_DYNAMIC, decided=GLOBAL,
        )  # fmt: skip
    # what a mixed GLM-5.3-Flash release holds beside its experts
    fp8, plain, exact = (fp8_block(128, 128), FP8_GROUP), (BF16, NO_ACTIVATION), (F32, NO_ACTIVATION)
    for kind, scheme, activation in (
        *((kind, *fp8) for kind in (ModuleKind.ATTENTION, ModuleKind.MLP, ModuleKind.SHARED_EXPERT)),
        *((kind, *plain) for kind in ModuleKind if kind not in (ModuleKind.EXPERT, ModuleKind.MTP_PROJECTION)),
        *((kind, *exact) for kind in (ModuleKind.HYPER_CONNECTION, ModuleKind.PARAMETER)),
    ):
        section = Section.VISION if kind is ModuleKind.VISION else Section.TEXT
        made.add(f"model.{kind}.{scheme.name}", kind, (8, 8), scheme, made_up, activation=activation, section=section)
    return made


def test_one_screen_for_any_size() -> None:
    problems = [
        Problem(code, severity, "word " * 60, tuple(f"model.layers.{i}.a" for i in range(900)), "hint " * 40)
        for code, severity in (("HC503", Severity.WARNING), ("HC403", Severity.NOTE))
    ]
    lines = text(full_size().plan(*problems, vision_present=True))
    assert len(lines) <= 46
    assert max(map(len, lines)) <= report.WIDTH


def test_json_holds_the_documented_keys_and_values(plans: Plans) -> None:
    found = problem("HC204", "key x", found="x", accepted="known keys", hint="ignore it", tensors=("x",))
    value = json.loads(json_report.encode(json_report.plan_value(plans.plan(found))))
    assert list(value) == [
        "schema_version", "model", "family", "architecture", "ok", "parameters", "bytes", "modules", "problems",
        "mtp", "vision", "attention", "memory",
    ]  # fmt: skip
    name = "model.layers.0.mlp.experts.0.up_proj"
    assert value["modules"][0] == {
        "name": name, "kind": "expert", "shape": [64, 128], "scheme": "mxfp4", "activation": "mxfp4_dynamic",
        "tensors": {"weight": f"{name}.weight", "scale": f"{name}.weight_scale"},
        "decided_by": {"source": "global", "entry": "global_quant_config"}, "kernel": "reference.linear",
    }  # fmt: skip
    assert value["problems"] == [
        {"code": "HC204", "severity": "note", "message": "key x: found x; accepted known keys", "tensors": ["x"],
         "hint": "ignore it"}
    ]  # fmt: skip
    assert (value["schema_version"], value["ok"], value["bytes"]) == (1, True, 17184)
    assert value["mtp"] == {
        "present": False, "layer": None, "usable": False, "reason": "the configuration declares none",
        "drafts": 0,
    }  # fmt: skip
    assert value["vision"] == {"present": False}
    assert value["attention"] == {"backend": "reference", "prefill_path": "mqa", "reasons": ["`cpu` is not built"]}
    assert value["memory"] == {
        "weights": 17184, "cache_per_token": 1152, "state_per_sequence": 4000000, "max_context": 4096,
        "pages": 64, "states": 16, "snapshots": 9, "cache_dtype": "bfloat16",
    }  # fmt: skip


def test_json_of_some_modules_keeps_the_totals(plans: Plans) -> None:
    plan = plans.plan()
    value = json_report.plan_value(plan, report.select(plan, "*experts.1*"))
    assert [module["name"] for module in value["modules"]] == ["model.layers.0.mlp.experts.1.up_proj"]
    assert value["parameters"] == plan.parameters


def test_json_of_an_error_has_its_four_parts() -> None:
    error = UsageError("cannot", where="here", found="this", accepted="that", hint="try")
    assert json.loads(json_report.encode(json_report.error_value("m", error))) == {
        "schema_version": 1, "model": "m", "ok": False,
        "error": {"what": "cannot", "where": "here", "found": "this", "accepted": "that", "hint": "try"},
    }  # fmt: skip


def test_a_path_that_is_not_unicode_still_makes_json(plans: Plans) -> None:
    value = json.loads(json_report.encode(json_report.plan_value(plans.plan(model="a\udcff"))))
    assert value["model"] == "a?"


def test_a_large_plan_is_reported_whole() -> None:
    plan = full_size().plan()
    assert len(json_report.encode(json_report.plan_value(plan))) > 10_000_000
    assert text(plan)


def test_details_name_every_tensor_with_its_place(plans: Plans) -> None:
    plan = plans.plan()
    assert [line.text for line in report.details(plan, report.select(plan, "*experts.1.up_proj"))] == [
        "model.layers.0.mlp.experts.1.up_proj",
        "  module        expert 64x128",
        "  scheme        mxfp4, activation mxfp4_dynamic",
        "  decided by    global, entry global_quant_config",
        "  kernel        reference.linear",
        "  weight        model.layers.0.mlp.experts.1.up_proj.weight  U8 64x64, model.safetensors",
        "  scale         model.layers.0.mlp.experts.1.up_proj.weight_scale  U8 64x4, model.safetensors",
    ]


@pytest.mark.parametrize(
    ("pattern", "count"),
    [("*", 4), ("model.layers.0.self_attn.A_log", 1), ("*experts.?.up_proj", 2), ("*EXPERTS*", 0), ("experts", 0)],
)
def test_patterns_match_whole_checkpoint_names(plans: Plans, pattern: str, count: int) -> None:
    assert len(report.select(plans.plan(), pattern)) == count


@pytest.mark.parametrize(
    ("value", "parameters", "size"),
    [
        (0, "0", "0 B"),
        (999, "999", "999 B"),
        (1000, "1.00K", "1.00 kB"),
        (99_949, "99.9K", "99.9 kB"),
        (99_950, "100K", "100 kB"),
        (999_499, "999K", "999 kB"),
        (999_500, "1.00M", "1.00 MB"),
        (753_330_000_000, "753B", "753 GB"),
        (2_500_000_000_000_000, "2500T", "2500 TB"),
    ],
)
def test_three_digits_in_decimal_units(value: int, parameters: str, size: str) -> None:
    assert (report.count_text(value), report.bytes_text(value)) == (parameters, size)


def test_report_imports_no_terminal_library() -> None:
    for module in (report, json_report):
        source = Path(str(module.__file__)).read_text()
        assert "rich" not in source.replace("enriched", "")
        assert "import click" not in source
