"""Reloads through a loader's own signature: names come with the data, in one iterator.

The first reload keeps what arrives on the host, plans, and lands it; later ones stream.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..metadata import ParamMeta
from ..targets import Targets, Weights
from .calls import said_by
from .kernel import Kernel, in_load_format
from .record import ACTIVE, SLOT

if TYPE_CHECKING:
    from ..plan import LoadPlan

# Where the plan of such a loader lies on its model.
_WHOLE = "_loadplan_whole"


class Whole:
    """Updates of ``model`` through ``load_weights``, for which nobody declares names."""

    def __init__(self, model: nn.Module, load_weights: Callable[[Weights], Any], **hooks: Any):
        self._load_weights = load_weights
        self.targets = Targets(model, self._traced, **hooks)
        self.plan: LoadPlan | None = None
        # What the loader returned when it was traced: it does not depend on values.
        self.returned: Any = None
        self._held: list[tuple[str, Tensor]] = []
        self._landed = False
        self._call: Any = None
        self._planned_call: Any = None
        self.hooks = said_by(hooks)

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copied model starts anew

    def _traced(self, weights: Weights) -> Any:
        self.returned = self._load_weights(weights)
        return self.returned

    def is_called(self, load_weights: Callable[[Weights], Any], call: Any) -> None:
        """The next reload is by ``load_weights``, in a call that says ``call`` (`said_by`)."""
        self._load_weights = load_weights
        self._call = call

    def add(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """In an active reload: lands what comes, or keeps it until `finish` where no plan is."""
        from ..reload import load_planned

        if self._call != self._planned_call:
            self.plan = None
        self._planned_call = self._call
        if self.plan is not None and not self._landed and isinstance(weights, Collection):
            if any(name not in self.plan.entries for name, _ in weights):
                self.plan = None
        if self.plan is not None:
            self._landed = True
            load_planned(self.targets, self.plan, weights)
            return
        for name, tensor in weights:
            self._held.append((name, tensor.detach().to("cpu", copy=True)))

    def finish(self, *, partial: bool = False) -> None:
        """Ends the reload.  With ``partial`` a later one may bring fewer names, of whole layers."""
        from ..plan import plan_loads
        from ..reload import finish_reload, load_planned, state

        if self.plan is None and self._held:
            metas = [ParamMeta(n, tuple(t.shape), t.dtype) for n, t in self._held]
            self.plan = plan_loads(self.targets, metas)
            self._held.reverse()
            # Dropped one by one: what has landed need not be kept.
            load_planned(self.targets, self.plan, iter(self._pop, None))
        came: list[str] | None = None
        if partial and self.plan is not None:
            came = list(state(self.targets).landed)
            if len(came) == len(self.plan.entries):
                came = None
        finish_reload(self.targets, partial=came)
        self._landed = False

    def _pop(self) -> tuple[str, Tensor] | None:
        return self._held.pop() if self._held else None

    def give_up(self) -> None:
        """After an error: the kernel tensors are back on the model."""
        from ..reload import abort_reload, state

        self._held.clear()
        self._landed = False
        # Other names may come the next time.
        self.plan = None
        if state(self.targets).state == "active":
            abort_reload(self.targets)


def reload_from_high_precision(
    load_weights: Callable[..., Any] | None = None, **hooks: Any
) -> Callable[..., Any]:
    """Makes ``load_weights`` load full-precision weights into a model that is already quantised.

    Wraps a function or bound method, or decorates a method of a model, or of a loader whose
    ``module`` is the model.  While nothing is quantised (the first load), or where nothing was
    recorded (`record_metadata_for_reloading`), it is the loader itself.  Afterwards a call brings
    each layer's load format back, loads, and quantises again with the layer's post-processing;
    kernel tensors keep their places.  A call has all weights of the model in its one iterator; its
    other arguments are the loader's, and what differs from the last call is planned anew.

    ``hooks``: as in `Targets` (``process``, ``is_deferred``, ``placement``).
    """
    if load_weights is None:
        return lambda function: reload_from_high_precision(function, **hooks)
    owner = getattr(load_weights, "__self__", None)

    @wraps(load_weights)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before = () if owner is not None else args[:1]
        model = _model_of(owner if owner is not None else args[0] if args else None)
        # In a reload, so that tracing reaches the loader and not this function.
        if ACTIVE in vars(model) or not is_processed(model):
            return load_weights(*args, **kwargs)
        rest = args[len(before) :]
        if "weights" in kwargs:
            weights = kwargs.pop("weights")
        elif rest:
            weights, rest = rest[0], rest[1:]
        else:
            raise TypeError("the loader was called without weights; give them first, or by name")
        return reload_whole(
            model,
            lambda given: load_weights(*before, given, *rest, **kwargs),
            weights,
            said_by((load_weights, before, rest, kwargs)),
            hooks,
        )

    return wrapped


def reload_whole(
    model: nn.Module,
    load_weights: Callable[[Weights], Any],
    weights: Iterable[tuple[str, Tensor]],
    call: Any,
    hooks: dict[str, Any],
) -> Any:
    """One layerwise reload with all of ``weights``.  Returns what the loader returned.

    ``call``: what the call says beside its weights (`said_by`).
    """
    from ..reload import start_reload

    whole = vars(model).get(_WHOLE)
    if whole is None or whole.hooks != said_by(hooks):
        whole = vars(model)[_WHOLE] = Whole(model, load_weights, **hooks)
    whole.is_called(load_weights, call)
    start_reload(whole.targets, mode="layerwise")
    try:
        whole.add(weights)
        whole.finish()
    except BaseException:
        whole.give_up()
        raise
    return whole.returned


def _model_of(owner: Any) -> nn.Module:
    for found in (owner, getattr(owner, "module", None)):
        if isinstance(found, nn.Module):
            return found
    raise TypeError(
        f"`reload_from_high_precision` found no model in {type(owner).__name__}; wrap a method of "
        "the model, or of a loader whose `module` is the model"
    )


def is_processed(model: nn.Module) -> bool:
    """Whether some layer has left the load format that was recorded."""
    with torch.no_grad():
        return any(
            not in_load_format(Kernel.of(layer), vars(layer)[SLOT])
            for layer in model.modules()
            if SLOT in vars(layer)
        )
