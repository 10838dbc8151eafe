"""Hooks of a layer, found by convention where `Targets` gives none."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..targets import Targets

_PROCESS = "process_weights_after_loading"


def process_of(targets: Targets, layer: nn.Module) -> Callable[[], Any] | None:
    """Post-processing of ``layer`` into kernel format; None where it has none.

    `Targets(process=...)`, else ``layer.quant_method.process_weights_after_loading(layer)``, else
    ``layer.process_weights_after_loading()``.
    """
    if targets.process is not None:
        return partial(targets.process, layer)
    method = getattr(getattr(layer, "quant_method", None), _PROCESS, None)
    if callable(method):
        return partial(method, layer)
    own = getattr(layer, _PROCESS, None)
    return own if callable(own) else None


def is_deferred(targets: Targets, layer: nn.Module) -> bool:
    """Whether ``layer`` is processed after all others (attention derives from its neighbours)."""
    hook = targets.is_deferred or getattr(targets.targets, "is_deferred", None)
    return bool(hook(layer)) if callable(hook) else False
