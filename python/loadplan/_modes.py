"""What differs between the modes of a reload; the rest of a session is the same in all."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn

from ._direct import Direct
from .layerwise import Layerwise
from .layerwise.whole import is_processed
from .targets import Targets


class Mode(Protocol):
    """One reload in its mode: made by `start_reload`, dropped when the next one starts.

    ``handle`` is the library's session.  What a method raises fails the session, with every byte
    of every target undefined unless the library has failed it before; `_direct.HookError` says it
    best.
    """

    # Whether `landed` is to be called after each name.
    per_name: bool

    def kept(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        """What hooks may change without a plan showing it: an atomic update keeps all of it."""

    def start(self, targets: Targets, handle: Any) -> None:
        """Puts the load format in place.  The session is active, nothing is written yet.

        An error that is no HookError gives the reload up: nothing was changed.
        """

    def lists(self, targets: Targets, *, aliases: bool = True) -> tuple[list[str], list[Tensor]]:
        """The targets as plans see them; ``aliases`` as in `Targets.lists`."""

    def landed(self, targets: Targets, handle: Any) -> None:
        """Some names have landed; called after each `load_planned`."""

    def calling(self, targets: Targets, handle: Any) -> None:
        """A call of the loader with real tensors follows."""

    def called(self, targets: Targets, handle: Any, met: list[str]) -> None:
        """The call is over; ``met`` are targets that it touched."""

    def complete(self, targets: Targets, handle: Any, partial: bool) -> None:
        """Every name is there; constants and what else comes last are not."""

    def finish(self, targets: Targets) -> None:
        """Puts the kernel format in place.  The session is idle again."""

    def left(self, targets: Targets) -> tuple[list[str], list[Tensor]]:
        """Targets that a failed reload leaves in load format."""

    def abort(self, targets: Targets, outcome: str) -> None:
        """The reload was given up or has failed.

        ``outcome``: ``put back``: every byte and layout is as before the start; ``untouched``: no
        byte was written after `start`, so what that did is to be undone; ``undefined``: neither.
        """


def in_kernel_format(targets: Targets) -> bool:
    """Whether layers have left the load format that was recorded, and no hook brings it back."""
    model = targets.targets
    return targets.restore is None and isinstance(model, nn.Module) and is_processed(model)


# What `plan_loads` and `load_plan` add to an error there.
BEGIN_LAYERWISE = (
    "layers of this model are in kernel format; for their load format call "
    '`start_reload(model, mode="layerwise")` first'
)


def make_mode(
    name: str,
    before: Mode | None = None,
    *,
    defer_processing: bool = False,
    max_staging_bytes: int | None = None,
) -> Mode:
    """``before``: the mode of the last reload of the same model."""
    if max_staging_bytes is not None and max_staging_bytes < 0:
        raise ValueError(f"`max_staging_bytes` is {max_staging_bytes}; expected a number of bytes")
    if name == "layerwise":
        return Layerwise(defer_processing=defer_processing, max_staging_bytes=max_staging_bytes)
    if defer_processing or max_staging_bytes is not None:
        raise ValueError(
            "`defer_processing` and `max_staging_bytes` belong to mode='layerwise'; the mode is "
            f"{name!r}"
        )
    return Direct(before)
