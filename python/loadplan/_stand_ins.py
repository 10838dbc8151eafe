"""Numbers that stand in for values which a trace does not have.

Passes that explore (``plan/pass_writes.h``) answer ``w.item()`` with a number made up.  What a
loader decides by such a number is decided by the library, otherwise in each round, so that a
branch is seen whatever its threshold is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_COMPARISONS = ("__lt__", "__le__", "__eq__", "__ne__", "__gt__", "__ge__")
_ARITHMETIC = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"),
    *("radd", "rsub", "rmul", "rtruediv", "rfloordiv", "rmod", "rpow"),
    *("neg", "pos", "abs"),
)


def _num_answers() -> int:
    """Reads that the pass of this thread has answered; 0 outside a pass that explores."""
    from ._passes import _tracers

    count = getattr(getattr(_tracers, "current", None), "num_answers", None)
    return int(count()) if count is not None else 0


def _decide(what: str, otherwise: Callable[[], Any]) -> Any:
    from ._passes import _loader_line, _tracers

    # A number that outlived its pass is a number.
    if not _num_answers():
        return otherwise()
    return _tracers.current.decide(f"{what} at {_loader_line()}")


def _comparing(base: type, name: str) -> Callable[..., Any]:
    compare = getattr(base, name)

    def comparison(self: Any, other: Any) -> Any:
        result = compare(self, other)
        return result if result is NotImplemented else _decide(name, lambda: result)

    return comparison


def _computing(base: type, name: str) -> Callable[..., Any]:
    compute = getattr(base, name)
    return lambda self, *others: standing_in(compute(self, *others))


def _number_class(base: Any) -> Any:
    namespace: dict[str, Any] = {
        "__bool__": lambda self: _decide("bool", lambda: base.__bool__(self)),
        "__hash__": base.__hash__,
    }
    for name in _COMPARISONS:
        namespace[name] = _comparing(base, name)
    for name in (f"__{name}__" for name in _ARITHMETIC):
        namespace[name] = _computing(base, name)
    return type(f"StandIn{base.__name__.title()}", (base,), namespace)


_CLASS_OF = {float: _number_class(float), int: _number_class(int)}


def standing_in(value: Any) -> Any:
    """``value``, or a number equal to it whose comparisons the library decides."""
    if isinstance(value, list):
        return [standing_in(item) for item in value]
    known = _CLASS_OF.get(type(value))
    return value if known is None else known(value)


_item = Tensor.item
_users = 0
_users_lock = threading.Lock()


def _item_of(tensor: Tensor) -> Any:
    before = _num_answers()
    value = _item(tensor)
    return standing_in(value) if _num_answers() != before else value


@contextmanager
def standing_in_for_items() -> Iterator[None]:
    """While it lasts, ``item()`` gives such numbers where a pass that explores answers it."""
    global _users
    with _users_lock:
        _users += 1
        Tensor.item = _item_of  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        with _users_lock:
            _users -= 1
            if _users == 0:
                Tensor.item = _item  # type: ignore[method-assign]
