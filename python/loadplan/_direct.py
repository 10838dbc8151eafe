"""Direct mode: the load format is the live layout, or can be laid over the same storage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .targets import Targets


class HookError(RuntimeError):
    """A hook of the host raised; says which, for which layer, and what."""


class Direct:
    per_name = False

    def __init__(self, before: object = None) -> None:
        # A failed update leaves the load format in place: it must not be restored twice.
        was_restored: bool = isinstance(before, Direct) and before._is_restored
        self._was_restored = was_restored
        self._is_restored: bool = was_restored

    def kept(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        has_hooks = targets.restore is not None or targets.process is not None
        return targets.lists() if has_hooks else ([], [])

    def start(self, targets: Targets, handle: Any) -> None:
        if targets.restore is not None and not self._is_restored:
            run_hook("restore", targets.restore, targets)
            self._is_restored = True

    def lists(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        return targets.lists()

    def landed(self, targets: Targets, handle: Any) -> None:
        pass

    def calling(self, targets: Targets, handle: Any) -> None:
        pass

    def called(self, targets: Targets, handle: Any, met: list[str]) -> None:
        pass

    def complete(self, targets: Targets, handle: Any, partial: bool) -> None:
        pass

    def finish(self, targets: Targets) -> None:
        if targets.process is not None:
            run_hook("process", targets.process, targets)
        self._is_restored = False

    def abort(self, targets: Targets, outcome: str) -> None:
        if outcome == "put back":
            self._is_restored = self._was_restored
        elif outcome == "untouched" and self._is_restored and not self._was_restored:
            self.finish(targets)


def run_hook(name: str, hook: Callable[[Any], Any], targets: Targets) -> None:
    """Calls ``hook`` with every layer."""
    for layer in targets.layers():
        try:
            hook(layer)
        except BaseException as error:
            raise HookError(
                f"the hook `{name}`, called with {_name_of(layer, targets)}, raised "
                f"{type(error).__name__}: {error}"
            ) from error


def _name_of(layer: Any, targets: Targets) -> str:
    if isinstance(targets.targets, nn.Module):
        for name, module in targets.targets.named_modules():
            if module is layer:
                return f"layer `{name}`" if name else "the model itself"
    return "the targets"
