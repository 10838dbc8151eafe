"""What a checkpoint holds: names, shapes and dtypes, without reading a weight."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ._library import DTYPE_OF, ops


class ParamMeta(NamedTuple):
    """A checkpoint tensor as declared.  ``device``: where it will be when the loader gets it."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device | str | None = None


StrPath: TypeAlias = "str | os.PathLike[str]"
Source: TypeAlias = (
    "StrPath | Mapping[str, Tensor | tuple[Sequence[int], torch.dtype]] | Iterable[ParamMeta]"
)

INDEX = "model.safetensors.index.json"


def metadata(source: Source) -> list[ParamMeta]:
    """The checkpoint tensors that ``source`` declares, in the order in which they will arrive.

    ``source`` is a safetensors file, an index, a folder (with or without an index), a mapping
    ``{name: tensor}`` or ``{name: (shape, dtype)}``, or an iterable of ``ParamMeta``.
    A name that is declared twice is a ``ValueError``.
    """
    if isinstance(source, (str, os.PathLike)):
        metas = _of_files(existing_paths(source))
    elif isinstance(source, Mapping):
        metas = [_of_item(name, value) for name, value in source.items()]
    else:
        metas = [_checked(meta) for meta in source]
    _refuse_duplicates(metas)
    return metas


def _refuse_duplicates(metas: list[ParamMeta]) -> None:
    seen: set[str] = set()
    for meta in metas:
        check_name(meta.name, "checkpoint tensor")
        if meta.name in seen:
            raise ValueError(f"`{meta.name}` is declared twice; declare each name once")
        seen.add(meta.name)


def check_name(name: Any, what: str) -> None:
    """Text, as files and other processes have it."""
    if not isinstance(name, str):
        raise TypeError(f"a {what} is named {name!r}; expected a string")
    if not name.isascii() and any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"a {what} is named {name!r}, which is no text; give it another name")


def path_text(path: StrPath) -> str:
    """A path as the library takes it.  ``ValueError``: it has bytes that are no UTF-8."""
    text = os.fsdecode(path)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"the path {text!r} has bytes that are no UTF-8; rename it") from None
    return text


def _of_item(name: str, value: Any) -> ParamMeta:
    if isinstance(value, Tensor):
        return ParamMeta(name, tuple(value.shape), value.dtype, value.device)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
        return ParamMeta(name, tuple(value[0]), value[1])
    raise TypeError(
        f"`{name}` is declared as {type(value).__name__}; expected a tensor or (shape, dtype)"
    )


def _checked(meta: Any) -> ParamMeta:
    if isinstance(meta, ParamMeta):
        return meta
    raise TypeError(f"{meta!r} declares no checkpoint tensor; expected a ParamMeta")


def existing_paths(paths: StrPath | Iterable[StrPath]) -> list[str]:
    """As strings.  ``FileNotFoundError``: one that is not there, a folder without any file."""
    if isinstance(paths, (str, os.PathLike)):
        paths = [paths]
    found = [Path(path) for path in paths]
    for path in found:
        if not path.exists():
            raise FileNotFoundError(f"`{path}` does not exist")
        if path.is_dir() and not (path / INDEX).exists() and not any(path.glob("*.safetensors")):
            raise FileNotFoundError(f"`{path}` holds neither {INDEX} nor a *.safetensors file")
    return [path_text(path) for path in found]


def _of_files(paths: list[str]) -> list[ParamMeta]:
    names, dims, ranks, dtypes = ops.read_metadata(paths)
    extents = iter(dims)
    return [
        ParamMeta(name, tuple(itertools.islice(extents, rank)), DTYPE_OF[dtype])
        for name, rank, dtype in zip(names, ranks, dtypes, strict=True)
    ]
