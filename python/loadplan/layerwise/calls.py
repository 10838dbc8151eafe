"""Calls of a loader compared: the plan of one holds for another only where both say the same."""

from __future__ import annotations

import enum
import re
import types
from typing import Any

import torch
from torch import nn

_CONSTANTS = (type(None), bool, int, str, bytes, torch.dtype, torch.device, enum.Enum, re.Pattern)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type)
_DEPTH = 8


class _Same:
    """Equal to what holds the same object."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


class _Unknown:
    """Equal to nothing, itself included."""

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


def said_by(value: Any, depth: int = 0) -> Any:
    """What a loader, or an argument of it, says now; compares equal to what says the same.

    Modules and functions say who they are, objects what they hold, as may change between two calls.
    Tensors and what has no attributes to compare are equal to nothing.
    """

    def parts(values: Any) -> list[Any]:
        return [said_by(part, depth + 1) for part in values]

    kind = type(value)
    if depth > _DEPTH or isinstance(value, torch.Tensor):
        return _Unknown()
    if isinstance(value, (nn.Module, *_FUNCTIONS)):
        return _Same(value)
    if isinstance(value, types.MethodType):
        return parts([value.__func__, value.__self__])
    if isinstance(value, _CONSTANTS):
        return [kind, value]
    if kind is float:
        return [kind, repr(value)]
    if kind in (list, tuple):
        return [kind, parts(value)]
    if kind is dict:
        return [kind, parts(value), parts(value.values())]
    if kind in (set, frozenset) and all(isinstance(item, _CONSTANTS) for item in value):
        return [kind, frozenset(value)]
    # Of a class in Python that keeps all it holds in its attributes.
    bases = [base for base in kind.__mro__ if base is not object]
    if all(hasattr(value, "__dict__") and "__slots__" not in vars(base) for base in bases) and not (
        any(base.__module__ == "builtins" for base in bases)
    ):
        return [kind, said_by(vars(value), depth + 1)]
    return _Unknown()
