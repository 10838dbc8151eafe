"""What a host needs to know of the work that an update has put on a GPU's stream."""

from __future__ import annotations

import torch

from ._sessions import Session


def record_event(session: Session) -> torch.cuda.Event | None:
    """An event behind all that was put on the current streams of the targets' GPUs so far."""
    if not session.gpus:
        return None
    stream, *others = [torch.cuda.current_stream(gpu) for gpu in session.gpus]
    for other in others:
        stream.wait_stream(other)
    event: torch.cuda.Event = stream.record_event()
    return event
