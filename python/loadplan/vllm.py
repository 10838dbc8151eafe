"""Plans the loaders of vLLM 0.33.  vLLM is imported when `targets` is called, not before.

targets = loadplan.vllm.targets(model, vllm_config)
plan = loadplan.plan_loads(targets, loadplan.metadata(folder))
loadplan.load_planned(targets, plan, weights)  # between start_reload and finish_reload
"""

from __future__ import annotations

from typing import Any

from torch import nn

from .targets import Targets, Weights


def targets(model: nn.Module, vllm_config: Any) -> Targets:
    """``model`` with its ``load_weights``, which runs as in vLLM's own first load.

    The parameters must be as the model was built.  Raises RuntimeError, naming the parameter,
    where ``process_weights_after_loading`` has changed one; what it only derived from parameters
    is not refreshed by an update.
    """
    from vllm.config import set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    def load_weights(weights: Weights) -> Any:
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(vllm_config.model_config.dtype),
        ):
            return model.load_weights(weights)

    _refuse_processed(model)
    return Targets(model, load_weights=load_weights)


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
                    "process_weights_after_loading has changed it, and only unprocessed "
                    "parameters can be planned; plan before it runs"
                )


def _layout(tensor: Any) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype
