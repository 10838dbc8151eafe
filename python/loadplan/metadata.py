"""What a checkpoint holds: names, shapes and dtypes, without reading a weight."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


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
MAX_HEADER_NBYTES = 100_000_000  # the format's own limit

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}


def metadata(source: Source) -> list[ParamMeta]:
    """The checkpoint tensors that ``source`` declares, in the order in which they will arrive.

    ``source`` is a safetensors file, a folder of them (with or without an index), a mapping
    ``{name: tensor}`` or ``{name: (shape, dtype)}``, or an iterable of ``ParamMeta``.
    A name that is declared twice is a ``ValueError``.
    """
    if isinstance(source, (str, os.PathLike)):
        path = Path(source)
        metas = _of_folder(path) if path.is_dir() else _of_file(path)
    elif isinstance(source, Mapping):
        metas = [_of_item(name, value) for name, value in source.items()]
    else:
        metas = [_checked(meta) for meta in source]
    _refuse_duplicates(metas)
    return metas


def _refuse_duplicates(metas: list[ParamMeta]) -> None:
    seen: set[str] = set()
    for meta in metas:
        if meta.name in seen:
            raise ValueError(f"`{meta.name}` is declared twice; declare each name once")
        seen.add(meta.name)


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


def _of_folder(folder: Path) -> list[ParamMeta]:
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"`{folder}` holds neither {INDEX} nor a *.safetensors file")
        return [meta for file in files for meta in _of_file(file)]
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        by_file: dict[str, list[str]] = {}
        for name, file_name in weight_map.items():
            by_file.setdefault(file_name, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"`{index}` is no index: it has no `weight_map` ({error!r})") from None
    metas: list[ParamMeta] = []
    for file_name, names in by_file.items():
        of_file = _of_file(folder / file_name)
        missing = set(names) - {meta.name for meta in of_file}
        if missing:
            raise ValueError(
                f"`{index}` places `{min(missing)}` in `{file_name}`, which does not hold it"
            )
        metas += of_file
    return metas


def _of_file(file: Path) -> list[ParamMeta]:
    header, data_nbytes = _header(file)
    entries = []
    for name, info in header.items():
        if name == "__metadata__":
            continue
        entries.append(_entry(file, name, info, data_nbytes))
    entries.sort(
        key=lambda entry: entry[0]
    )  # by place: how a reader that goes through it once sees it
    return [meta for _, meta in entries]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header and the number of bytes after it."""
    if not file.exists():
        raise FileNotFoundError(f"`{file}` does not exist")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        nbytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= nbytes <= min(MAX_HEADER_NBYTES, size - 8):
            raise ValueError(
                f"`{file}` is no safetensors file: a header of {nbytes} bytes in {size} bytes"
            )
        raw = stream.read(nbytes)
    try:
        header = json.loads(raw, object_pairs_hook=_unique)
    except _Twice as error:
        raise ValueError(f"`{file}` declares `{error}` twice") from None
    except ValueError as error:
        raise ValueError(f"`{file}` has a header that is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise ValueError(f"`{file}` has a header that is no JSON object")
    return header, size - 8 - nbytes


class _Twice(Exception):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return result


def _entry(file: Path, name: str, info: Any, data_nbytes: int) -> tuple[int, ParamMeta]:
    try:
        code, shape, (start, stop) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        numel = 1
        for extent in shape:
            numel *= extent
        well_formed = 0 <= start <= stop <= data_nbytes and all(extent >= 0 for extent in shape)
    except (KeyError, TypeError, ValueError):
        well_formed = False
    if not well_formed:
        raise ValueError(f"`{file}` describes `{name}` wrongly: {info!r}")
    dtype = DTYPES.get(code)
    if dtype is None:
        raise ValueError(f"`{file}` holds `{name}` as {code}, a dtype that torch does not have")
    if numel * dtype.itemsize != stop - start:
        raise ValueError(
            f"`{file}` holds {stop - start} bytes of `{name}`, expected {numel * dtype.itemsize} "
            f"for {list(shape)} of {dtype}"
        )
    return start, ParamMeta(name, shape, dtype)
