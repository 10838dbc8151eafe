"""What differs between the modes of a reload; the rest of a session is the same in all."""

from __future__ import annotations

from typing import Protocol

from ._direct import Direct
from .targets import Targets


class Mode(Protocol):
    """One reload in its mode: made by `start_reload`, dropped when the next one starts."""

    def start(self, targets: Targets) -> None:
        """Puts the load format in place.  The session is active, nothing is written yet."""

    def landed(self, targets: Targets) -> None:
        """Some names have landed; called after each `load_planned`."""

    def finish(self, targets: Targets) -> None:
        """Puts the kernel format in place.  Every byte of the load format is there."""

    def abort(self, targets: Targets) -> None:
        """The reload was given up, or has failed."""


def make_mode(name: str) -> Mode:
    if name == "direct":
        return Direct()
    raise NotImplementedError(f"mode={name!r} is not available yet; use mode='direct'")
