"""What differs between the modes of a reload; the rest of a session is the same in all."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from ._direct import Direct
from .layerwise import Layerwise
from .targets import Targets


class Mode(Protocol):
    """One reload in its mode: made by `start_reload`, dropped when the next one starts.

    ``handle`` is the library's session.
    """

    # Whether `landed` is to be called after each name.
    per_name: bool

    def start(self, targets: Targets, handle: Any) -> None:
        """Puts the load format in place.  The session is active, nothing is written yet."""

    def lists(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        """The targets as plans see them."""

    def landed(self, targets: Targets, handle: Any) -> None:
        """Some names have landed; called after each `load_planned`."""

    def calling(self, targets: Targets, handle: Any) -> None:
        """A call of the loader with real tensors follows."""

    def called(self, targets: Targets, handle: Any, met: list[str]) -> None:
        """The call is over; ``met`` are targets that it touched."""

    def complete(self, targets: Targets, handle: Any, partial: bool) -> None:
        """Every byte of the load format is there; an error fails the session."""

    def finish(self, targets: Targets) -> None:
        """Puts the kernel format in place.  The session is idle again."""

    def abort(self, targets: Targets) -> None:
        """The reload was given up, or has failed."""


def make_mode(
    name: str, *, defer_processing: bool = False, max_staging_bytes: int | None = None
) -> Mode:
    if name == "layerwise":
        return Layerwise(defer_processing=defer_processing, max_staging_bytes=max_staging_bytes)
    if defer_processing or max_staging_bytes is not None:
        raise ValueError(
            "`defer_processing` and `max_staging_bytes` belong to mode='layerwise'; the mode is "
            f"{name!r}"
        )
    return Direct()
