"""Plans the loaders of vLLM 0.33.  vLLM is imported when `targets` is called, not before.

    targets = loadplan.vllm.targets(model, vllm_config)
    loadplan.start_reload(targets, mode="layerwise")
    plan = loadplan.plan_loads(targets, loadplan.metadata(folder))
    loadplan.load_planned(targets, plan, weights)
    loadplan.finish_reload(targets)

Layerwise: call `record_metadata_for_reloading(model)` when the model has been made, before
``process_weights_after_loading``.  Direct: the parameters must be as the model was built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .layerwise.record import ACTIVE, SLOT
from .targets import Targets, Weights

_PROCESSED = "_already_called_process_weights_after_loading"


def targets(model: nn.Module, vllm_config: Any) -> Targets:
    """``model`` with its ``load_weights`` and post-processing, run as in vLLM's own first load.

    Attention layers are deferred, the model's own hook comes last; base layers under LoRA are
    loaded by their names without it; where experts lie is the placement token.

    RuntimeError, naming the parameter, where ``process_weights_after_loading`` has changed one and
    the model was not recorded before, or is not reloaded layerwise.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.utils.torch_utils import set_default_torch_dtype

    dtype = vllm_config.model_config.dtype

    def load_weights(weights: Weights) -> Any:
        if ACTIVE not in vars(model):
            _refuse_processed(model)
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(dtype),
            without_lora(model),
        ):
            return model.load_weights(weights)  # type: ignore[operator]

    def process(layer: nn.Module) -> None:
        if ACTIVE not in vars(model):
            return  # direct mode is for parameters that stay as they were made
        method = getattr(layer, "quant_method", None)
        deferred = is_deferred_attention_layer(layer)
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype):
            # Scales of attention are parameters in load format only: without them nothing came.
            if isinstance(method, QuantizeMethodBase) and not (deferred and not _own(layer)):
                vars(layer).pop(_PROCESSED, None)
                kernel = getattr(method, "moe_kernel", None)
                method.process_weights_after_loading(layer)
                if kernel is not None and isinstance(method, UnquantizedFusedMoEMethod):
                    # Once it has a kernel, the method leaves out the kernel's own packing.
                    kernel.fused_experts.process_weights_after_loading(layer)
                if hasattr(layer, "update_param_tp_status"):
                    layer.update_param_tp_status()  # type: ignore[operator]
            if deferred:
                layer.process_weights_after_loading(dtype)  # type: ignore[operator]
            elif layer is model and hasattr(model, "process_weights_after_loading"):
                model.process_weights_after_loading()  # type: ignore[operator]

    if SLOT not in vars(model):
        _refuse_processed(model)
    return Targets(
        model,
        load_weights=load_weights,
        process=process,
        is_deferred=is_deferred_attention_layer,
        placement=lambda: expert_placement(model),
    )


def _own(layer: nn.Module) -> bool:
    return any(parameter is not None for parameter in layer._parameters.values())


@contextmanager
def without_lora(model: nn.Module) -> Iterator[None]:
    """While it lasts each layer under LoRA is its base layer, as checkpoints name it."""
    from vllm.lora.layers import BaseLayerWithLoRA

    replaced = []
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if isinstance(child, BaseLayerWithLoRA):
                replaced.append((parent, name, child))
                parent._modules[name] = child.base_layer
    try:
        yield
    finally:
        for parent, name, child in replaced:
            parent._modules[name] = child


def expert_placement(model: nn.Module) -> str:
    """A digest of the maps that say where experts lie; "" for a model without."""
    digest = hashlib.sha256()
    found = False
    for name, module in model.named_modules():
        state = vars(module).get("eplb_state")
        for what, value in (
            ("expert_map", getattr(module, "expert_map", None)),
            ("logical_to_physical_map", getattr(state, "logical_to_physical_map", None)),
        ):
            if isinstance(value, Tensor) and not value.is_meta:
                found = True
                digest.update(f"{name}.{what}{tuple(value.shape)}".encode())
                digest.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest() if found else ""


def _refuse_processed(model: nn.Module) -> None:
    """vLLM notes the layout of every parameter when it makes a model: the load format."""
    from vllm.model_executor.model_loader.reload.layerwise import LAYERWISE_INFO

    for layer_name, layer in model.named_modules():
        info = LAYERWISE_INFO.get(layer)
        if info is None:
            continue
        recorded, _ = info.restore_metadata
        for name, then in recorded.items():
            now = layer._parameters.get(name)
            if now is None or _layout(now) != _layout(then):
                raise RuntimeError(
                    f"parameter `{layer_name}.{name}` is not laid out as when the model was made: "
                    "process_weights_after_loading has changed it; call "
                    "record_metadata_for_reloading before it runs and reload in mode layerwise, or "
                    "plan before it runs"
                )


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
