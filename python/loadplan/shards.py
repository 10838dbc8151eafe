"""Shards: which box of which checkpoint tensor lies on which rank of the trainer."""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from ._dtensor import boxes_of_dtensor, is_dtensor
from ._library import CODE_OF, classes
from .metadata import ParamMeta, Source, check_name, metadata

if TYPE_CHECKING:
    from .layout import ParallelLayout

Box: TypeAlias = Sequence[tuple[int, int]]
Piece: TypeAlias = "tuple[int, Box, Tensor | None]"


class Shards:
    """Who holds what of a checkpoint, and the tensors of it that this process has.

    ``pieces`` is ``{name: [(rank, box, tensor), ...]}``: the box, one ``(start, stop)`` for each
    dimension of the whole tensor, of the shard on ``rank``; None for a tensor in another process.
    Ranks are those of the group that exchanges them.  The shape of a tensor is what its boxes span,
    its dtype that of its shards, unless ``metas`` declare them.

    The boxes of a name must be the whole tensor.  What several ranks hold, in equal boxes or in
    boxes that overlap, are replicas: it is taken from one of them, and where one process has the
    bytes of both, it compares them before an update.  A shard of another shape or dtype than its
    box is refused.

    Tensors are read when they are sent: shards that are updated in place stay valid, and so do
    parameters that were moved (``p.data = x``, ``module.to(...)``), as long as they are given
    themselves and not as ``p.data``.
    """

    def __init__(
        self,
        pieces: Mapping[str, Iterable[Piece]],
        metas: Source | None = None,
    ) -> None:
        self._handle: Any = classes.ShardSet()
        self._geometries: dict[Any, int] = {}
        self._locals: list[_Local] = []
        declared = {} if metas is None else {meta.name: meta for meta in metadata(metas)}
        for name, of_name in pieces.items():
            self._add_explicit(name, list(of_name), declared.get(name))
        # Empty: the other constructors fill it, and nothing is added to a set that was checked.
        if pieces:
            self._handle.check()

    @classmethod
    def of_tensors(
        cls,
        named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
        *,
        ranks: Callable[[int], int] | None = None,
        rank: int | None = None,
    ) -> Shards:
        """Shards of DTensors, of all ranks of their meshes, without communication.

        Placements may be ``Shard``, ``Replicate`` and ``_StridedShard``, uneven ones too.
        ``ranks`` gives for a rank of the mesh the one in the group that exchanges them (default:
        the same), ``rank`` is the mesh's rank of this process.  A plain tensor counts as a replica
        on every rank of the meshes of the others.
        """
        shards = cls({})
        items = list(named.items() if isinstance(named, Mapping) else named)
        renumber = ranks or (lambda rank: rank)
        me = _own_rank() if rank is None else rank
        everywhere: set[int] = set()
        for _, tensor in items:
            if is_dtensor(tensor):
                everywhere.update(tensor.device_mesh.mesh.flatten().tolist())
        for name, tensor in items:
            if is_dtensor(tensor):
                shards._add_dtensor(name, tensor, me, renumber)
            else:
                holders = sorted(everywhere) or [me]
                box = tuple((0, extent) for extent in tensor.shape)
                pieces = [(renumber(holder), box) for holder in holders]
                key = ("whole", tensor.shape, tensor.dtype, tuple(holders))
                index = shards._geometry(key, tensor.shape, tensor.dtype, pieces)
                mine = [holders.index(me)] if me in holders else []
                shards._hold(name, index, mine, [tensor] * len(mine))
        shards._handle.check()
        return shards

    @classmethod
    def of_module(
        cls,
        module: nn.Module,
        *,
        rename: Callable[[str], str] | None = None,
        buffers: bool = False,
        ranks: Callable[[int], int] | None = None,
        rank: int | None = None,
    ) -> Shards:
        """Shards of a module's parameters, as ``fully_shard`` or a tensor-parallel plan left them.

        ``rename`` gives the name in the checkpoint.  ``buffers``: those that `state_dict` would
        hold as well.  A tied parameter has its first name.  Else as `of_tensors`.
        """
        name_of = rename or (lambda name: name)
        named: list[tuple[str, Tensor]] = list(module.named_parameters())
        if buffers:
            named += _persistent_buffers(module)
        renamed = ((name_of(name), tensor) for name, tensor in named)
        return cls.of_tensors(renamed, ranks=ranks, rank=rank)

    @classmethod
    def of_layout(
        cls,
        metas: Source,
        layout: ParallelLayout,
        tensors: Mapping[str, Tensor],
        rank: int,
    ) -> Shards:
        """Shards as a Megatron-like ``layout`` places them.

        ``tensors`` are those that ``rank`` holds, by the name of the checkpoint tensor.
        """
        shards = cls({})
        for meta in metadata(metas):
            pieces = layout.pieces(meta)
            key = (tuple(meta.shape), meta.dtype, tuple(pieces))
            index = shards._geometry(key, meta.shape, meta.dtype, pieces)
            mine = [i for i, (holder, _) in enumerate(pieces) if holder == rank]
            if mine and meta.name not in tensors:
                raise ValueError(f"rank {rank} holds a shard of `{meta.name}`; give its tensor")
            shards._hold(meta.name, index, mine, [tensors[meta.name] for _ in mine])
        shards._handle.check()
        return shards

    def _geometry(
        self,
        key: Any,
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Iterable[tuple[int, Box]],
    ) -> int:
        """The number by which the library knows a geometry; ``key`` says what it is made from."""
        index = self._geometries.get(key)
        if index is None:
            numbers: list[int] = []
            for rank, box in pieces:
                numbers.append(rank)
                numbers.extend(itertools.chain.from_iterable(box))
            index = self._handle.add_geometry(list(shape), CODE_OF[dtype], numbers)
            self._geometries[key] = index
        return index

    def _add_explicit(self, name: str, pieces: list[Piece], meta: ParamMeta | None) -> None:
        if not pieces:
            raise ValueError(f"`{name}` has no shards")
        pieces = [_checked_piece(name, piece) for piece in pieces]
        if meta is not None:
            shape, dtype = tuple(meta.shape), meta.dtype
        else:
            shape = _hull(name, [box for _, box, _ in pieces])
            dtype = _common_dtype(name, pieces)
        boxes = [(rank, box) for rank, box, _ in pieces]
        for rank, box in boxes:
            if len(box) != len(shape):
                raise ValueError(
                    f"`{name}`: the box {box} of rank {rank} is none of a tensor of shape {shape}"
                )
            if any(start > stop for start, stop in box):
                raise ValueError(
                    f"`{name}`: the box {box} of rank {rank} ends before it begins; expected "
                    "(start, stop) for each dimension"
                )
        index = self._geometry((shape, dtype, tuple(boxes)), shape, dtype, boxes)
        here = [(i, tensor) for i, (_, _, tensor) in enumerate(pieces) if tensor is not None]
        self._hold(name, index, [i for i, _ in here], [tensor for _, tensor in here])

    def _add_dtensor(self, name: str, tensor: Any, me: int, renumber: Callable[[int], int]) -> None:
        boxes = boxes_of_dtensor(name, tensor)
        pieces = [(renumber(rank), box) for rank, of_rank in boxes.items() for box, _ in of_rank]
        key = (tuple(tensor.shape), tensor.dtype, tensor.device_mesh, tensor.placements)
        index = self._geometry(key, tensor.shape, tensor.dtype, pieces)
        local = _Local(name, tensor, [where for _, where in boxes.get(me, [])])
        position = 0
        mine: list[int] = []
        for rank, of_rank in boxes.items():
            if rank == me:
                mine = list(range(position, position + len(of_rank)))
            position += len(of_rank)
        self._hold(name, index, mine, local.parts())
        if mine:
            self._locals.append(local)

    def _hold(self, name: str, geometry: int, pieces: list[int], tensors: list[Tensor]) -> None:
        check_name(name, "checkpoint tensor")
        # Parameters as they are: where one is moved the library sees it.
        kept = [tensor if tensor.is_leaf else tensor.detach() for tensor in tensors]
        self._handle.add(name, geometry, pieces, kept)

    def _up_to_date(self) -> Any:
        """The library's shards, with the tensors that DTensors have now."""
        with torch.no_grad():
            for local in self._locals:
                if local.has_moved():
                    self._handle.replace(local.name, local.parts())
        return self._handle


class _Local:
    """The parts of a DTensor's local tensor, which is exchanged where the DTensor is moved."""

    __slots__ = ("_place", "_tensor", "_where", "name")

    def __init__(self, name: str, tensor: Any, where: list[tuple[slice, ...]]) -> None:
        self.name = name
        self._tensor = tensor
        self._where = where

    def parts(self) -> list[Tensor]:
        local = self._tensor.to_local().detach()
        extents = zip(*([part.stop for part in where] for where in self._where), strict=True)
        expected = tuple(max(stops) for stops in extents)
        if local.numel() if not self._where else tuple(local.shape) != expected:
            raise ValueError(
                f"`{self.name}` of shape {tuple(self._tensor.shape)} holds {tuple(local.shape)} on "
                f"this rank, where {self._tensor.placements} places {expected or 'nothing'}; what "
                "is padded or cut otherwise is written out as explicit `Shards`"
            )
        # While its parts are held nothing else can lie there.
        self._place = local.data_ptr(), local.stride()
        return [local[where] for where in self._where]

    def has_moved(self) -> bool:
        local = self._tensor.to_local()
        return bool((local.data_ptr(), local.stride()) != self._place)


def _checked_piece(name: str, piece: Any) -> Piece:
    try:
        rank, box, tensor = piece
        whole = operator.index(rank)
        box = tuple((operator.index(start), operator.index(stop)) for start, stop in box)
        array("q", [whole, *itertools.chain.from_iterable(box)])  # what the library counts in
    except (TypeError, ValueError, OverflowError):
        whole, box, tensor = 0, (), ...
    if not (tensor is None or isinstance(tensor, Tensor)):
        raise TypeError(
            f"{_shown(piece)} is no shard of `{name}`; expected (rank, box, tensor), a box being "
            "one (start, stop) for each dimension and the tensor None where it is in another "
            "process"
        )
    return whole, box, tensor


def _shown(piece: Any) -> str:
    """Without the values of its tensors."""
    if isinstance(piece, Tensor):
        return f"a tensor of shape {list(piece.shape)}"
    if isinstance(piece, (tuple, list)):
        return f"({', '.join(map(_shown, piece))})"
    return f"{piece!r:.60}"


def _persistent_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, part in module.named_modules()
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    ]


def _own_rank() -> int:
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _hull(name: str, boxes: list[Box]) -> tuple[int, ...]:
    ranks = {len(box) for box in boxes}
    if len(ranks) != 1:
        raise ValueError(f"the boxes of `{name}` have different numbers of dimensions")
    return tuple(max(stop for _, stop in along) for along in zip(*boxes, strict=True))


def _common_dtype(name: str, pieces: list[Piece]) -> torch.dtype:
    tensors = [(rank, box, tensor) for rank, box, tensor in pieces if tensor is not None]
    if not tensors:
        raise ValueError(f"no tensor of `{name}` is in this process; declare it in `metas`")
    first = tensors[0]
    for rank, box, tensor in tensors:
        if tensor.dtype != first[2].dtype:
            raise ValueError(
                f"`{name}`: the shard {tuple(box)} of rank {rank} is {tensor.dtype}, that of rank "
                f"{first[0]} is {first[2].dtype}"
            )
    return first[2].dtype
