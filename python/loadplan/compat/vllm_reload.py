"""``vllm.model_executor.model_loader.reload``, by its own names and signatures.

    from loadplan.compat import vllm_reload as reload

    reload.record_metadata_for_reloading(model)      # once, before post-processing
    reload.start_reload(model)                       # VLLM_RELOAD_MODE=direct, or layerwise
    model.load_weights(weights)                      # or plan_loads and load_planned
    reload.finish_reload(model, model_config, device)

vLLM is not imported.  Where the original counts elements, buffers loader calls and runs constant
writes while it traces, this plans; a model that was loaded without a plan is planned from the names
that came, and later updates with the same names stream.  Layerwise reloads can be planned, too.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from .. import plan as _plan
from .. import reload as _reload
from ..layerwise import record_metadata_for_reloading
from ..layerwise.calls import said_by
from ..layerwise.record import ACTIVE
from ..layerwise.whole import Whole
from ..metadata import ParamMeta
from ..plan import LoadPlan

__all__ = [
    "LoadPlan",
    "ParamMeta",
    "begin_direct_reload",
    "check_plannable",
    "direct_reload_active",
    "direct_reload_enabled",
    "finalize_layerwise_processing",
    "finalize_layerwise_reload",
    "finish_direct_reload",
    "finish_reload",
    "initialize_layerwise_reload",
    "is_deferred_attention_layer",
    "load_planned",
    "plan_loads",
    "record_metadata_for_reloading",
    "start_reload",
    "support_quantized_model_reload_from_hp_weights",
]

_STATE = "_loadplan_vllm_reload"
_PROCESS = "process_weights_after_loading"


class _State:
    """Of one model; lies on it."""

    def __init__(self, model: nn.Module) -> None:
        self.model_config: Any = None
        self.load_weights: Any = getattr(model, "load_weights", None)
        self.whole = Whole(
            model,
            lambda weights: self.load_weights(weights),
            process=self.process,
            is_deferred=is_deferred_attention_layer,
        )

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        return type(None), ()  # a copied model starts anew

    @property
    def targets(self) -> Any:
        return self.whole.targets

    def process(self, layer: nn.Module) -> None:
        """As vLLM's own: quantised layers by their method, attention with the model's dtype."""
        method = getattr(getattr(layer, "quant_method", None), _PROCESS, None)
        if callable(method):
            method(layer)
        if is_deferred_attention_layer(layer):
            dtype = getattr(self.model_config, "dtype", None)
            layer.process_weights_after_loading(dtype or torch.get_default_dtype())  # type: ignore[operator]
        elif not callable(method) and callable(own := getattr(layer, _PROCESS, None)):
            own()


def _state(model: nn.Module) -> _State:
    state = vars(model).get(_STATE)
    if state is None:
        state = vars(model)[_STATE] = _State(model)
    return state


def direct_reload_enabled() -> bool:
    """Whether VLLM_RELOAD_MODE says direct; layerwise is the default."""
    return os.environ.get("VLLM_RELOAD_MODE", "").lower() == "direct"


def direct_reload_active(model: nn.Module) -> bool:
    """Whether a direct reload of ``model`` has begun and not ended."""
    return _is_active(model) and ACTIVE not in vars(model)


def is_deferred_attention_layer(layer: nn.Module) -> bool:
    """Attention-like: its ``process_weights_after_loading`` takes the model's dtype."""
    hook = getattr(layer, _PROCESS, None)
    if not callable(hook):
        return False
    parameters = inspect.signature(hook).parameters.values()
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def start_reload(model: nn.Module) -> None:
    """Begin a weight update in the configured mode."""
    if direct_reload_enabled():
        begin_direct_reload(model)
    else:
        initialize_layerwise_reload(model)


def finish_reload(model: nn.Module, model_config: Any, device: torch.device) -> None:
    """Complete the weight update `start_reload` began.

    ``device`` is not needed: each layer is processed where it was recorded.
    """
    if direct_reload_enabled():
        finish_direct_reload(model, model_config, device)
    else:
        finalize_layerwise_reload(model, model_config)


def begin_direct_reload(model: nn.Module) -> None:
    """Opens a direct reload: the load format is the live layout.

    Post-processing that changed a layout is refused when the plan's targets are compared.
    """
    _reload.start_reload(_state(model).targets, mode="direct")


def finish_direct_reload(model: nn.Module, model_config: Any, device: torch.device) -> None:
    """Ends a direct reload; post-processing runs again."""
    state = _state(model)
    state.model_config = model_config
    _reload.finish_reload(state.targets)


def initialize_layerwise_reload(model: nn.Module, *, defer_processing: bool = False) -> None:
    """Puts each layer's load format in place; ``model.load_weights`` then loads into it.

    Layers that are initialised already are skipped.  With ``defer_processing`` only
    `finalize_layerwise_processing` processes.
    """
    # A wrapped loader must not reload once more.
    if not hasattr(model, "_original_do_torchao_reload"):
        model._original_do_torchao_reload = getattr(model, "_do_torchao_reload", False)  # type: ignore[assignment]
    model._do_torchao_reload = False  # type: ignore[assignment]
    state = _state(model)
    if _is_active(model):
        return
    _reload.start_reload(state.targets, mode="layerwise", defer_processing=defer_processing)
    state.load_weights = getattr(model, "load_weights", None)
    if state.load_weights is not None:
        state.whole.is_called(state.load_weights, said_by(state.load_weights))
        vars(model)["load_weights"] = _collector(model, state, vars(model).get("load_weights"))


def _collector(model: nn.Module, state: _State, before: Any) -> Callable[..., Any]:
    """Stands for ``model.load_weights`` during a layerwise reload.  ``before``: one set on it."""

    @wraps(state.load_weights)
    def load_weights(weights: Iterable[tuple[str, Tensor]]) -> Any:
        names: set[str] = set()

        def noted() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                names.add(name)
                yield name, tensor

        if isinstance(weights, Collection):
            names.update(name for name, _ in weights)
            state.whole.add(weights)
        else:
            state.whole.add(noted())
        return names if state.whole.returned is None else state.whole.returned

    load_weights._loadplan_before = before  # type: ignore[attr-defined]
    return load_weights


def finalize_layerwise_processing(model: nn.Module, model_config: Any) -> None:
    """Processes what was not processed while it loaded, attention layers last.

    Layers into which nothing was loaded get their kernel tensors back.
    """
    state = _state(model)
    state.model_config = model_config
    try:
        state.whole.finish(partial=True)
    except BaseException:
        state.whole.give_up()
        raise
    finally:
        _unwrap(model)


def _unwrap(model: nn.Module) -> None:
    """Undoes what `initialize_layerwise_reload` set on the model."""
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
        del model._original_do_torchao_reload
    collector: Any = vars(model).get("load_weights")
    if hasattr(collector, "_loadplan_before"):
        del vars(model)["load_weights"]
        if collector._loadplan_before is not None:
            vars(model)["load_weights"] = collector._loadplan_before


finalize_layerwise_reload = finalize_layerwise_processing


def support_quantized_model_reload_from_hp_weights(
    original_load_weights: Callable[..., Any],
) -> Callable[..., Any]:
    """Decorator for ``AutoWeightsLoader.load_weights``: reloads full-precision weights into a model
    that is already quantised, where ``model._do_torchao_reload`` says so.

    All weights of the model come in the one iterator.
    """

    @wraps(original_load_weights)
    def patched_model_load_weights(self: Any, weights: Any, *rest: Any, **kwargs: Any) -> Any:
        model = self.module
        if not getattr(model, "_do_torchao_reload", False):
            return original_load_weights(self, weights, *rest, **kwargs)
        initialize_layerwise_reload(model)
        state = _state(model)
        state.whole.is_called(
            lambda given: original_load_weights(self, given, *rest, **kwargs),
            said_by((original_load_weights, self, rest, kwargs)),
        )
        try:
            state.whole.add(weights)
        except BaseException:
            state.whole.give_up()
            _unwrap(model)
            raise
        finalize_layerwise_processing(model, getattr(model, "_model_config", None))
        return state.whole.returned

    return patched_model_load_weights


def check_plannable(model: nn.Module) -> None:
    """Refuses, from configuration alone, what no plan supports: rebalanced experts without
    ``placement``.  Both reload modes can be planned here."""
    _plan.check_plannable(_state(model).targets)


def plan_loads(model: nn.Module, metadata: Iterable[ParamMeta]) -> LoadPlan:
    """Traces ``model.load_weights`` over the declared tensors once; between `start_reload` and
    `finish_reload`.

    Raises ValueError for a name declared twice, RuntimeError where the model cannot be planned.
    """
    if not _is_active(model):
        raise RuntimeError(
            "load plan: call plan_loads between start_reload and finish_reload; the plan takes "
            "its layout from what the reload restored"
        )
    state = _state(model)
    state.whole.plan = _plan.plan_loads(state.targets, metadata)
    return state.whole.plan


def load_planned(model: nn.Module, plan: LoadPlan, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Lands full checkpoint tensors as ``plan`` says; in an active reload."""
    _reload.load_planned(_state(model).targets, plan, weights)


def _is_active(model: nn.Module) -> bool:
    return _reload.state(_state(model).targets).state == "active"
