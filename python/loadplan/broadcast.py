"""Whole tensors from one rank to all others, as engines receive them today."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._library import CODE_OF, DTYPE_OF
from ._sessions import Session, session_of
from ._steps import step
from .plan import LoadPlan
from .reload import load_planned
from .targets import Model

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGNMENT = 16  # of a tensor in its bucket, so that any dtype can be viewed
BUCKET, END, FAILED = range(3)


def broadcast_weights(
    group: ProcessGroup,
    *,
    weights: Iterable[tuple[str, Tensor]] | None = None,
    model: Model | None = None,
    plan: LoadPlan | None = None,
    source: int = 0,
    bucket_nbytes: int = 64 << 20,
) -> int:
    """Sends ``weights`` of rank ``source`` to all ranks of the group, in flat buckets.

    The source gives ``weights``, the others the ``model`` and ``plan`` that they land in, between
    `start_reload` and `finish_reload`.  Returns the bytes of tensors that were sent.  An error on
    one rank is raised on every rank when the last bucket is through; the reload has failed then.
    """
    import torch.distributed as dist

    wire = _Wire(group, source)
    if dist.get_rank(group) == source:
        sent = _send(wire, weights, model, bucket_nbytes)
        wire.compare("")
        return sent
    session: Session | None = None
    problem: Exception | None = None
    failure: Exception | None = None
    received = 0
    try:
        if model is None or plan is None or weights is not None:
            raise TypeError("a rank that receives gives its model and its plan, and no weights")
        session = session_of(model)
        with step(session, "broadcast_weights"):
            session.begin(plan)
    except Exception as error:
        problem = error
    try:
        for bucket in wire.buckets():
            received += sum(tensor.nbytes for _, tensor in bucket)
            if problem is not None or model is None or plan is None:
                continue
            try:
                load_planned(model, plan, bucket)
            except Exception as error:  # buckets go on coming; the others are told at the end
                problem = error
        wire.compare("" if problem is None else f"{type(problem).__name__}: {problem}")
    except RuntimeError as error:
        failure = error
    if problem is not None:
        raise problem
    if failure is not None and session is not None:
        with step(session, "broadcast_weights"):
            session.handle.fail(str(failure))
    return received


def _send(
    wire: _Wire,
    weights: Iterable[tuple[str, Tensor]] | None,
    model: Model | None,
    bucket_nbytes: int,
) -> int:
    sent = 0
    try:
        if weights is None or model is not None:
            raise ValueError(
                f"rank {wire.source} gives `weights` and no model, the others `model` and `plan`"
            )
        bucket = _Bucket(wire.device, bucket_nbytes)
        for name, tensor in weights:
            if not bucket.fits(tensor):
                wire.send_bucket(bucket)
            bucket.add(name, tensor)
            sent += tensor.nbytes
        if bucket.places:
            wire.send_bucket(bucket)
    except BaseException as error:
        wire.send(FAILED, f"{type(error).__name__}: {error}".encode(errors="replace"))
        raise
    wire.send(END, b"")
    return sent


class _Bucket:
    """Tensors that are sent together.  Each is copied at once: its memory may be used again."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self.places: list[tuple[str, int, list[int], int]] = []  # name, dtype, shape, start
        self.end = 0
        self._nbytes = nbytes
        self._flat = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def flat(self) -> Tensor:
        return self._flat[: self.end]

    def fits(self, tensor: Tensor) -> bool:
        return not self.places or self.end + tensor.nbytes <= self._nbytes

    def add(self, name: str, tensor: Tensor) -> None:
        start, self.end = self.end, self.end + -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if self._flat.numel() < self.end:
            # Grows to the size of a bucket, and beyond it for a tensor that is larger.
            larger = self._flat.new_empty(max(self.end, min(2 * self.end, self._nbytes)))
            larger[:start].copy_(self._flat[:start])
            self._flat = larger
        _view(self._flat, start, tensor.dtype, tuple(tensor.shape)).copy_(tensor.detach())
        self.places.append((name, CODE_OF[tensor.dtype], list(tensor.shape), start))

    def clear(self) -> None:
        self.places, self.end = [], 0


class _Wire:
    """Broadcasts of (kind, text, bytes): what comes next is said before it comes."""

    def __init__(self, group: ProcessGroup, source: int) -> None:
        self.group, self.source = group, source
        try:
            group._get_backend(torch.device("cpu"))
            self.device = torch.device("cpu")
        except RuntimeError:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _broadcast(self, tensor: Tensor) -> Tensor:
        import torch.distributed as dist

        dist.broadcast(tensor, group=self.group, group_src=self.source)
        return tensor

    def send(self, kind: int, text: bytes, payload: Tensor | None = None) -> None:
        nbytes = 0 if payload is None else payload.numel()
        self._broadcast(torch.tensor([kind, len(text), nbytes], device=self.device))
        if text:
            self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device))
        if payload is not None and nbytes:
            self._broadcast(payload)

    def send_bucket(self, bucket: _Bucket) -> None:
        self.send(BUCKET, json.dumps(bucket.places).encode(), bucket.flat)
        bucket.clear()

    def buckets(self) -> Iterator[list[tuple[str, Tensor]]]:
        while True:
            header = torch.empty(3, dtype=torch.long, device=self.device)
            kind, text_nbytes, nbytes = self._broadcast(header).tolist()
            text = torch.empty(text_nbytes, dtype=torch.uint8, device=self.device)
            if text_nbytes:
                self._broadcast(text)
            words = bytes(text.cpu().tolist())
            if kind == END:
                return
            if kind == FAILED:
                raise RuntimeError(f"rank {self.source}, which sends, failed: {words.decode()}")
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if nbytes:
                self._broadcast(flat)
            yield [
                (name, _view(flat, start, DTYPE_OF[code], tuple(shape)))
                for name, code, shape, start in json.loads(words)
            ]

    def compare(self, problem: str) -> None:
        """Raises on every rank what some rank has to say."""
        import torch.distributed as dist

        problems: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(problems, problem, group=self.group)
        for rank, text in enumerate(problems):
            if text:
                raise RuntimeError(f"rank {rank} could not land the weights: {text}")


def _view(flat: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return flat[start : start + nbytes].view(dtype).view(shape)
