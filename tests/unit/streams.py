"""CUDA streams on a CPU, for tests of order: work runs at once, and races are found all the same.

    with Race() as race:              # torch.cuda's streams and events are stand-ins inside
        ...
    assert race.found == [] and race.spins == 0

Every operator of torch is an access, by the current stream (inside `race.host()`: by the host), to
the memory that it reads and writes. Each stream has a vector clock; launches carry the host's to
it, events and waits one stream's to another. Two accesses to the same storage without an order
between them, at least one a write, are a race, whatever a device would have made of them.
A spin is a host that keeps its core while it waits for an event: one not made `blocking`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]
Access = tuple[int, str]
"""(the stream's own time, the operator)."""


class Race(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.spins = 0
        self.clocks: dict[str, Clock] = {}
        self._writes: dict[int, dict[str, Access]] = {}
        self._reads: dict[int, dict[str, Access]] = {}
        self._kept: list[Any] = []  # no address is used twice
        self._count, self._patches = itertools.count(1), ExitStack()
        self.current, self._host = Stream(self, "compute"), Stream(self, "host")

    def __enter__(self) -> Race:
        for name, stand_in in {
            "cuda.Stream": lambda: Stream(self, f"stream {next(self._count)}"),
            "cuda.Event": lambda blocking=False: Event(self, blocking),
            "cuda.current_stream": lambda: self.current,
            "cuda.stream": self._on,
            "Tensor.pin_memory": lambda tensor: self._pinned(tensor),
            "Tensor.record_stream": lambda tensor, stream: None,
        }.items():
            self._patches.enter_context(mock.patch(f"torch.{name}", stand_in))
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._patches.close()

    @contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory of the host, which has made it."""
        (key,) = _storages(tensor)
        self._writes[key] = {"host": (self.tick("host")["host"], "pin_memory")}
        return tensor

    def host(self) -> Any:
        return self._on(self._host)

    def tick(self, name: str) -> Clock:
        """One more thing that a stream, or the host, does; it comes after what the host did."""
        clock = self.clocks.setdefault(name, {})
        clock[name] = clock.get(name, 0) + 1
        self.join(name, self.clocks.get("host", {}))
        return clock

    def join(self, name: str, other: Clock) -> None:
        clock = self.clocks.setdefault(name, {})
        for who, at in other.items():
            clock[who] = max(clock.get(who, 0), at)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.is_write
            ]
            self._access(func.name(), _storages((args, kwargs)), _storages((written, out)))
        return out

    def _access(self, what: str, read: dict[int, Any], written: dict[int, Any]) -> None:
        who = self.current.name
        clock = self.tick(who)
        self._kept += [*read.values(), *written.values()]
        for key in {*read, *written}:
            before = [self._writes.get(key, {})]
            if key in written:
                before.append(self._reads.get(key, {}))
            for other, (at, op) in (item for seen in before for item in seen.items()):
                if clock.get(other, 0) < at:
                    self.found.append(f"{op} on {other} beside {what} on {who}")
            seen = self._writes if key in written else self._reads
            seen.setdefault(key, {})[who] = clock[who], what


def _storages(values: Any) -> dict[int, Any]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))
    return {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}


class Stream:
    def __init__(self, race: Race, name: str) -> None:
        self._race, self.name = race, name

    def wait_event(self, event: Event) -> None:
        self._race.join(self.name, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self._race.join(self.name, self._race.clocks.get(stream.name, {}))


class Event:
    """One that was never recorded keeps nobody waiting, as CUDA's."""

    def __init__(self, race: Race, blocking: bool) -> None:
        self._race, self._blocking, self.clock = race, blocking, Clock()

    def record(self) -> None:
        self.clock = dict(self._race.tick(self._race.current.name))

    def synchronize(self) -> None:
        self._race.spins += not self._blocking
        self._race.join("host", self.clock)

    def query(self) -> bool:
        self._race.join("host", self.clock)
        return True
