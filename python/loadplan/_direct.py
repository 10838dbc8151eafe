"""Direct mode: the load format is the live layout, or can be laid over the same storage."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .targets import Targets


class Direct:
    per_name = False

    def start(self, targets: Targets, handle: Any) -> None:
        if targets.restore is not None:
            for layer in targets.layers():
                targets.restore(layer)

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
            for layer in targets.layers():
                targets.process(layer)

    def abort(self, targets: Targets) -> None:
        pass
