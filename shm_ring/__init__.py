"""A ring of fixed-shape slots in shared files: N writers, M readers, any of which may die anywhere.

It knows nothing of models. docs/ring.md has the byte layout and the table of states.
"""

from .creation import clear_closed, create
from .errors import (
    LayoutMismatch,
    NoSpace,
    Poisoned,
    RingBusy,
    RingError,
    RingMissing,
    StaleLease,
    Stopped,
)
from .inspect import PartyView, RingSnapshot, SlotView, rates, snapshot
from .layout import Field, hidden_state_fields, ring_bytes
from .remove import Leftover, destroy, leftovers, sweep
from .repair import Reaped, drain, reap
from .ring import ReadLease, RingReader, RingWriter, WriteLease
from .space import free_bytes

__all__ = [
    "Field",
    "LayoutMismatch",
    "Leftover",
    "NoSpace",
    "PartyView",
    "Poisoned",
    "ReadLease",
    "Reaped",
    "RingBusy",
    "RingError",
    "RingMissing",
    "RingReader",
    "RingSnapshot",
    "RingWriter",
    "SlotView",
    "StaleLease",
    "Stopped",
    "WriteLease",
    "clear_closed",
    "create",
    "destroy",
    "drain",
    "free_bytes",
    "hidden_state_fields",
    "leftovers",
    "rates",
    "reap",
    "ring_bytes",
    "snapshot",
    "sweep",
]
