"""Formats beyond the small checkpoints: matrices written, and read back, by the quantizers themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hadron.checkpoint.facts import Tensor
from hadron.checkpoint.formats import parse_rules
from hadron.checkpoint.identify import identify
from hadron.kernels.reference.dequantize import dequantize
from hadron.kernels.stored import stored_weight
from hadron.quantization.scheme import QuantizationScheme, parse_scheme
from tests.conftest import DATA

MODULES: dict[str, Any] = json.loads((DATA / "quantizers" / "modules.json").read_text())
DTYPES = {
    torch.int32: "I32", torch.int8: "I8", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64",
}  # fmt: skip


def claimed(name: str, entry: dict[str, Any]) -> QuantizationScheme | None:
    """What the tool's configuration says, through the dialect that reads it."""
    if name.startswith("quark"):
        config = {"quant_method": "quark", "global_quant_config": entry["config"]}
    elif name.startswith("modelopt"):
        config = {"quant_method": "modelopt", **entry["config"]}
    else:
        groups = {"g": {"targets": ["Linear"], "weights": entry["config"]}}
        config = {"quant_method": "compressed-tensors", "config_groups": groups}
    problems: list[Any] = []
    claim = parse_rules(config, problems).claim("p", linear=True)
    assert claim is not None and not problems
    return claim.declaration.scheme


@pytest.mark.parametrize("name", sorted(MODULES))
@pytest.mark.parametrize("hinted", [True, False])
def test_a_matrix_is_read_as_its_quantizer_reads_it(name: str, hinted: bool) -> None:
    entry = MODULES[name]
    stored = load_file(DATA / "quantizers" / "modules.safetensors")
    tensors = {key.removeprefix(name + "."): t for key, t in stored.items() if key.startswith(name + ".")}
    source, expected = tensors.pop("source").float(), tensors.pop("dequantized")
    claim = claimed(name, entry)
    assert claim == parse_scheme(entry["scheme"])
    shape = (entry["shape"][0], entry["shape"][1])
    beside = {suffix: Tensor(DTYPES[t.dtype], tuple(t.shape), (0, 0)) for suffix, t in tensors.items()}
    found = identify(shape, beside, claim if hinted else None)
    assert found.scheme == claim and not found.leftovers
    by_role = {role: tensors[suffix] for role, suffix in found.roles}
    values = dequantize(stored_weight(name, found.scheme, found.storage, shape, by_role))
    # compressed-tensors multiplies in BF16; the others' float32 product is ours to the last bit or two
    tolerance = 2**-7 if name.startswith("ct_") else 1e-6
    torch.testing.assert_close(values, expected, rtol=tolerance, atol=1e-6)
    error = float((values - source).norm() / source.norm())
    assert error < (0.13 if "int4" in name else 0.03), "far from the source: the codes are read in another order"
