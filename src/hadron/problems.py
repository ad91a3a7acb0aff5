"""What can be wrong with a checkpoint, as values: stable codes, severities, four-part texts.

A problem is a refusal that has not yet become an error: header, facts, formats, resolve and plan
collect them, `hadron check` prints all of them, the engine raises `PlanError` when one is an error.
Codes never change meaning; `docs/check.md` documents each and a test compares the two.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """`error` refuses to load, `warning` deserves a look, `note` explains a decision."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


class Problem(Struct, frozen=True, gc=False):
    """One problem. `message` holds what and where, then found against accepted; `hint` what to do.

    `tensors` names every tensor (or module, or config entry) concerned.
    """

    code: str
    severity: Severity
    message: str
    tensors: tuple[str, ...]
    hint: str


E_, W_, N_ = Severity.ERROR, Severity.WARNING, Severity.NOTE

#: code -> (usual severity, title)
CODES: dict[str, tuple[Severity, str]] = {
    "HC101": (E_, "a safetensors header cannot be read"),
    "HC102": (E_, "a safetensors header holds a key twice"),
    "HC103": (E_, "a tensor's entry in a header is malformed"),
    "HC104": (E_, "tensors overlap, leave gaps or lie outside their file"),
    "HC105": (E_, "a shard's length differs from what its header says"),
    "HC106": (E_, "the index names a shard or a tensor that is not there"),
    "HC107": (W_, "a shard or a tensor is not in the index"),
    "HC108": (E_, "a tensor is in more than one shard"),
    "HC109": (E_, "the index cannot be used"),
    "HC201": (E_, "a value in config.json is missing or of the wrong type"),
    "HC202": (E_, "the architecture is not known"),
    "HC203": (E_, "config.json asks for something that is not implemented"),
    "HC204": (N_, "the quantization configuration has a key that is not known"),
    "HC205": (E_, "the quantization method or format is not known"),
    "HC206": (W_, "two configuration files disagree"),
    "HC207": (W_, "an entry of the quantization configuration matches nothing"),
    "HC208": (W_, "a side file, or a value in it, cannot be used"),
    "HC301": (E_, "a tensor is missing"),
    "HC302": (E_, "a tensor belongs to nothing in the model"),
    "HC303": (E_, "a tensor has the wrong shape"),
    "HC304": (E_, "a quantized weight lacks a scale"),
    "HC305": (E_, "a scale belongs to no quantized weight"),
    "HC306": (E_, "a parameter is stored twice"),
    "HC307": (W_, "a tensor that must be float32 is stored with less"),
    "HC401": (W_, "the configuration claims another scheme than the file holds"),
    "HC402": (W_, "the configuration claims another block or group size than the file holds"),
    "HC403": (N_, "parts that engines like to fuse have different schemes"),
    "HC404": (E_, "the scheme of a weight cannot be told"),
    "HC405": (E_, "a scheme is not supported for a kind of module"),
    "HC406": (N_, "weights are unquantized although the configuration does not exclude them"),
    "HC407": (N_, "declared activation quantization lacks its stored scale"),
    "HC501": (E_, "no kernel can run a module"),
    "HC502": (E_, "no attention backend can serve the model"),
    "HC503": (W_, "the weights exceed this machine's memory"),
    "HC504": (N_, "the multi-token-prediction layer cannot be used"),
    "HC505": (N_, "weights are converted once at load"),
    "HC506": (W_, "a tower that the configuration declares is absent"),
    "HC507": (E_, "drafting was asked for and is not possible"),
    "HC508": (E_, "emulation was asked for and a scale is missing"),
    "HC601": (E_, "a weight holds NaN codes or non-finite values"),
    "HC602": (E_, "a scale is not finite"),
    "HC603": (W_, "a scale is zero"),
}


def problem(
    code: str,
    message: str,
    *,
    found: str,
    accepted: str,
    hint: str,
    tensors: tuple[str, ...] = (),
    severity: Severity | None = None,
) -> Problem:
    """Build a `Problem`; its severity is the code's usual one unless given."""
    return Problem(code, severity or CODES[code][0], f"{message}: found {found}; accepted {accepted}", tensors, hint)
