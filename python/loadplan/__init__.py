"""Load plans: which bytes of a checkpoint an engine needs, and where they go.

Importing registers the trace device and nothing else; a second import is harmless.
"""

from . import _library
from .broadcast import broadcast_weights
from .files import BucketItem, FileStats, load_bucket, load_files
from .layerwise import record_metadata_for_reloading, reload_from_high_precision
from .layout import ParallelLayout
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
from .shards import Shards
from .targets import Targets
from .trace import Trace, trace
from .transfer import (
    ExchangeReceipt,
    ShardSchedule,
    SharedRead,
    Traffic,
    exchange_shards,
    load_files_together,
    load_shards,
    receive_shards,
    schedule_shards,
    send_shards,
)
from .verify import Difference, verify

__version__: str = _library.ops.version()

__all__ = [
    "BucketItem",
    "Coverage",
    "Difference",
    "Entry",
    "ExchangeReceipt",
    "FileStats",
    "LoadPlan",
    "Overlap",
    "ParallelLayout",
    "ParamMeta",
    "Receipt",
    "ReloadState",
    "ShardSchedule",
    "SharedRead",
    "Shards",
    "Targets",
    "Trace",
    "Traffic",
    "Uncovered",
    "UndefinedBytes",
    "Write",
    "abort_reload",
    "broadcast_weights",
    "check_plannable",
    "exchange_shards",
    "finish_reload",
    "load_bucket",
    "load_files",
    "load_files_together",
    "load_plan",
    "load_planned",
    "load_shards",
    "metadata",
    "plan_loads",
    "record_metadata_for_reloading",
    "reload_from_high_precision",
    "receive_shards",
    "schedule_shards",
    "send_shards",
    "start_reload",
    "state",
    "trace",
    "verify",
]
