"""Executing plans: fused and stacked storage, what nobody asked for, and refusals before data is read."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hadron import LLM, Selections
from hadron.checkpoint.facts import read_facts
from hadron.checkpoint.formats.base import DecidedBy, Source
from hadron.checkpoint.load import MappedCheckpoint, Progress
from hadron.engine.build import build_model, load_weights
from hadron.engine.config import EngineConfig
from hadron.engine.weights import PlannedWeights
from hadron.errors import ChangedError, CheckpointError, PlanError, UsageError
from hadron.kernels.provider import Provider
from hadron.models.inventory import ModuleKind, ModuleSpec, Section, Split
from hadron.platforms import numa
from hadron.preflight.build import make_plan
from hadron.preflight.plan import Binding, ModulePlan
from hadron.quantization import scheme as s
from hadron.quantization.scheme import NO_ACTIVATION, PLAIN_STORAGE, QuantizationScheme, Storage
from tests.conftest import DATA, checkpoint_names
from tests.kernels import formats as f
from tests.platforms.test_numa import needs_policy
from tests.tiny.draft import Draft

CPU = torch.device("cpu")
NAMES = {
    "float32": "F32",
    "bfloat16": "BF16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "int32": "I32",
    "int64": "I64",
}
ROLES = {"weight": "", "scale": "_scale", "global_scale": "_scale_2", "input_scale": "_input_scale", "shape": "_shape"}


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of those tensors."""
    draft = Draft({}, {n: (NAMES[str(t.dtype).split(".")[1]], tuple(t.shape)) for n, t in tensors.items()})
    draft.values = {n: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
    return draft.write(folder)


def planned(
    folder: Path,
    spec: ModuleSpec,
    scheme: QuantizationScheme,
    tensors: dict[str, torch.Tensor],
    storage: Storage = PLAIN_STORAGE,
    **options: Any,
) -> PlannedWeights:
    """Weights of one module (role -> tensor), planned by hand and written to `folder`."""
    named = {role: spec.name + ROLES.get(role, "." + role) for role in tensors}
    write(folder, {named[role]: tensor for role, tensor in tensors.items()})
    activation = options.pop("activation", NO_ACTIVATION)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    module = ModulePlan(spec, scheme, activation, storage, named, DecidedBy(Source.FACTS), None, nbytes)
    experts = range(spec.shape[0]) if spec.split is Split.EXPERTS else (None,)
    bindings = {
        name.replace("{e}", str(e)): Binding(module, e, part, len(spec.provides))
        for e in experts
        for part, name in enumerate(spec.provides)
    }
    mapped = MappedCheckpoint(read_facts(folder), named.values())
    return PlannedWeights(bindings, mapped, device=CPU, declared=options.pop("declared", False), kernels=Provider())


def fused(shape: tuple[int, ...], split: Split, bias: bool = False) -> ModuleSpec:
    expert = "{e}." if split is Split.EXPERTS else ""
    provides = (f"mlp.{expert}gate_proj", f"mlp.{expert}up_proj")
    return ModuleSpec("m.gate_up_proj", ModuleKind.MLP, Section.TEXT, shape, provides, split, bias=bias)


def test_br18_the_halves_of_a_fused_block_fp8_weight_meet_inside_a_block(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shape = (288, 160)  # halves of 144: the second begins at row 16 of a block
    codes, scale = f.fp8_codes(rng, shape), rng.uniform(0.01, 1, (3, 2)).astype(np.float32)
    tensors = {"weight": f.fp8(codes), "scale": torch.from_numpy(scale)}
    weights = planned(tmp_path / "m", fused(shape, Split.ROWS), s.fp8_block(128, 128), tensors)
    expected = f.E4M3[codes] * f.spread(scale, 128, 128, shape)
    for name, rows in (("gate_proj", slice(0, 144)), ("up_proj", slice(144, 288))):
        np.testing.assert_allclose(weights.linear(f"mlp.{name}").dequantized().numpy(), expected[rows], rtol=3e-7)
    weights.finish()


def test_a_fused_bias_is_split_with_its_weight(tmp_path: Path) -> None:
    tensors = {"weight": torch.eye(4), "bias": torch.tensor([1.0, 2, 3, 4])}
    weights = planned(tmp_path / "m", fused((4, 4), Split.ROWS, bias=True), s.F32, tensors)
    x = torch.zeros(1, 4)
    assert weights.linear("mlp.gate_proj")(x).tolist() == [[1, 2]]
    assert weights.linear("mlp.up_proj")(x).tolist() == [[3, 4]]
    weights.finish()


@pytest.mark.parametrize("scalar", ["one for all", "one each"])
def test_stacked_experts_keep_scales_of_their_own(tmp_path: Path, scalar: str) -> None:
    rng = np.random.default_rng(1)
    experts, wide, hidden = 3, 8, 32
    codes = rng.integers(0, 16, (experts, 2 * wide, hidden))
    scale = f.fp8_codes(rng, (experts, 2 * wide, hidden // 16)) & 0x77
    globals_ = np.float32([0.5]) if scalar == "one for all" else np.float32([1, 0.1, 0.01])
    packed = torch.stack([f.pack_nibbles(c) for c in codes])
    tensors = {"weight": packed, "scale": f.fp8(scale), "global_scale": torch.from_numpy(globals_)}
    spec = fused((experts, 2 * wide, hidden), Split.EXPERTS)
    weights = planned(tmp_path / "m", spec, s.NVFP4, tensors)
    for e in range(experts):
        each = globals_[0] if scalar == "one for all" else globals_[e]
        expected = f.E2M1[codes[e]] * f.spread(f.E4M3[scale[e]], 1, 16, (2 * wide, hidden)) * each
        for name, rows in (("gate_proj", slice(0, wide)), ("up_proj", slice(wide, None))):
            found = weights.linear(f"mlp.{e}.{name}").dequantized().numpy()
            np.testing.assert_allclose(found, expected[rows], rtol=3e-7)
    weights.finish()


def test_a_stacked_bank_of_a_real_checkpoint(checkpoints: Path) -> None:
    folder = checkpoints / "glm52-quark-int4-inmemory"
    stored = load_file(folder / "model.safetensors")
    weights = load_weights(make_plan(folder), EngineConfig())
    bank = stored["model.layers.3.mlp.experts.gate_up_proj"].float()
    for e in (0, 7):
        gate, up = (weights.linear(f"layers.3.mlp.experts.{e}.{n}_proj").dequantized() for n in ("gate", "up"))
        assert torch.equal(torch.cat([gate, up]), bank[e])
    down = weights.linear("layers.3.mlp.experts.4.down_proj").dequantized()
    assert torch.equal(down, stored["model.layers.3.mlp.experts.down_proj"][4].float())


def ask_for_everything(weights: PlannedWeights, bindings: dict[str, Binding], skip: str = "") -> None:
    for name, binding in bindings.items():
        if binding.module.spec.section is not Section.TEXT or name == skip:
            continue
        module = binding.module
        if len(module.shape) == 1 or not name.rpartition(".")[2].endswith("_proj"):
            if module.scheme.quantized or module.kind is ModuleKind.ROUTER:
                weights.linear(name)
                continue
            weights.tensor(name)
            if "bias" in module.tensors:
                weights.tensor(name + ".bias")
        else:
            product = weights.linear(name)
            shape = module.shape[-2:]
            assert (product.out_features * binding.parts, product.in_features) == shape


@pytest.mark.parametrize("name", checkpoint_names())
def test_every_parameter_of_every_checkpoint_is_filled_from_every_tensor(checkpoints: Path, name: str) -> None:
    plan = make_plan(checkpoints / name)
    weights = load_weights(plan, EngineConfig())
    ask_for_everything(weights, plan.bindings)
    weights.finish()


def test_br16_a_parameter_that_no_layer_asks_for_stops_the_load_by_name(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-fp8-block")
    weights = load_weights(plan, EngineConfig())
    ask_for_everything(weights, plan.bindings, skip="layers.0.self_attn.indexer.wk")
    with pytest.raises(
        AssertionError, match=r"no layer asked for 1 planned parameters: layers\.0\.self_attn\.indexer\.wk$"
    ):
        weights.finish()


def test_the_bias_of_a_norm_counts_as_a_parameter(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-bf16")
    name = "layers.0.self_attn.indexer.k_norm"
    weights = load_weights(plan, EngineConfig())
    assert name in weights and name + ".bias" in weights and "norm" in weights
    assert "norm.bias" not in weights and "layers.99.input_layernorm" not in weights
    ask_for_everything(weights, plan.bindings, skip=name)
    weights.tensor(name)
    with pytest.raises(AssertionError, match=r"k_norm\.bias$"):
        weights.finish()


def test_a_tied_head_shares_the_embedding(tmp_path: Path) -> None:
    spec = ModuleSpec("embed", ModuleKind.EMBEDDING, Section.TEXT, (4, 2), ("embed_tokens",))
    table = torch.arange(8.0).view(4, 2)
    weights = planned(tmp_path / "m", spec, s.F32, {"weight": table})
    assert torch.equal(weights.tensor("embed_tokens"), table)
    assert torch.equal(weights.linear("embed_tokens")(torch.ones(1, 2))[0], table.sum(dim=1))
    weights.finish()


def test_only_transposed_int4_leaves_the_file(checkpoints: Path) -> None:
    def mapped(name: str, parameter: str) -> bool:
        weights = load_weights(make_plan(checkpoints / name), EngineConfig())
        address = weights.linear(parameter).weight.weight.data_ptr()
        for line in Path("/proc/self/maps").read_text().splitlines():
            begin, end = (int(part, 16) for part in line.split()[0].split("-"))
            if begin <= address < end:
                return line.endswith(str(checkpoints / name / "model.safetensors"))
        return False

    parameter = "layers.0.mlp.down_proj"
    assert mapped("glm52-ct-w4a16", parameter) and mapped("glm52-modelopt-nvfp4", parameter)
    assert mapped("glm52-fp8-block", parameter) and mapped("glm52-bf16", parameter)
    assert not mapped("glm52-quark-int4-file2file", parameter)


def test_br22_each_layer_emulates_by_its_own_declaration(checkpoints: Path) -> None:
    """PTPC attention beside MXFP4 experts: one scale a token there, one for 32 columns here."""
    plan = make_plan(checkpoints / "glm52-quark-mxfp4-attnptpc", activation_quantization="declared")
    weights = load_weights(plan, EngineConfig())
    x = torch.from_numpy(np.random.default_rng(2).standard_normal((2, 256)).astype(np.float32))
    x[:, 200] = 3000
    attention, expert = (
        weights.linear("layers.2.self_attn.q_a_proj"),
        weights.linear("layers.2.mlp.experts.0.gate_proj"),
    )
    step = x.abs().amax(dim=1, keepdim=True) / 448
    by_token = (x / step).to(torch.float8_e4m3fn).float() * step
    assert torch.allclose(attention(x), by_token @ attention.dequantized().T, rtol=0, atol=1e-3)
    without_outlier = x.clone()
    without_outlier[:, 192:224] = 0  # the outlier's group of 32
    difference = expert(x) - expert(without_outlier)
    outlier = torch.zeros_like(x)
    outlier[:, 192:224] = x[:, 192:224]
    assert torch.allclose(difference, expert(outlier), rtol=0, atol=2e-2), "other groups do not see the outlier"


def test_the_stored_shape_of_a_packed_weight_is_compared(tmp_path: Path) -> None:
    spec = ModuleSpec("m", ModuleKind.MLP, Section.TEXT, (8, 32), ("m",))
    tensors = {
        "weight": torch.zeros(8, 4, dtype=torch.int32), "scale": torch.ones(8, 1), "shape": torch.tensor([8, 30]),
    }  # fmt: skip
    weights = planned(tmp_path / "m", spec, s.int4_group(32, False), tensors, Storage(s.Packing.INT4_ROWS))
    with pytest.raises(CheckpointError) as caught:
        weights.linear("m")
    assert "m_shape" in str(caught.value) and "[8, 30]" in str(caught.value) and "[8, 32]" in str(caught.value)


def test_a_plan_with_errors_is_refused_before_anything_is_read(checkpoints: Path, tmp_path: Path) -> None:
    draft = Draft.of(checkpoints / "glm52-fp8-block")
    draft.drop("layers.0.self_attn.indexer.wk.weight_scale_inv")
    plan = make_plan(draft.write(tmp_path / "m"))
    (tmp_path / "m" / "model.safetensors").unlink()  # a read would end in another error
    for execute in (load_weights, build_model):
        with pytest.raises(PlanError) as caught:
            execute(plan, EngineConfig())
        assert "HC304" in str(caught.value) and "hadron check" in str(caught.value)
        assert caught.value.problems == plan.errors


def test_a_file_that_changed_after_the_plan_is_refused(checkpoints: Path, tmp_path: Path) -> None:
    folder = Draft.of(checkpoints / "glm52-bf16").write(tmp_path / "m")
    plan = make_plan(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(1000)
    for execute in (load_weights, build_model):
        with pytest.raises(ChangedError, match="it was cut short"):
            execute(plan, EngineConfig())


@pytest.mark.parametrize("name", ["glm52-quark-mxfp4-attnptpc", "glm53f-modelopt-nvfp4", "glm53f-quark-mxfp4-blockfp8"])
def test_declared_activations_run_whatever_kernels_there_are(name: str) -> None:
    """The products are the reference's then, so the blocks around them must not ask for native ones."""
    options: dict[str, Any] = {"activation_quantization": "declared", "dtype": "float32", "threads": 1}
    ids, choices = [5, 9, 2, 7, 11, 13], Selections()
    expected = LLM(DATA / name, kernels="reference", **options).logits(ids, selections=choices)
    choices.imposed = True
    found = LLM(DATA / name, **options).logits(ids, selections=choices)
    # four bits of activation: what is rounded elsewhere now and then moves a value by a whole step
    assert float(np.median(abs(found - expected)) / abs(expected).max()) < 0.05


def test_a_plan_names_the_kernels_that_emulation_takes() -> None:
    name = "glm52-quark-mxfp4-attnptpc"
    kept, declared = (
        make_plan(DATA / name, kernels="cpu", activation_quantization=wanted) for wanted in ("none", "declared")
    )
    products = {"linear", "mlp", "moe", "router", "lm_head"}
    assert {k: v for k, v in declared.providers.items() if v != kept.providers[k]} == dict.fromkeys(
        products, "reference"
    )
    for module in declared.modules:
        if module.kernel is not None:
            assert (module.kernel.provider == "reference") == (module.kernel.operation in products), module.name


@pytest.mark.parametrize(
    ("operation", "option", "value", "said"),
    [
        ("hyper_connection", "hc_mult", 17, "streams up to 16, not 17"),
        ("kda", "short_conv_kernel_size", 18, "conv_kernel up to 17, not 18"),
    ],
)
def test_sizes_beyond_what_a_native_kernel_runs_are_run_by_the_definition(
    operation: str, option: str, value: int, said: str, checkpoints: Path, tmp_path: Path
) -> None:
    source = checkpoints / "glm53f-bf16"
    config = msgspec.json.decode((source / "config.json").read_bytes())
    text, g = config["text_config"], torch.Generator().manual_seed(1)
    (text if option in text else text["linear_attn_config"])[option] = value
    hidden, tensors = text["hidden_size"], load_file(source / "model.safetensors")
    shapes = (
        {"_fn": ((2 + value) * value, value * hidden), "_base": ((2 + value) * value,)}
        if operation == "hyper_connection"
        else {"conv1d.weight": (tensors["model.language_model.layers.0.self_attn.k_conv1d.weight"].shape[0], 1, value)}
    )
    for name, tensor in tensors.items():
        for end, shape in shapes.items():
            if name.endswith(end) and ("hc_" in name or "conv1d" in name):
                tensors[name] = (torch.randn(shape, generator=g) * shape[-1] ** -0.5).to(tensor.dtype)
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(config))
    save_file(tensors, tmp_path / "model.safetensors")
    plan = make_plan(tmp_path, kernels="cpu")
    (reason,) = {m.kernel.refused for m in plan.modules if m.kernel is not None and m.kernel.operation == operation}
    assert plan.providers[operation] == "reference" and said in reason[0]
    ids, choices = [5, 9, 2, 7, 11, 13], Selections()
    expected = LLM(tmp_path, kernels="reference", dtype="float32", threads=1).logits(ids, selections=choices)
    choices.imposed = True
    found = LLM(tmp_path, kernels="cpu", dtype="float32", threads=1).logits(ids, selections=choices)
    assert abs(found - expected).max() < 3e-2 * abs(expected).max()


def test_declared_needs_every_static_scale_before_anything_is_read(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-quark-int8", activation_quantization="declared")
    with pytest.raises(PlanError) as caught:
        load_weights(plan, EngineConfig(activation_quantization="declared"))
    text = str(caught.value)
    assert "HC508" in text and "more modules" in text and "int8_tensor_static without a stored input_scale" in text
    assert "hadron check" in text and "--activation-quantization declared" in text


def test_progress_and_prefault(checkpoints: Path) -> None:
    seen: list[Progress] = []
    load_weights(make_plan(checkpoints / "glm52-bf16"), EngineConfig(prefault=True), seen.append)
    assert [p.phase for p in seen] == ["map", "prefault"] and all(p.done == p.total for p in seen)


@pytest.mark.parametrize(
    ("options", "flag", "accepted"),
    [
        ({"kernels": "gpu"}, "--kernels", "auto, cpu, reference, triton"),
        ({"dtype": "float16"}, "--dtype", "float32, bfloat16"),
        ({"device": "mps"}, "--device", "cpu, cuda"),
        ({"activation_quantization": "fp8"}, "--activation-quantization", "none, declared"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype", "auto, bf16, fp32, fp8_e4m3"),
        ({"mla_prefill": "flash"}, "--mla-prefill", "auto, mqa, dense_mha"),
        ({"threads": 0}, "--threads", "a whole number of at least 1"),
        ({"max_model_len": True}, "--max-model-len", "a whole number of at least 1"),
        ({"device": "cuda", "mlock": True}, "--mlock", "nothing with --device cuda"),
        ({"device": "cuda", "numa": "interleave"}, "--numa", "nothing with --device cuda"),
        ({"numa": "bind"}, "--numa", "auto, none, interleave, bind:<node>"),
        ({"numa": 0}, "--numa", "auto, none, interleave, bind:<node>"),
    ],
)
def test_options_that_cannot_be_used(options: dict[str, Any], flag: str, accepted: str) -> None:
    with pytest.raises(UsageError) as caught:
        EngineConfig(**options)
    assert flag in str(caught.value) and accepted in str(caught.value)


@needs_policy
@pytest.mark.parametrize("read", [{"prefault": True}, {}])
def test_weights_are_read_under_the_policy_that_was_asked_for(checkpoints: Path, read: dict[str, bool]) -> None:
    """Taken back where they were read at load; in force where they are read later."""
    seen: dict[str, numa.Policy] = {}

    def record(progress: Progress) -> None:
        seen[progress.phase] = numa.current()

    try:
        build_model(make_plan(checkpoints / "glm52-bf16"), EngineConfig(numa="bind:0", threads=1, **read), record)
        after = numa.current()
    finally:
        numa.apply(numa.Policy(0))
    bound = numa.Policy(2, (0,))
    assert seen["map"] == bound and set(seen.values()) == {bound} and len(seen) == (2 if read else 1)
    assert after == (numa.Policy(0) if read else bound)


def test_a_device_that_torch_does_not_see(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match="that sees no GPU"):
        load_weights(make_plan(checkpoints / "glm52-bf16"), EngineConfig(device="cuda"))


@pytest.mark.parametrize("name", ["glm52-quark-mxfp4-attnptpc", "glm53f-quark-mxfp4-blockfp8-partial"])
def test_a_model_asks_for_everything_its_plan_holds(checkpoints: Path, name: str) -> None:
    plan = make_plan(checkpoints / name, dtype="float32")
    model = build_model(plan, EngineConfig(dtype="float32", threads=torch.get_num_threads()))
    assert plan.config is not None and model.layer_count == len(plan.config.layers)


def test_a_plan_without_local_shards_says_to_download(checkpoints: Path) -> None:
    plan = make_plan(checkpoints / "glm52-bf16")
    shards = tuple(msgspec.structs.replace(shard, path=None) for shard in plan.facts.shards)
    remote = dataclasses.replace(plan, facts=dataclasses.replace(plan.facts, shards=shards))
    with pytest.raises(CheckpointError, match="download the checkpoint first"):
        load_weights(remote, EngineConfig())


@pytest.mark.gpu
def test_weights_are_copied_to_the_device(checkpoints: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: run on a machine with one and a build of torch for it")
    plan = make_plan(checkpoints / "glm52-quark-int4-inmemory", device="cuda")
    weights = load_weights(plan, EngineConfig(device="cuda"))
    held = load_weights(make_plan(checkpoints / "glm52-quark-int4-inmemory"), EngineConfig())
    for name in ("layers.0.mlp.down_proj", "layers.3.mlp.experts.5.up_proj"):
        product = weights.linear(name)
        assert all(tensor.is_cuda for tensor in product.weight.tensors())
        assert torch.equal(product.dequantized().cpu(), held.linear(name).dequantized())
