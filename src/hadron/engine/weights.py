"""`PlannedWeights`: the parameters of a model as its plan says, over the mapped checkpoint.

A layer asks by runtime name; the plan's binding says which module, expert and rows that is. What the
plan claims and no layer asks for is our own bug and stops the load, with the names.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hadron.checkpoint.load import MappedCheckpoint
from hadron.errors import CheckpointError, UnsupportedError
from hadron.kernels.provider import Provider
from hadron.kernels.select import KernelChoice, select
from hadron.kernels.stored import StoredWeight, scalar, stored_weight
from hadron.layers.linear import Linear, Product
from hadron.models.inventory import ModuleKind
from hadron.preflight.plan import Binding, ModulePlan

#: the roles a `StoredWeight` is made of
_OF_WEIGHT = ("weight", "scale", "global_scale", "zero_point")


class PlannedWeights:
    """Implements `layers.weights.Weights`. bindings: runtime name -> where it lies, the sections to run.

    declared: emulate the activation quantization that the checkpoint declares. kernels: where `quantize`
    is taken from, and the threads of native kernels.
    """

    def __init__(
        self,
        bindings: Mapping[str, Binding],
        mapped: MappedCheckpoint,
        *,
        device: torch.device,
        declared: bool,
        kernels: Provider,
    ) -> None:
        self._bindings = bindings
        self._mapped = mapped
        self._device = device
        self._declared = declared
        self._threads = kernels.threads
        self._linear = kernels.provider("linear")
        self._bind_quantize = kernels.function("quantize", "bind")
        self._asked: set[str] = set()
        self._tensors: dict[str, dict[str, torch.Tensor]] = {}
        self._stored: dict[tuple[str, int | None], StoredWeight] = {}

    def __contains__(self, name: str) -> bool:
        if name in self._bindings:
            return True
        owner = name.removesuffix(".bias")
        return owner != name and owner in self._bindings and "bias" in self._bindings[owner].module.tensors

    def linear(self, name: str) -> Linear:
        """The matrix product of that name, its bias and activation emulation included."""
        binding = self._binding(name)
        module = binding.module
        self._asked |= {name, name + ".bias"}
        weight = self._rows(binding)
        bias = self._taken(module).get("bias")
        if bias is not None:
            bias = _part(bias, binding).to(self._device)
        quantize = self._quantize(module, binding.expert)
        return Linear(weight, self._kernel(module), bias=bias, quantize=quantize, threads=self._threads)

    def tensor(self, name: str) -> torch.Tensor:
        """A plain parameter in its stored dtype; `<name>.bias` is the bias of a norm."""
        self._asked.add(name)
        role = "weight"
        if name not in self._bindings:
            name, role = name.removesuffix(".bias"), "bias"
        binding = self._binding(name)
        assert not binding.module.scheme.quantized, f"{name} is {binding.module.scheme.name}, not a plain parameter"
        tensor = self._taken(binding.module)[role]
        if binding.expert is not None:
            tensor = tensor[binding.expert]
        return _part(tensor, binding).to(self._device)

    def finish(self) -> None:
        """Check that every parameter was filled and every tensor used; forget what only loading needs."""
        names = set(self._bindings)
        names |= {f"{n}.bias" for n, b in self._bindings.items() if "bias" in b.module.tensors}
        unfilled = sorted(names - self._asked)
        assert not unfilled, f"no layer asked for {len(unfilled)} planned parameters: {', '.join(unfilled)}"
        left = self._mapped.left
        assert not left, f"{len(left)} planned tensors were not used: {', '.join(left)}"
        self._tensors.clear()
        self._stored.clear()

    def _binding(self, name: str) -> Binding:
        binding = self._bindings.get(name)
        assert binding is not None, f"the plan has no parameter {name}"
        return binding

    def _taken(self, module: ModulePlan) -> dict[str, torch.Tensor]:
        """All tensors of a module by role; what is fused or stacked is asked for more than once."""
        taken = self._tensors.get(module.name)
        if taken is None:
            taken = self._tensors[module.name] = {role: self._mapped.take(t) for role, t in module.tensors.items()}
            if "shape" in taken and (found := taken["shape"].tolist()) != list(module.shape):
                raise CheckpointError(
                    "The stored shape of a packed weight is not the model's",
                    where=module.tensors["shape"],
                    found=str(found),
                    accepted=str(list(module.shape)),
                    hint="the weight belongs to another model, or config.json does",
                )
        return taken

    def _rows(self, binding: Binding) -> StoredWeight:
        """The weight of a binding: the whole module's (or expert's) brought to convention, then its rows."""
        module, expert = binding.module, binding.expert
        whole = self._stored.get((module.name, expert))
        if whole is None:
            tensors = {role: t for role, t in self._taken(module).items() if role in _OF_WEIGHT}
            if expert is not None:
                tensors = {role: _of_expert(t, expert, module) for role, t in tensors.items()}
            out, columns = module.shape[-2:]
            whole = stored_weight(module.name, module.scheme, module.storage, (out, columns), tensors)
            whole = self._stored[module.name, expert] = whole.to(self._device)
        rows = whole.shape[0] // binding.parts
        return whole.rows(binding.part * rows, (binding.part + 1) * rows)

    def _kernel(self, module: ModulePlan) -> KernelChoice:
        """The plan's choice where it multiplies by one weight, else its provider's `linear`.

        A parameter by which a layer multiplies takes the same products as its neighbours, or its bits would depend
        on the batch.
        """
        planned = module.kernel
        if planned is not None and planned.operation == "linear":
            return planned
        if planned is not None:
            return _product(module, planned.provider)
        return _product(module, self._linear if module.kind is ModuleKind.PARAMETER else "reference")

    def _quantize(self, module: ModulePlan, expert: int | None) -> Product | None:
        activation = module.activation
        if not self._declared or activation.element is None:
            return None
        stored = self._taken(module).get("input_scale")
        if stored is not None:
            if expert is not None:
                stored = _of_expert(stored, expert, module)
            stored = scalar(module.name, "input_scale", stored).to(self._device)
        quantize: Product = self._bind_quantize(activation, stored)
        return quantize


def _part(tensor: torch.Tensor, binding: Binding) -> torch.Tensor:
    """The rows of one of several parameters that share a tensor."""
    rows = tensor.shape[0] // binding.parts
    return tensor[binding.part * rows : (binding.part + 1) * rows] if binding.parts > 1 else tensor


def _of_expert(tensor: torch.Tensor, expert: int, module: ModulePlan) -> torch.Tensor:
    """One expert's part of a stacked tensor; a scalar belongs to all of them."""
    return tensor[expert] if tensor.dim() and tensor.shape[0] == module.shape[0] else tensor


def _product(module: ModulePlan, provider: str) -> KernelChoice:
    choice = select("linear", module.scheme, providers=(provider,))
    if not isinstance(choice, KernelChoice):
        raise UnsupportedError(
            "No kernel can multiply by a weight",
            where=module.name,
            found="; ".join(choice.reasons),
            accepted="a scheme that a provider of this build runs",
            hint="use --kernels reference",
        )
    return choice
