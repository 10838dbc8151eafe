"""Whole tensors from one rank to all others, as engines receive them today."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ._library import CODE_OF, DTYPE_OF, classes
from ._sessions import Session, session_of
from ._steps import step
from .plan import LoadPlan
from .reload import checked_item, load_planned
from .targets import Model
from .transfer import boxed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ALIGNMENT = 16  # of a tensor in its bucket, so that any dtype can be viewed
BUCKET, END, FAILED = range(3)


def broadcast_weights(
    group: ProcessGroup,
    *,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None = None,
    model: Model | None = None,
    plan: LoadPlan | None = None,
    source: int = 0,
    bucket_nbytes: int = 64 << 20,
    timeout: float | None = None,
) -> int:
    """Sends ``weights`` of rank ``source`` to all ranks of the group, in flat buckets.

    The source gives ``weights``, as `load_planned` takes them, the others the ``model`` and
    ``plan`` that they land in, between `start_reload` and `finish_reload`.  Returns the bytes of
    tensors that were sent.

    An error on one rank is raised on every rank: before the first bucket where a rank cannot take
    part, when the last one is through where it could not land one.  A rank that is gone, or gives
    no sign for ``timeout`` seconds (default: the time-out of the group), is an error on all others;
    the group is not used again then.  After any error the reload has failed.
    """
    import torch.distributed as dist

    wire = _Wire(group, source, timeout)
    if dist.get_rank(group) == source:
        return _send(wire, weights, model, bucket_nbytes)
    session: Session | None = None
    try:
        if model is None or plan is None or weights is not None:
            raise TypeError("a rank that receives gives its model and its plan, and no weights")
        session = session_of(model)
        with step(session, "broadcast_weights"):
            session.begin(plan)
    except Exception as error:
        with suppress(RuntimeError):
            wire.peers.agree(_words(error), False)
        raise
    try:
        wire.peers.agree("", True)
        return _receive(wire, model, plan)
    except Exception as error:
        if session.state == "active":
            with step(session, "broadcast_weights"):
                session.handle.fail(str(error))
        raise


def _receive(wire: _Wire, model: Model, plan: LoadPlan) -> int:
    received = 0
    problem: Exception | None = None
    try:
        for bucket in wire.buckets():
            received += sum(tensor.nbytes for _, tensor in bucket)
            if problem is not None:
                continue
            try:
                load_planned(model, plan, bucket)
            except Exception as error:  # buckets go on coming; the others are told at the end
                problem = error
    except _SenderFailed as error:
        raise problem or error from None
    except BaseException as error:
        # Of a broadcast that failed all ranks know; of memory for a bucket, or a signal, they hear.
        wire.peers.fail(_words(error))
        if isinstance(error, Exception) and problem is not None:
            raise problem from None
        raise
    try:
        wire.peers.agree(_words(problem), False)
    except RuntimeError as error:
        raise problem or error from None
    return received


def _send(
    wire: _Wire,
    weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
    model: Model | None,
    bucket_nbytes: int,
) -> int:
    if weights is None or model is not None:
        error = ValueError(
            f"rank {wire.source} gives `weights` and no model, the others `model` and `plan`"
        )
        with suppress(RuntimeError):
            wire.peers.agree(_words(error), False)
        raise error
    wire.peers.agree("", True)
    sent = 0
    bucket = _Bucket(wire.device, bucket_nbytes)
    try:
        for item in weights.items() if isinstance(weights, Mapping) else weights:
            name, tensor = checked_item(item)
            if not bucket.fits(tensor):
                wire.send_bucket(bucket)
            bucket.add(name, tensor)
            sent += tensor.nbytes
        if bucket.places:
            wire.send_bucket(bucket)
    except BaseException as error:
        wire.send_failure(_words(error))
        raise
    try:
        wire.send(END, b"")
    except RuntimeError:  # all ranks know
        raise
    except BaseException as error:  # a signal, which waited for the end of the broadcast
        with suppress(RuntimeError):
            wire.peers.agree(_words(error), False)
        raise
    wire.peers.agree("", False)
    return sent


class _SenderFailed(RuntimeError):
    """All ranks have come to this one between two messages: the group is as it was."""


def _words(error: BaseException | None) -> str:
    if error is None:
        return ""
    # A path may hold bytes that no text has.
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()


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

    def __init__(self, group: ProcessGroup, source: int, timeout: float | None) -> None:
        self.source = source
        self._is_half_sent = False
        handle = boxed(group)
        try:
            self.peers: Any = classes.Peers(handle, 0.0 if timeout is None else timeout)
        except (TypeError, ValueError, RuntimeError) as error:  # the others wait for this rank
            with suppress(RuntimeError):
                classes.Peers(handle, 0.0).agree(_words(error), False)
            raise
        try:
            group._get_backend(torch.device("cpu"))
            self.device = torch.device("cpu")
        except RuntimeError:
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _broadcast(self, tensor: Tensor) -> Tensor:
        self.peers.broadcast(tensor, self.source)
        return tensor

    def send(self, kind: int, text: bytes, payload: Tensor | None = None) -> None:
        nbytes = 0 if payload is None else payload.numel()
        self._is_half_sent = True
        self._broadcast(torch.tensor([kind, len(text), nbytes], device=self.device))
        if text:
            self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self.device))
        if payload is not None and nbytes:
            self._broadcast(payload)
        self._is_half_sent = False

    def send_failure(self, words: str) -> None:
        """In place of what the others wait for, unless they wait for the rest of a message."""
        if self._is_half_sent:
            self.peers.fail(words)
            return
        with suppress(RuntimeError):
            self.send(FAILED, words.encode())

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
                raise _SenderFailed(f"rank {self.source}, which sends, failed: {words.decode()}")
            flat = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            if nbytes:
                self._broadcast(flat)
            yield [
                (name, _view(flat, start, DTYPE_OF[code], tuple(shape)))
                for name, code, shape, start in json.loads(words)
            ]


def _view(flat: Tensor, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return flat[start : start + nbytes].view(dtype).view(shape)
