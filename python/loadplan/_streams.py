"""What a host needs to know of the work that an update has put on a GPU's stream."""

from __future__ import annotations

import torch

from .targets import Targets


def record_event(targets: Targets) -> torch.cuda.Event | None:
    """An event behind all that was put on the current stream of the targets' GPU so far."""
    _, tensors = targets.lists()
    device = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
    if device is None:
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event
