"""Finds and loads the one shared library, and gives its classes and operators a home."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch

NAME = "libloadplan.so"


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _path() -> Path:
    override = os.environ.get("LOADPLAN_LIBRARY")
    path = Path(override) if override else Path(__file__).parent / NAME
    if not path.is_file():
        raise ImportError(
            f"`{path}` does not exist; build it (./dev build), or set LOADPLAN_LIBRARY to a "
            f"{NAME} that was built"
        )
    return path


def _check_torch(library: Path) -> None:
    """Inline code of torch differs between minor versions: a library for another one misbehaves."""
    built_for = library.with_name("_built_for.py")
    if not built_for.is_file():
        return
    found = re.search(r'^TORCH = "([^"]*)"', built_for.read_text(), re.MULTILINE)
    if found is not None and _minor(found[1]) != _minor(torch.__version__):
        raise ImportError(
            f"this loadplan was built for torch {_minor(found[1])} and the installed torch is "
            f"{torch.__version__}; install the loadplan for that torch, or build it against it"
        )


def _is_loaded() -> bool:
    """Also true where a C++ host, or another copy of the package, loaded the library before."""
    return bool(torch._C._jit_get_schemas_for_operator("loadplan::version"))


def _register_device_module() -> None:
    """Torch asks a device for a Python module as soon as a factory call names it.

    Where another backend owns the device nothing is registered; the first trace then says so.
    """
    name = "privateuseone"
    if torch._C._get_privateuse1_backend_name() != name or hasattr(torch, name):
        return
    module: Any = types.ModuleType(f"torch.{name}")
    module._lazy_init = lambda: None
    module.is_initialized = module.is_available = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    torch._register_device_module(name, module)


def load() -> None:
    if sys.byteorder != "little" or importlib.util.find_spec("torch") is None:
        raise ImportError("loadplan needs torch on a little-endian machine")
    if not _is_loaded():
        path = _path()
        _check_torch(path)
        torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    _register_device_module()


load()

classes: Any = torch.classes.loadplan
ops: Any = torch.ops.loadplan

# The numbers by which the library calls dtypes, both ways.
_DTYPES = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
CODE_OF: dict[torch.dtype, int] = {dtype: ops.dtype_code(dtype) for dtype in _DTYPES}
DTYPE_OF: dict[int, torch.dtype] = {code: dtype for dtype, code in CODE_OF.items()}
