"""Load plans: which bytes of a checkpoint an engine needs, and where they go.

Importing registers the trace device and nothing else; a second import is harmless.
"""

from . import _library
from .files import BucketItem, FileStats, load_bucket, load_files
from .layerwise import record_metadata_for_reloading, reload_from_high_precision
from .metadata import ParamMeta, metadata
from .plan import Entry, LoadPlan, Overlap, Uncovered, Write, check_plannable, plan_loads
from .plan_files import load_plan
from .reload import (
    Coverage,
    Receipt,
    ReloadState,
    UndefinedBytes,
    abort_reload,
    finish_reload,
    load_planned,
    start_reload,
    state,
)
from .targets import Targets
from .trace import Trace, trace
from .verify import Difference, verify

__version__: str = _library.ops.version()

__all__ = [
    "BucketItem",
    "Coverage",
    "Difference",
    "Entry",
    "FileStats",
    "LoadPlan",
    "Overlap",
    "ParamMeta",
    "Receipt",
    "ReloadState",
    "Targets",
    "Trace",
    "Uncovered",
    "UndefinedBytes",
    "Write",
    "abort_reload",
    "check_plannable",
    "finish_reload",
    "load_bucket",
    "load_files",
    "load_plan",
    "load_planned",
    "metadata",
    "plan_loads",
    "record_metadata_for_reloading",
    "reload_from_high_precision",
    "start_reload",
    "state",
    "trace",
    "verify",
]
