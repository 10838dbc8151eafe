"""Layers whose post-processing changes their layout, and models made of them.

What a model is made of comes from a list of kinds, so that a fresh model of the same kinds, loaded
eagerly and processed, is the reference.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


class LoaderParameter(nn.Parameter):
    """A parameter with attributes of its own, as engines have them."""

    def __new__(
        cls, data: Tensor, requires_grad: bool = False, **attributes: Any
    ) -> LoaderParameter:
        made = super().__new__(cls, data, requires_grad)
        vars(made).update(attributes)
        return made


def plain_parameter(data: Tensor) -> nn.Parameter:
    return nn.Parameter(data, requires_grad=False)


class Layer(nn.Module):
    """``shapes``: checkpoint names of this layer with shape and dtype."""

    deferred = False

    def __init__(self) -> None:
        super().__init__()
        self.shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}

    def add(self, name: str, data: Tensor, *checkpoint: str) -> None:
        """A parameter; with several checkpoint names each fills its part of the rows."""
        parameter = LoaderParameter(data, weight_loader=self.load, parts=checkpoint)
        self.register_parameter(name, parameter)
        count = max(len(checkpoint), 1)
        for part in checkpoint:
            shape = (data.shape[0] // count, *data.shape[1:]) if count > 1 else tuple(data.shape)
            self.shapes[part] = (shape, data.dtype)

    def load(self, parameter: Tensor, part: str, loaded: Tensor) -> None:
        parts = parameter.parts
        if len(parts) > 1:
            rows = parameter.shape[0] // len(parts)
            parameter.data.narrow(0, parts.index(part) * rows, rows).copy_(loaded)
        else:
            parameter.data.copy_(loaded)

    def load_part(self, part: str, loaded: Tensor) -> None:
        for parameter in self.parameters(recurse=False):
            if part in getattr(parameter, "parts", ()):
                parameter.weight_loader(parameter, part, loaded)
                return
        self.get_buffer(part).copy_(loaded)


class Norm(Layer):
    """No processing at all."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.ones(8), "weight")


class Transposed(Layer):
    """A kernel that wants [in, out]: the weight becomes a view with other strides."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(12, 8, dtype=torch.bfloat16), "q", "k", "v")
        self.add("bias", torch.zeros(12, dtype=torch.bfloat16))

    def process_weights_after_loading(self) -> None:
        self.weight = plain_parameter(self.weight.t())


class Padded(Layer):
    """Rows padded for alignment; the kernel sees a slice."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(6, 10), "weight")
        self.register_buffer("alias", self.weight.data[:2], persistent=False)

    def process_weights_after_loading(self) -> None:
        # What lies between the rows counts, too.
        value = float(self.weight[0, 0])
        self.weight = plain_parameter(F.pad(self.weight.data, (0, 6), value=value)[:, :10])
        self.alias = self.weight.data[:2]


class Repacked(Layer):
    """GPTQ-like: four tensors in, two of other shapes out; `g_idx` is never in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.add("qweight", torch.zeros(4, 16, dtype=torch.int32), "qweight")
        self.add("qzeros", torch.zeros(2, 2, dtype=torch.int32), "qzeros")
        self.add("scales", torch.zeros(2, 16, dtype=torch.float16), "scales")
        self.add("g_idx", torch.arange(32, dtype=torch.int32))

    def process_weights_after_loading(self) -> None:
        nibbles = (self.qweight.unsqueeze(1) >> torch.arange(0, 32, 4).view(1, 8, 1)) & 15
        order = torch.argsort(self.g_idx.view(4, 8).flip(1).reshape(-1))
        nibbles = nibbles.reshape(32, 16)[order].reshape(16, 2, 16)
        packed = (nibbles << torch.tensor([0, 4]).view(1, 2, 1)).sum(1, dtype=torch.int32)
        self.qweight = plain_parameter(packed.reshape(8, 32))
        self.scales = plain_parameter(self.scales.t().contiguous() * 2)
        self.order = order
        del self.qzeros, self.g_idx


class Scaled(Layer):
    """Online float8 with a new parameter; one scale that no checkpoint has, inverted in place."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(8, 8, dtype=torch.bfloat16), "gate", "up")
        self.add("input_scale", torch.full((1,), 4.0))
        self.register_buffer("correction", torch.zeros(8))
        self.shapes["correction"] = ((8,), torch.float32)

    def process_weights_after_loading(self) -> None:
        scale = self.weight.abs().amax().float() / 448
        gate, up = (self.weight.float() / scale).to(torch.float8_e4m3fn).chunk(2)
        self.weight = plain_parameter(torch.cat([up.view(torch.uint8), gate.view(torch.uint8)]))
        self.register_parameter("weight_scale", plain_parameter(scale.reshape(1)))
        self.input_scale.data.reciprocal_()
        self.correction = self.correction * 2


class Experts(Layer):
    """Expert by expert into one tensor; a bias that the loader pads with zeros."""

    def __init__(self) -> None:
        super().__init__()
        names = [f"expert{e}" for e in range(3)]
        self.add("w13", torch.empty(3 * 4, 6), *names)
        self.add("bias", torch.empty(8), "bias")
        self.shapes["bias"] = ((6,), torch.float32)

    def load(self, parameter: Tensor, part: str, loaded: Tensor) -> None:
        if part == "bias":
            parameter.data.zero_()
            parameter.data[:6].copy_(loaded)
        else:
            super().load(parameter, part, loaded)

    def process_weights_after_loading(self) -> None:
        self.w13 = plain_parameter(self.w13.view(3, 4, 6).transpose(1, 2).contiguous())
        self.tables = [self.bias[:4] + 1, {"low": self.bias[4:] * 2}]


class Tables(Layer):
    """Tensors in plain attributes: one transformed, one replaced inside a list, one cache."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(4, 3), "weight")
        self.offsets = torch.arange(4.0)
        self.tables = [torch.zeros(4), {"sum": torch.zeros(3)}]
        self.cache = torch.zeros(5)

    def process_weights_after_loading(self) -> None:
        self.offsets = self.offsets + self.weight[:, 0]
        self.tables[0] = self.weight.sum(1)
        self.tables[1]["sum"] = self.weight.sum(0)


class Attention(Layer):
    """MLA-like: absorbed matrices derived from a neighbour, in plain attributes; comes last."""

    deferred = True

    def __init__(self, projection: Layer | None) -> None:
        super().__init__()
        vars(self)["projection"] = projection
        self.register_buffer("k_scale", torch.ones(1), persistent=False)

    def process_weights_after_loading(self) -> None:
        weight = self.projection.weight.t().reshape(3, 4, 8)
        self.W_UK = weight[:, :2].transpose(0, 1).contiguous()
        self.W_UV = weight[:, 2:].float() * self.k_scale


class Embedding(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(10, 4), "weight")
        self.register_buffer("rope", torch.arange(6.0).view(2, 3), persistent=False)


class Head(Layer):
    """Tied to the embedding, but with a kernel layout of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def process_weights_after_loading(self) -> None:
        self.weight = plain_parameter(self.weight.t().contiguous() + 1)


class Conv(Layer):
    """Packed for a kernel, in other memory than the mixer's view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.add("weight", torch.empty(6, 1, 4), "weight")

    def process_weights_after_loading(self) -> None:
        self.unpacked = self.weight.data.view(6, 4).clone()
        self.weight.data = self.unpacked.t().contiguous()


class ConvInPlace(Conv):
    def process_weights_after_loading(self) -> None:
        self.weight.data.mul_(3)


class Mixer(Layer):
    """A buffer that shows the parameter of another layer, as it was loaded."""

    convolution: type[Conv] = Conv

    def __init__(self) -> None:
        super().__init__()
        self.conv = self.convolution()
        self.shapes = self.conv.shapes
        self.register_buffer("rows", self.conv.weight.data.view(6, 4), persistent=False)

    def load_part(self, part: str, loaded: Tensor) -> None:
        self.conv.load_part(part, loaded)


class MixerInPlace(Mixer):
    convolution = ConvInPlace


KINDS = {
    "mixer": Mixer,
    "mixer in place": MixerInPlace,
    "norm": Norm,
    "transposed": Transposed,
    "padded": Padded,
    "repacked": Repacked,
    "scaled": Scaled,
    "experts": Experts,
    "tables": Tables,
}


class Model(nn.Module):
    """Layers by kind; `attention` follows a `transposed` layer, `head` an `embedding`."""

    def __init__(
        self, kinds: Iterable[str], kinds_of_layers: dict[str, type] | None = None
    ) -> None:
        super().__init__()
        known = {**KINDS, **(kinds_of_layers or {})}
        self.layers = nn.ModuleList()
        for kind in kinds:
            if kind == "tied":
                embedding = Embedding()
                self.layers.append(embedding)
                self.layers.append(Head(embedding))
            elif kind == "mla":
                projection = Transposed()
                self.layers.append(Attention(projection))
                self.layers.append(projection)
            else:
                self.layers.append(known[kind]())

    def is_deferred(self, layer: nn.Module) -> bool:
        return getattr(layer, "deferred", False)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            index, part = name.split(".")
            self.layers[int(index)].load_part(part, tensor)
            loaded.add(name)
        return loaded

    def process(self) -> None:
        """Post-processing as an engine runs it: layer by layer, deferred ones last."""
        with torch.no_grad():
            for deferred in (False, True):
                for layer in self.modules():
                    if hasattr(layer, "process_weights_after_loading"):
                        if self.is_deferred(layer) == deferred:
                            layer.process_weights_after_loading()

    def checkpoint(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {
            f"{index}.{part}": random_tensor(shape, dtype, generator)
            for index, layer in enumerate(self.layers)
            for part, (shape, dtype) in layer.shapes.items()
        }


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, generator: Any) -> Tensor:
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(dtype)


def eager(
    kinds: Iterable[str], checkpoint: dict[str, Tensor], more: dict[str, type] | None = None
) -> Model:
    """The reference: a fresh model, loaded and processed."""
    model = Model(kinds, more)
    model.load_weights((name, tensor.clone()) for name, tensor in checkpoint.items())
    model.process()
    return model


def flat(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from flat(getattr(value, name), f"{path}.{name}")
    elif isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flat(item, f"{path}[{index}]")
    elif type(value) is dict:
        for key, item in value.items():
            yield from flat(item, f"{path}[{key}]")


def kernel_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every tensor of every module: parameters, buffers, plain attributes."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        for mapping in (module._parameters, module._buffers, vars(module)):
            for name, value in mapping.items():
                if not name.startswith("_"):
                    found.update(flat(value, f"{path}.{name}"))
    return found


def addresses(model: nn.Module) -> dict[str, tuple[Any, ...]]:
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for name, tensor in kernel_tensors(model).items()
    }


def raw(tensor: Tensor) -> Tensor:
    """The whole storage: padding and gaps included."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))


def different(wanted: nn.Module, found: nn.Module) -> list[str]:
    """Names of kernel tensors whose bytes, layout or presence differ."""
    ours, theirs = kernel_tensors(wanted), kernel_tensors(found)
    names = list(ours.keys() ^ theirs.keys())
    for name in ours.keys() & theirs.keys():
        a, b = ours[name], theirs[name]
        same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        if not same or not torch.equal(raw(a), raw(b)):
            names.append(name)
    return sorted(names)
