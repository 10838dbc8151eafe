"""Direct mode: the load format is the live layout, or can be laid over the same storage."""

from __future__ import annotations

from .targets import Targets


class Direct:
    def start(self, targets: Targets) -> None:
        if targets.restore is not None:
            for layer in targets.layers():
                targets.restore(layer)

    def landed(self, targets: Targets) -> None:
        pass

    def finish(self, targets: Targets) -> None:
        if targets.process is not None:
            for layer in targets.layers():
                targets.process(layer)

    def abort(self, targets: Targets) -> None:
        pass
