"""What people do with a tensor that needs no value: `print(w)`, `copy.deepcopy(w)`.

Torch answers both through the data pointer, which a trace tensor does not have.  The two
functions are wrapped once, at the first trace; for every other tensor they do what they did.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_installed = False


def install() -> None:
    global _installed
    if _installed:
        return
    _installed = True
    deepcopy = Tensor.__deepcopy__
    to_str = torch._tensor_str._str

    def deepcopy_of(self: Tensor, memo: dict[int, Any]) -> Tensor:
        if not is_trace(self):
            return deepcopy(self, memo)
        if id(self) not in memo:
            with torch.no_grad():
                memo[id(self)] = self.clone().requires_grad_(self.requires_grad)
        copy: Tensor = memo[id(self)]
        return copy

    def str_of(self: Any, *, tensor_contents: Any = None) -> str:
        if not is_trace(self):
            return str(to_str(self, tensor_contents=tensor_contents))
        return f"tensor(..., device='trace', size={tuple(self.shape)}, dtype={self.dtype})"

    Tensor.__deepcopy__ = deepcopy_of  # type: ignore[method-assign]
    torch._tensor_str._str = str_of


def is_trace(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "privateuseone"
