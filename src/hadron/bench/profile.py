"""Where the time of a step goes: by operation, and inside native code.

While `Profile.installed` is open, the functions that layers receive, their products and the native
extension are wrapped; a model built within keeps the wrappers, which count only while `counting`. Time is
an operation's own: what it spends in another one (a product within `moe`) counts there.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct

from hadron.bench.limits import Clock
from hadron.kernels.cpu import native
from hadron.kernels.provider import Provider
from hadron.layers.linear import Linear, Linears


class Share(Struct, frozen=True):
    """An operation (or native function) in a mean step. share: of the step."""

    name: str
    calls: float
    ms: float
    share: float


class Breakdown(Struct, frozen=True):
    """A mean step. operations and `outside` (Python and torch between operations) add up to it; native
    functions are parts of the operations."""

    ms: float
    operations: list[Share]
    outside: Share
    native: list[Share]
    native_calls: float
    native_calls_a_layer: float
    native_share: float


class Profile:
    """Counts and times while `counting` is true."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.counting = False
        self._clock = clock
        self._inner = [0.0]  # seconds spent in wrapped operations, for each operation that is open
        self.reset()

    def reset(self) -> None:
        """Forget what was counted."""
        self._operations: dict[str, list[float]] = {}
        self._native: dict[str, list[float]] = {}
        self._steps = 0
        self._seconds = 0.0

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Wrap what models are built from and call."""
        function, extension = Provider.function, native._native
        call, together, dequantized = Linear.__call__, Linears.__call__, Linear.dequantized
        profile = self

        def looked_up(provider: Provider, operation: str, name: str) -> Callable[..., Any]:
            return profile.operation(operation, function(provider, operation, name))

        Provider.function = looked_up  # type: ignore[assignment, method-assign]
        Linear.__call__ = self.operation("linear", call)  # type: ignore[method-assign]
        Linears.__call__ = self.operation("linear", together)  # type: ignore[method-assign]
        Linear.dequantized = self.operation("dequantize", dequantized)  # type: ignore[method-assign]
        native._native = None if extension is None else _Counted(extension, self)
        try:
            yield
        finally:
            Provider.function = function  # type: ignore[method-assign]
            Linear.__call__ = call  # type: ignore[method-assign]
            Linears.__call__ = together  # type: ignore[method-assign]
            Linear.dequantized = dequantized  # type: ignore[method-assign]
            native._native = extension

    def operation(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, timed; what it returns too, where that is a function."""

        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.counting:
                result = function(*arguments, **named)
            else:
                self._inner.append(0.0)
                begin = self._clock()
                try:
                    result = function(*arguments, **named)
                finally:
                    took = self._clock() - begin
                    _add(self._operations, name, took - self._inner.pop())
                    self._inner[-1] += took
            return self._bound(name, result)

        return timed

    def _bound(self, name: str, result: Any) -> Any:
        """What an operation bound, timed in its turn: a function, or an object whose methods are called."""
        if type(result).__module__.startswith("hadron.kernels."):
            return _Timed(name, result, self)
        if callable(result) and not isinstance(result, torch.Tensor | type):
            return self.operation(name, result)
        return result

    def native_call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the extension, timed."""

        def timed(*arguments: Any, **named: Any) -> Any:
            if not self.counting:
                return function(*arguments, **named)
            begin = self._clock()
            result = function(*arguments, **named)
            _add(self._native, name, self._clock() - begin)
            return result

        return timed

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count one step."""
        self.counting = True
        begin = self._clock()
        try:
            yield
        finally:
            self._seconds += self._clock() - begin
            self._steps += 1
            self.counting = False

    def breakdown(self, layers: int) -> Breakdown:
        """The mean of the steps that were counted."""
        steps, total = self._steps, self._seconds

        def shares(counted: dict[str, list[float]]) -> list[Share]:
            found = [Share(n, c / steps, s / steps * 1e3, s / total) for n, (c, s) in counted.items()]
            return sorted(found, key=lambda share: -share.ms)

        operations, natives = shares(self._operations), shares(self._native)
        rest = total - sum(seconds for _, seconds in self._operations.values())
        calls = sum(share.calls for share in natives)
        return Breakdown(
            ms=total / steps * 1e3,
            operations=operations,
            outside=Share("outside", steps / steps, rest / steps * 1e3, rest / total),
            native=natives,
            native_calls=calls,
            native_calls_a_layer=calls / layers,
            native_share=sum(share.share for share in natives),
        )


class _Timed:
    """An object that a kernel bound, with its methods timed."""

    def __init__(self, name: str, bound: Any, profile: Profile) -> None:
        self._name = name
        self._object = bound
        self._profile = profile

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._profile.operation(self._name, self._object)(*arguments, **named)

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._object, attribute)
        return self._profile.operation(self._name, value) if inspect.ismethod(value) else value


class _Counted:
    """The extension, with its functions timed, and the methods of what its classes make. Those are subclasses, whose
    objects other functions of the extension take as they take its own."""

    def __init__(self, extension: Any, profile: Profile) -> None:
        self._extension = extension
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._extension, name)
        if isinstance(value, type):
            methods = {n: getattr(value, n) for n in dir(value) if not n.startswith("_")}
            timed = {n: self._profile.native_call(n, m) for n, m in methods.items() if inspect.isroutine(m)}
            return type(value)(name, (value,), timed)
        return self._profile.native_call(name, value) if callable(value) else value


def _add(counted: dict[str, list[float]], name: str, seconds: float) -> None:
    entry = counted.setdefault(name, [0.0, 0.0])
    entry[0] += 1
    entry[1] += seconds
