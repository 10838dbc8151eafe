"""Tensors in plain attributes: for each processing of a layer what they were when recorded.

Processing may change them in place.  Without this it would change what it left the last time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def inner(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors inside a value: itself, in a list, tuple, dict or wrapper (a quantised tensor)."""
    if isinstance(value, Tensor):
        if is_traceable_wrapper_subclass(value):
            names, _ = value.__tensor_flatten__()
            for name in names:
                yield from inner(getattr(value, name), f"{path}.{name}")
        else:
            yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from inner(item, f"{path}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from inner(item, f"{path}[{key!r}]")


def copied(value: Any) -> Any:
    """Containers anew, with the same tensors."""
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(copied(item) for item in value)
    return {key: copied(item) for key, item in value.items()} if type(value) is dict else value


def merged(now: Any, then: Any) -> Any:
    """What was recorded, and what a list or dict has got since."""
    if type(now) is list and type(then) is list:
        both = [merged(*pair) for pair in zip(now, then, strict=False)]
        return both + copied(then[len(both) :]) + copied(now[len(both) :])
    if type(now) is dict and type(then) is dict:
        items = {key: merged(now[key], item) if key in now else item for key, item in then.items()}
        return copied({**now, **items})
    return copied(then)


def all_bytes(tensor: Tensor) -> Tensor:
    """Of its storage, gaps and padding included."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes(),), (1,))


@dataclass
class Memory:
    """A storage that plain attributes of a layer show.

    ``initial``: its elements when recorded, or the one value of all; empty where they are not
    known, ``unknown`` tells why.
    """

    name: str
    tensors: list[Tensor]
    flat: Tensor
    initial: Tensor
    unknown: str

    def version(self) -> int:
        return sum(tensor._version for tensor in self.tensors)

    def first(self, now: Tensor) -> Tensor:
        """What processing begins with; ``now`` where nothing is known."""
        return self.initial.expand_as(self.flat) if self.initial.numel() else now


class ChangedInPlace(RuntimeError):
    """Processing changed memory in place whose first contents are not known."""


class Repeated:
    """One more processing of a layer: its plain attributes begin as they did the first time."""

    def __init__(self, memories: list[Memory]) -> None:
        # With what they hold now.
        self._held = [(memory, memory.flat.clone(), memory.version()) for memory in memories]
        for memory, now, _ in self._held:
            memory.flat.copy_(memory.first(now))

    def put_back(self) -> None:
        for memory, now, _ in self._held:
            memory.flat.copy_(now)

    def end(self) -> set[int]:
        """Returns the storages that processing wrote; others have again what an engine left."""
        written = set()
        for memory, now, version in self._held:
            is_changed = not torch.equal(memory.flat, memory.first(now))
            if is_changed and memory.unknown:
                raise ChangedInPlace(
                    f"it changes `{memory.name}` in place, a tensor in a plain attribute "
                    f"{memory.unknown}; a reload would change it once more. Put a new tensor in "
                    "its place, or make it a buffer"
                )
            if is_changed or memory.version() != version:
                written.add(memory.flat.untyped_storage()._cdata)
            else:
                memory.flat.copy_(now)
        return written
