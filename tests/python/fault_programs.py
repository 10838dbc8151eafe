"""Random models whose loaders and hooks can be stopped at any statement."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import layerwise_models as layers
import torch
from torch import Tensor, nn

import loadplan


class Injected(Exception):
    pass


class Interrupted(KeyboardInterrupt):
    pass


class Steps:
    """Counts the statements that user code runs; raises at one of them."""

    def __init__(self) -> None:
        self.count = 0
        self.stop: int | None = None
        self.error: type[BaseException] = Injected
        self.names: list[str] = []
        self.armed = False

    def arm(self, stop: int | None, error: type[BaseException] = Injected) -> None:
        self.count, self.stop, self.error, self.names, self.armed = 0, stop, error, [], True

    def disarm(self) -> None:
        self.armed = False

    def __call__(self, name: str) -> None:
        if not self.armed:
            return
        self.names.append(name)
        self.count += 1
        if self.count - 1 == self.stop:
            raise self.error(f"step {self.stop}, {name}")


class Part(nn.Module):
    """A layer; ``shapes``: what a checkpoint has for it."""

    def __init__(self, kind: str, hook: str, steps: Steps, before: Part | None) -> None:
        super().__init__()
        self.kind, self.hook = kind, hook
        vars(self)["steps"] = steps
        dtype = torch.bfloat16 if kind == "cast" else torch.float32
        tied = kind == "tied" and before is not None
        weight = before.weight if tied else nn.Parameter(torch.rand(4, 6).to(dtype), False)  # type: ignore[union-attr]
        self.weight = weight
        self.register_buffer("spare", torch.rand(3), persistent=False)
        self.mirror = torch.rand(4, 6)
        self.in_load_format = False
        self._held: dict[str, Tensor] = {}
        self.shapes = {
            "fused": {"q": (2, 6), "k": (1, 6), "v": (1, 6)},
            "product": {"a": (4, 6), "b": (4, 6)},
            "padded": {"w": (3, 6)},
            "tied": {} if tied else {"w": (4, 6)},
        }.get(kind, {"w": (4, 6)})

    def load(self, name: str, loaded: Tensor) -> None:
        live, step = self.weight.data, self.steps
        step(f"{self.kind}.{name}")
        if self.kind == "fused":
            start = {"q": 0, "k": 2, "v": 3}[name]
            live[start : start + loaded.shape[0]].copy_(loaded)
        elif self.kind == "product":
            self._held[name] = loaded
            if len(self._held) == 2:
                live.copy_(self._held["a"] * self._held["b"])
                self._held.clear()
        elif self.kind == "padded":
            live[:3].copy_(loaded)
            step("before the padding")
            live[3:].zero_()
        elif self.kind == "live":
            live[:2].copy_(live[2:].clone())
            live[2:].copy_(loaded[2:])
        elif self.kind == "looked":
            factor = 1.0 if loaded.sum().item() > -1000 else 2.0
            live[:1].copy_(loaded[:1] * factor)
            step("half of what was looked at")
            live[1:].copy_(loaded[1:] * factor)
            self.mirror.copy_(loaded)
        else:
            live.copy_(loaded)
        step(f"after {self.kind}.{name}")

    def turn(self, hook: str) -> None:
        self.steps(f"{hook} begins")
        if self.hook == "flip":
            self.weight.data.copy_(self.weight.data.flip(0))
        elif self.hook == "view":
            self.weight.data = self.weight.data.t()
        self.steps(f"{hook} ends")
        self.in_load_format = hook == "restore"


PARTS = ["plain", "fused", "cast", "product", "padded", "live", "looked", "tied"]


class Program(nn.Module):
    """A random model for direct mode; ``hooked`` ones have a kernel format."""

    def __init__(self, seed: int, hooked: bool) -> None:
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.steps = Steps()
        self.left = True  # after a failure, in load format
        self.parts = nn.ModuleList()
        for _ in range(chance.randint(2, 5)):
            kind = chance.choice(PARTS)
            before = self.parts[-1] if len(self.parts) else None
            plain = before is not None and before.kind == "plain" and before.hook == ""
            hook = chance.choice(["", "flip", "view"]) if hooked and kind != "tied" else ""
            self.parts.append(Part(kind, hook, self.steps, before if plain else None))
        # Live bytes are the kernel format.
        hooks: dict[str, Any] = {"placement": self.placement}
        if hooked:
            hooks |= {"restore": self.restore, "process": self.process}
            for part in self.parts:
                part.turn("process")
        self.targets = loadplan.Targets(self, **hooks)

    def placement(self) -> int:
        self.steps("placement")
        return 1

    def restore(self, layer: nn.Module) -> None:
        if isinstance(layer, Part):
            layer.turn("restore")

    def process(self, layer: nn.Module) -> None:
        if isinstance(layer, Part):
            layer.turn("process")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.steps("load_weights begins")
        for part in self.parts:
            part._held.clear()  # of a call that was stopped
        for name, tensor in weights:
            index, _, name = name.partition(".")
            self.parts[int(index)].load(name, tensor)
        self.steps("load_weights ends")

    def checkpoint(self, seed: int) -> dict[str, Tensor]:
        rand = torch.Generator().manual_seed(seed)
        return {
            f"{index}.{name}": torch.rand(shape, generator=rand)
            for index, part in enumerate(self.parts)
            for name, shape in part.shapes.items()
        }

    def load_eagerly(self, checkpoint: dict[str, Tensor], live: Program) -> None:
        """What the loader leaves where the live bytes are those of ``live``."""
        found = layers.kernel_tensors(live)
        for part, other in zip(self.parts, live.parts, strict=True):
            if self.targets.restore is not None and live.left and other.in_load_format:
                part.turn("restore")
        for name, tensor in layers.kernel_tensors(self).items():
            layers.raw(tensor).copy_(layers.raw(found[name]))
        for part in self.parts:
            if self.targets.restore is not None and not part.in_load_format:
                part.turn("restore")
        self.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())
        if self.targets.process is not None:
            for part in self.parts:
                part.turn("process")


class Looked(layers.Transposed):
    """One of its names goes through the loader."""

    def load(self, parameter: Tensor, part: str, loaded: Tensor) -> None:
        if part == "k" and loaded.sum() > 1000:
            loaded = -loaded
        super().load(parameter, part, loaded)


class InPlace(layers.Layer):
    """Derives a table in place, where it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(4, 3), "weight")

    def process_weights_after_loading(self) -> None:
        if hasattr(self, "table"):
            self.table.copy_(self.weight.sum(1))
        else:
            self.table = self.weight.sum(1)
        self.weight = layers.plain_parameter(self.weight.t().contiguous())


MORE: dict[str, type] = {"looked": Looked, "in place": InPlace}
LAYERS = [*layers.KINDS, "mla", "tied", *MORE]


class Stepped(layers.Model):
    """A model for layerwise mode with a step before and after each load and each hook."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__(kinds, MORE)
        vars(self)["steps"] = Steps()
        for name, module in self.named_modules():
            if isinstance(module, layers.Layer):
                module.load_part = self._stepped(f"load of {name}", module.load_part)  # type: ignore[method-assign]
                if hasattr(module, "process_weights_after_loading"):
                    module.process_weights_after_loading = self._stepped(  # type: ignore[method-assign]
                        f"process of {name}", module.process_weights_after_loading
                    )

    def _stepped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        steps = self.steps

        def stepped(*args: Any) -> Any:
            steps(f"{name} begins")
            result = function(*args)
            steps(f"{name} ends")
            return result

        return stepped

    def is_deferred(self, layer: nn.Module) -> bool:
        self.steps("is_deferred")
        return super().is_deferred(layer)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.steps("load_weights begins")
        loaded = super().load_weights(weights)
        self.steps("load_weights ends")
        return loaded


def memory_of(model: nn.Module) -> dict[str, bytes]:
    """Whole storages of every tensor that a model shows, plain attributes included."""
    return {
        name: bytes(layers.raw(tensor).tolist())
        for name, tensor in layers.kernel_tensors(model).items()
    }
