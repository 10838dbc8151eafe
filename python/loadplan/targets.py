"""The live tensors that a loader may write, and the loader."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

Weights: TypeAlias = Iterable[tuple[str, Tensor]]
LoadWeights: TypeAlias = Callable[[Weights], Any]


class Targets:
    """Stands wherever a model does: any ``{name: tensor}``, any loader.

    A module means all its parameters and buffers, non-persistent ones included, and its own
    ``load_weights``.  The mapping is looked at anew for every plan and every update, so that a
    tensor that was replaced in it is seen.

    ``required`` holds patterns of target names (``*``, ``?``) that every update must cover.
    ``placement()`` gives a token of where experts lie: a plan made under another token is refused.
    """

    def __init__(
        self,
        targets: Mapping[str, Tensor] | nn.Module,
        load_weights: LoadWeights | None = None,
        *,
        required: Iterable[str] = (),
        placement: Callable[[], Hashable] | None = None,
        restore: Callable[[Any], Any] | None = None,
        process: Callable[[Any], Any] | None = None,
        is_deferred: Callable[[Any], bool] | None = None,
    ) -> None:
        if isinstance(required, str):
            raise TypeError(f"`required` is the string {required!r}; expected a list of patterns")
        if not isinstance(targets, (Mapping, nn.Module)):
            raise TypeError(f"targets are {type(targets).__name__}; expected a mapping or a module")
        self.targets = targets
        self._load_weights = load_weights
        self.required = list(required)
        self.placement = placement
        self.restore = restore
        self.process = process
        self.is_deferred = is_deferred

    @property
    def load_weights(self) -> LoadWeights:
        """The loader that was given, else the model's own; TypeError where there is none."""
        loader = self._load_weights
        if loader is None:
            loader = getattr(self.targets, "load_weights", None)
        if not callable(loader):
            raise TypeError(
                f"`{type(self.targets).__name__}` has no `load_weights`; give one as "
                "`Targets(targets, load_weights=...)`"
            )
        return loader

    def named(self) -> dict[str, Tensor]:
        """Every name, as it is now; for a tensor that wraps others theirs: `w.qdata`, `w.scale`."""
        return dict(
            inner for name, tensor in self.outer().items() for inner in with_memory(name, tensor)
        )

    def outer(self) -> dict[str, Tensor]:
        """The same, where a tensor that wraps others stands for them."""
        if isinstance(self.targets, Mapping):
            return dict(self.targets)
        named: dict[str, Tensor] = dict(self.targets.named_parameters(remove_duplicate=False))
        named.update(self.targets.named_buffers(remove_duplicate=False))
        return named

    def lists(self, *, aliases: bool = True) -> tuple[list[str], list[Tensor]]:
        """Names and tensors for the library.

        The tensors are aliases without their Python objects: a parameter's attributes (a
        ``weight_loader``) lead back to its module, and what the library keeps must not.  Where it
        only looks at them, ``aliases=False`` gives the tensors themselves.
        """
        named = self.named()
        for name, tensor in named.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"target `{name}` is {type(tensor).__name__}; expected a tensor")
            if is_lazy(tensor):
                raise ValueError(
                    f"target `{name}` of a lazy module has no memory yet; run the model once, or "
                    "load it once with its own loader, and then start the reload"
                )
        if not aliases:
            return list(named), list(named.values())
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            return list(named), [tensor.detach() for tensor in named.values()]

    def is_module(self) -> bool:
        return isinstance(self.targets, nn.Module)

    def named_layers(self) -> dict[str, Any]:
        """What the hooks are called with: every layer, or the mapping."""
        if isinstance(self.targets, nn.Module):
            return dict(self.targets.named_modules())
        return {"": self.targets}

    def layers(self) -> list[Any]:
        return list(self.named_layers().values())


def with_memory(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors that hold the bytes of one: itself, or what it wraps."""
    if not isinstance(tensor, Tensor) or not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        inner = getattr(tensor, attribute)
        if isinstance(inner, Tensor):  # a DTensor counts its mesh among them
            yield from with_memory(f"{name}.{attribute}", inner)


Model: TypeAlias = "nn.Module | Targets"


def as_targets(model: Model | Mapping[str, Tensor]) -> Targets:
    return model if isinstance(model, Targets) else Targets(model)
