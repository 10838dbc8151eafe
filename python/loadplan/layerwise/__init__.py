"""Layerwise reloads: layers whose kernel format is not their load format."""

from .mode import Layerwise
from .record import record_metadata_for_reloading
from .whole import reload_from_high_precision

__all__ = ["Layerwise", "record_metadata_for_reloading", "reload_from_high_precision"]
