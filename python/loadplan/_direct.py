"""Direct mode: the load format is the live layout, or can be laid over the same storage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

from torch import Tensor

from ._places import LayerPlaces
from .targets import Targets


class HookError(RuntimeError):
    """A hook of the host raised; says which, for which layer, and what."""


class Direct:
    per_name = False
    _restored: set[str]

    def __init__(self, before: object = None) -> None:
        # Names of layers that are in load format.  A failed update leaves some, which must not be
        # restored twice.
        self._restored = set(before._restored) if isinstance(before, Direct) else set()
        self._before = frozenset(self._restored)

    def kept(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        has_hooks = targets.restore is not None or targets.process is not None
        return targets.lists() if has_hooks else ([], [])

    def start(self, targets: Targets, handle: Any) -> None:
        if targets.restore is not None:
            layers = targets.named_layers().keys() - self._restored
            self._restored.update(run_hook("restore", targets.restore, targets, layers))

    def lists(self, targets: Targets, *, aliases: bool = True) -> tuple[list[str], list[Tensor]]:
        return targets.lists(aliases=aliases)

    def landed(self, targets: Targets, handle: Any) -> None:
        pass

    def calling(self, targets: Targets, handle: Any) -> None:
        pass

    def called(self, targets: Targets, handle: Any, met: list[str]) -> None:
        pass

    def complete(self, targets: Targets, handle: Any, partial: bool) -> None:
        pass

    def finish(self, targets: Targets) -> None:
        self._process(targets, targets.named_layers().keys())
        self._restored.clear()

    def _process(self, targets: Targets, layers: Collection[str]) -> None:
        for name in run_hook("process", targets.process, targets, layers):
            self._restored.discard(name)

    def left(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        named = dict(zip(*targets.lists(), strict=True))
        if targets.is_module():
            named = {k: v for k, v in named.items() if k.rpartition(".")[0] in self._restored}
        elif not self._restored:
            return [], []
        return list(named), list(named.values())

    def abort(self, targets: Targets, outcome: str) -> None:
        if outcome == "put back":
            self._restored = set(self._before)
        elif outcome == "untouched":
            self._process(targets, self._restored - self._before)
            self._restored = set(self._before)


def run_hook(
    hook: str, function: Callable[[Any], Any] | None, targets: Targets, layers: Collection[str]
) -> Iterator[str]:
    """Calls ``function`` with those of ``layers``, in the order of the model; yields each name.

    A layer for which it raises is laid out as before the call, whatever its bytes are.
    """
    for name, layer in targets.named_layers().items() if function is not None else ():
        if name not in layers:
            continue
        places = LayerPlaces(layer)
        try:
            function(layer)  # type: ignore[misc]
        except BaseException as error:
            places.put_back()
            raise HookError(
                f"the hook `{hook}`, called with {_words(name, targets)}, raised "
                f"{type(error).__name__}: {error}"
            ) from error
        yield name


def _words(name: str, targets: Targets) -> str:
    if targets.is_module():
        return f"layer `{name}`" if name else "the model itself"
    return "the targets"
