"""The bytes of a ring: meta.bin, ready.bin, the field table and every size. No I/O.

Everything is little-endian and 8-byte aligned. A position in CAPITALS is an index of u64 words in
its file, unless it says bytes. docs/ring.md is the prose.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

from .errors import LayoutMismatch, RingError

MAGIC = int.from_bytes(b"DFLRING\x01", "little")
VERSION = 1
PAGE = 4096
META_BYTES = READY_BYTES = PAGE
MAX_SLOTS, MAX_FIELDS, MAX_PARTIES = 4096, 16, 32

# meta.bin: the four words that the user prescribed, then ours
HEAD, TAIL, SLOT_COUNT, SLOT_SIZE = range(4)
MAGIC_WORD, VERSION_WORD, LAYOUT_HASH, RING_ID = range(4, 8)
EPOCH, SETTLED, BASE_SEQ, END_SEQ, CLOSED = range(8, 13)
FIELD_COUNT, QUARANTINE_NS, SUSPECT_NS, REAP_NS, CTRL_NS = range(13, 18)
CREATED_NS, CREATOR, CREATOR_START, BOOT_ID, BOOT_ID_2 = range(18, 23)
CTRL_OWNER, REAPED_NS = range(23, 25)
NAME_BYTES = slice(256, 320)
TABLE_AT, TABLE_ENTRY = 320, struct.Struct("<16sBBBx3I")
PARTY_AT, PARTY_BYTES = 1024, 64
COUNTER_AT, COUNTER_WORDS = 3072 // 8, 3
OCCUPANCY_NOTED, OCCUPANCY, OCCUPANCY_BUCKETS = 3840 // 8, 3848 // 8, 9

# one party record, words from its start
P_STATE, P_START, P_HEARTBEAT, P_ITEMS, P_WAITED, P_TOKENS, P_NAME = range(7)
P_NAME_BYTES = 16

# ready.bin: word, seq, epoch; from byte 64 the seal
WORD, SEQ, SLOT_EPOCH = range(3)
SEAL_GENERATION, SEAL_SEQ, SEAL_EPOCH, TOTAL_TOK, FAILURES, DELIVERIES = range(8, 14)
CLAIMED_NS, PUBLISHED_NS, TAKEN_NS, CHANGED_NS, DEADLINE_NS, SUM_COUNT = range(14, 20)
SUMS = 20

# byte offsets of the kernel locks on meta.bin, all beyond its end; every layout version keeps them
CTRL_LOCK, REAPER_LOCK, PIN_LOCK, OWNER_LOCK, PARTY_LOCK = 4096, 4097, 4098, 4099, 8192

DTYPES = {"bf16": (1, 2), "f32": (2, 4), "i64": (3, 8), "bool": (4, 1)}
"""Name: (code in the table, bytes)."""
_DTYPE_NAMES = {code: name for name, (code, _) in DTYPES.items()}


@dataclass(frozen=True)
class Field:
    """One data file of a slot. `per_token`: of shape [1, T, ...], only total_tok rows are valid."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_token: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype][1]

    def valid_bytes(self, total_tok: int) -> int:
        return self.nbytes // self.shape[1] * total_tok if self.per_token else self.nbytes

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


def hidden_state_fields(
    *, max_tokens: int, max_docs: int, taps_width: int, hidden: int, dtype: str, vlh: bool
) -> tuple[Field, ...]:
    """The files of a slot of hidden states, in order. `taps_width`: n_taps * hidden."""
    states = [Field("all", dtype, (1, max_tokens, taps_width), per_token=True)]
    if vlh:
        states.append(Field("vlh", dtype, (1, max_tokens, hidden), per_token=True))
    return (
        *states,
        Field("ids", "i64", (1, max_tokens), per_token=True),
        Field("lm", "bool", (1, max_tokens), per_token=True),
        Field("lens", "i64", (max_docs,)),
        Field("pos", "i64", (1, max_tokens), per_token=True),
        Field("total_tok", "i64", ()),
    )


def check_fields(fields: tuple[Field, ...]) -> None:
    """Raises RingError for a table that no ring can have."""
    names = [field.name for field in fields]
    if not 1 <= len(fields) <= MAX_FIELDS or len(set(names)) != len(names):
        raise RingError(f"a ring has 1 to {MAX_FIELDS} fields of different names, not {names}")
    tokens = {field.shape[1] for field in fields if field.per_token and len(field.shape) > 1}
    for field in fields:
        if not field.name.isidentifier() or len(field.name) > 15 or field.name in ("ready", "meta"):
            raise RingError(f"{field.name!r} cannot be a field's name")
        if field.dtype not in DTYPES:
            raise RingError(f"{field.name}: dtype {field.dtype!r} is none of {sorted(DTYPES)}")
        if len(field.shape) > 3 or any(not 1 <= size < 2**32 for size in field.shape):
            raise RingError(
                f"{field.name}: shape {list(field.shape)} needs 0 to 3 sizes of 1 or more"
            )
        if field.per_token and (len(field.shape) < 2 or field.shape[0] != 1 or len(tokens) != 1):
            raise RingError(f"{field.name}: a per-token shape is [1, T, ...] with one T for all")


def slot_size(fields: tuple[Field, ...]) -> int:
    """Bytes of the data files of one slot."""
    return sum(field.nbytes for field in fields)


def max_tokens(fields: tuple[Field, ...]) -> int:
    """T, the rows of the per-token fields; 0 without one."""
    return next((field.shape[1] for field in fields if field.per_token), 0)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


def slot_bytes(fields: tuple[Field, ...]) -> int:
    """What one slot takes of the tmpfs."""
    return READY_BYTES + sum(_whole_pages(field.nbytes) for field in fields)


def ring_bytes(fields: tuple[Field, ...], slots: int) -> int:
    """What a ring takes of the tmpfs: meta.bin, the slots and a page for each party's semaphore."""
    return META_BYTES + slots * slot_bytes(fields) + MAX_PARTIES * PAGE


def pack_table(fields: tuple[Field, ...]) -> bytes:
    rows = []
    for field in fields:
        shape = (*field.shape, 0, 0, 0)[:3]
        code = DTYPES[field.dtype][0]
        rows.append(
            TABLE_ENTRY.pack(
                field.name.encode(), code, len(field.shape), int(field.per_token), *shape
            )
        )
    return b"".join(rows)


def unpack_table(table: bytes, count: int) -> tuple[Field, ...]:
    """Raises RingError for bytes that are no field table."""
    fields = []
    for row in range(count):
        name, code, ndim, per_token, *shape = TABLE_ENTRY.unpack_from(table, row * TABLE_ENTRY.size)
        if code not in _DTYPE_NAMES or ndim > 3:
            raise RingError(f"entry {row} of the field table is garbage")
        text = name.rstrip(b"\0").decode("ascii", errors="replace")
        fields.append(Field(text, _DTYPE_NAMES[code], tuple(shape[:ndim]), bool(per_token)))
    check_fields(tuple(fields))
    return tuple(fields)


def layout_hash(slots: int, table: bytes) -> int:
    """First 8 bytes of SHA-256 over version, slot count and the used part of the field table."""
    digest = hashlib.sha256(struct.pack("<QQ", VERSION, slots) + table).digest()
    return int.from_bytes(digest[:8], "little")


@dataclass(frozen=True)
class Header:
    """What of meta.bin never changes while a ring lives."""

    run_name: str
    ring_id: int
    slots: int
    fields: tuple[Field, ...]
    boot_id: bytes


def words(buffer: bytes | bytearray | memoryview) -> memoryview:
    return memoryview(buffer).cast("Q")


def parse_header(meta: bytes | memoryview, path: object) -> Header:
    """Raises LayoutMismatch: no ring, or another version; RingError: damaged."""
    if len(meta) != META_BYTES:
        raise LayoutMismatch(f"{path}/meta.bin has {len(meta)} bytes, not {META_BYTES}: no ring")
    word = struct.unpack_from("<25Q", meta)
    if word[MAGIC_WORD] != MAGIC:
        raise LayoutMismatch(f"{path}/meta.bin has no ring's magic number: no ring")
    if word[VERSION_WORD] != VERSION:
        raise LayoutMismatch(
            f"{path} has layout version {word[VERSION_WORD]}, this program {VERSION}: "
            "end its run and destroy it"
        )
    slots, count = word[SLOT_COUNT], word[FIELD_COUNT]
    if not 1 <= slots <= MAX_SLOTS or not 1 <= count <= MAX_FIELDS:
        raise RingError(f"{path}/meta.bin is damaged: {slots} slots, {count} fields")
    table = bytes(meta[TABLE_AT : TABLE_AT + count * TABLE_ENTRY.size])
    if layout_hash(slots, table) != word[LAYOUT_HASH]:
        raise RingError(f"{path}/meta.bin is damaged: its layout hash does not fit its field table")
    fields = unpack_table(table, count)
    if slot_size(fields) != word[SLOT_SIZE] or max(word[QUARANTINE_NS : CTRL_NS + 1]) >= 2**42:
        raise RingError(f"{path}/meta.bin is damaged: slot_size {word[SLOT_SIZE]}, or a timeout")
    name = bytes(meta[NAME_BYTES]).rstrip(b"\0").decode(errors="replace")
    return Header(name, word[RING_ID], slots, fields, bytes(meta[BOOT_ID * 8 : BOOT_ID * 8 + 16]))


def check_same_table(
    path: object, run_name: str, ring: tuple[Field, ...], mine: tuple[Field, ...]
) -> None:
    """Raises LayoutMismatch that names the first field which differs."""
    for index in range(max(len(ring), len(mine))):
        there = ring[index] if index < len(ring) else None
        here = mine[index] if index < len(mine) else None
        if there != here:
            raise LayoutMismatch(
                f"{path} (run {run_name!r}) holds {there or 'no further field'}, this process "
                f"expects {here or 'no further field'}: use one config for both, or another ring"
            )
