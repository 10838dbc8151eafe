"""What a host needs to know of the work that an update has put on a GPU's stream."""

from __future__ import annotations

import torch

from ._sessions import Session


def record_event(session: Session) -> torch.cuda.Event | None:
    """An event behind all that was put on the current stream of the targets' GPU so far."""
    if session.gpu is None:
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(session.gpu).record_event()
    return event
