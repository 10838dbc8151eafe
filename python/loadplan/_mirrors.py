"""Tensors that are no targets, that the loader writes, and that outlive it: mirrors.

The library holds them by their memory.  A loader finds them by attributes, which may show other
tensors by the time of an update.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ._rebinding import storage_of

if TYPE_CHECKING:
    from ._sessions import Session


class _Attribute(NamedTuple):
    module: weakref.ref[nn.Module]
    key: str
    name: str
    mirror: Tensor


class Attributes:
    """The attributes of modules that show mirrors of a plan."""

    def __init__(self, session: Session | None, handle: Any) -> None:
        self._attributes: list[_Attribute] = []
        names, mirrors = handle.mirrors()
        if not names or session is None or not session.targets.is_module():
            return
        for path, module in session.targets.named_layers().items():
            for key, value in vars(module).items():
                if not isinstance(value, Tensor):
                    continue
                name = f"{path}.{key}" if path else key
                self._attributes += [
                    _Attribute(weakref.ref(module), key, name, mirror)
                    for mirror in mirrors
                    if storage_of(value) == storage_of(mirror)
                ]

    def check(self) -> None:
        """An error where one of them shows another tensor now."""
        for attribute in self._attributes:
            module = attribute.module()
            value = None if module is None else vars(module).get(attribute.key)
            if not isinstance(value, Tensor) or (storage_of(value) != storage_of(attribute.mirror)):
                raise RuntimeError(
                    f"`{attribute.name}`, which is no target and which the loader wrote when the "
                    "plan was made, is another tensor now; put it back or plan again"
                )
