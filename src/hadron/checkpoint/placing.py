"""Puts the tensors of all shards into one table, obeying the index, and reports what does not fit."""

from __future__ import annotations

from hadron.checkpoint.header import Header, Tensor
from hadron.checkpoint.header_faults import listing
from hadron.problems import Problem, problem


class Placing:
    """Collects shard after shard: `add` each, then `finish` once.

    tensors: name -> tensor, each from the one shard where it counts. unusable: names already reported.
    """

    def __init__(self, index: str | None, weight_map: dict[str, str] | None) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.unusable: set[str] = set()
        self._index = index
        self._weight_map = weight_map
        self._problems: list[Problem] = []
        self._absent: dict[str, Header | None] = {}  # shards without a usable header
        self._strays: dict[str, str] = {}  # tensor -> a shard it was found in against the index
        self._shard_of: dict[int, str] = {}

    def add(self, shard: str, header: Header | None) -> None:
        """Take in a shard's tensors; `header` is None where the index names a file that is absent."""
        self._shard_of[len(self._shard_of)] = shard
        if header is not None:
            self._problems += header.problems
            self.unusable |= header.broken
        if header is None or not header.data_start:
            self._absent[shard] = header
        elif self._weight_map is None:
            self._add_unindexed(shard, header.tensors)
        else:
            self._add_indexed(shard, header.tensors, self._weight_map)

    def finish(self) -> list[Problem]:
        """All problems, once every shard was added."""
        if self._weight_map is not None:
            self._missing(self._weight_map)
        self.unusable -= self.tensors.keys()
        return self._problems

    def _add_unindexed(self, shard: str, tensors: dict[str, Tensor]) -> None:
        if self.tensors.keys().isdisjoint(tensors):
            self.tensors.update(tensors)
            return
        twice = [name for name in tensors if name in self.tensors]
        first = self._shard_of[self.tensors[twice[0]].shard]
        self._problems.append(
            problem(
                "HC108",
                f"{len(twice)} tensor(s) of {shard} are also in another shard",
                found=f"{listing(twice)} in {first} and {shard}, and no index",
                accepted="every tensor once, or an index that says which counts",
                hint="remove the leftover file, or add the model.safetensors.index.json of the release",
                tensors=tuple(twice),
            )
        )
        self.tensors = {**tensors, **self.tensors}

    def _add_indexed(self, shard: str, tensors: dict[str, Tensor], weight_map: dict[str, str]) -> None:
        get = weight_map.get
        strays = [name for name in tensors if get(name) != shard]
        if not strays:
            self.tensors.update(tensors)
            return
        elsewhere = [name for name in strays if name in weight_map]
        unknown = [name for name in strays if name not in weight_map]
        for name in strays:
            self._strays[name] = shard
        self.tensors.update((name, tensor) for name, tensor in tensors.items() if get(name) == shard)
        if elsewhere:
            self._problems.append(
                problem(
                    "HC107",
                    f"{shard} holds {len(elsewhere)} tensor(s) that the index assigns to another shard; "
                    "the copies here are not used",
                    found=f"{listing(elsewhere)} in {shard}",
                    accepted=f"{weight_map[elsewhere[0]]}, as {self._index} says",
                    hint="nothing to do if the index is right; shards that were reused leave such copies",
                    tensors=tuple(elsewhere),
                )
            )
        if unknown:
            self._problems.append(
                problem(
                    "HC107",
                    f"{shard} holds {len(unknown)} tensor(s) that {self._index} does not name; they are not used",
                    found=listing(unknown),
                    accepted="tensors that the index names",
                    hint=f"to use them, add them to the weight_map of {self._index}",
                    tensors=tuple(unknown),
                )
            )

    def _missing(self, weight_map: dict[str, str]) -> None:
        """HC106 for what the index names and no shard holds; silent about shards reported unreadable."""
        if len(self.tensors) == len(weight_map):
            return
        by_shard: dict[str, list[str]] = {}
        for name, shard in weight_map.items():
            if name not in self.tensors and name not in self.unusable:
                by_shard.setdefault(shard, []).append(name)
        for shard, names in by_shard.items():
            self.unusable.update(names)
            if shard not in self._absent:
                strayed = [name for name in names if name in self._strays]
                message = f"{self._index} names {len(names)} tensor(s) of {shard} that are not in it"
                found = f"no {listing(names)}"
                if strayed:
                    found += f" ({strayed[0]} is in {self._strays[strayed[0]]})"
                hint = "the index and the shards are of different versions; download both again"
            elif self._absent[shard] is None:
                message = f"{self._index} names {shard}, which is not there: {len(names)} tensors, from {names[0]} on"
                found, hint = "no such file", "finish the download"
            else:
                continue
            self._problems.append(
                problem("HC106", message, found=found, accepted="what the index says", hint=hint, tensors=tuple(names))
            )
