"""The two ends of a ring. A target worker claims and publishes; a trainer takes a seq and is done.

writer = RingWriter(path, name="target_0", fields=fields)
while (lease := writer.claim()) is not None:
    fill(lease.array("ids"), plan(lease.seq))
    writer.publish(lease, total_tok=n)

reader = RingReader(path, name="trainer_0", fields=fields)
reader.rewind(first_seq)
lease = reader.take(seq)
train_on(lease.array("all"), lease.total_tok)
reader.done(lease)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from . import layout as at
from . import protocol
from .errors import RingError, StaleLease
from .layout import Field
from .liveness import READER, WAITS_FREE, WAITS_READY, WRITER
from .party import Lease, Party, Stop
from .segment import Segment
from .state import Token, is_over
from .sums import prefix_sum

_OVER = Token(-1, 0, 0, 0, 0)


class WriteLease(Lease):
    """A claimed slot, writable, to be published or aborted."""


class ReadLease(Lease):
    """A taken slot, read-only, to be acknowledged or given back."""

    def __init__(self, segment: Segment, token: Token) -> None:
        super().__init__(segment, token)
        words = segment.view.slots[token.slot]
        self.total_tok = int(words[at.TOTAL_TOK])
        if self.total_tok > segment.view.max_tokens:
            raise RingError(f"slot {token.slot} is damaged: {self.total_tok} tokens")
        self.sums = tuple(words[at.SUMS : at.SUMS + words[at.SUM_COUNT]])
        """One a field, mod 2**64; empty when the writer made none."""


class RingWriter(Party):
    """The producer's end. `verify`: seal the sums of each slot."""

    def __init__(
        self,
        path: Path | str,
        name: str,
        *,
        fields: tuple[Field, ...] | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__(path, WRITER, name, fields, writable_data=True)
        self.verify = verify

    def claim(self, stop: Stop = None) -> WriteLease | None:
        """Blocks for the next slot to fill; None when the run is over.

        Raises Poisoned, Stopped, or RingMissing when the ring was removed. `stop` is asked first,
        and at each wake-up.
        """
        token = self._wait(lambda: self._change(self._try_claim), WAITS_FREE, stop)
        return None if token is _OVER else WriteLease(self._segment, token)

    def _try_claim(self, now: int) -> Token | None:
        self._raise_if_poisoned()
        if is_over(self._view):
            return _OVER
        return protocol.claim(self._view, self.id, now)

    def publish(
        self, lease: WriteLease, *, total_tok: int, sums: Sequence[int] | None = None
    ) -> bool:
        """Makes the slot READY; its copy must have ended. Sums are made here unless given.

        False: the ring was rewound since the claim, and the slot is free again. Raises StaleLease.
        """
        assert 0 <= total_tok <= self._view.max_tokens
        if "total_tok" in self._segment.fields:
            lease.array("total_tok")[()] = total_tok
        if sums is None and self.verify:
            sums = slot_sums(lease, self.fields, total_tok, self.beat)
        done = self._change(
            lambda now: protocol.publish(self._view, lease.token, total_tok, sums, now)
        )
        if done:
            self._record.add_item(total_tok)
        self._wake(WAITS_READY if done else WAITS_FREE)
        return done

    def abort(self, lease: WriteLease) -> bool:
        """Lets go of a slot that cannot be filled; its copy must have ended. The seq is redone."""
        done = self._change(lambda now: protocol.abort(self._view, lease.token, now))
        self._wake()
        return done


class RingReader(Party):
    """The consumer's end. `verify`: check each slot's sums when it is taken."""

    def __init__(
        self,
        path: Path | str,
        name: str,
        *,
        fields: tuple[Field, ...] | None = None,
        verify: bool = True,
    ) -> None:
        super().__init__(path, READER, name, fields, writable_data=False)
        self.verify = verify
        self.epoch: int | None = None

    def rewind(self, base_seq: int) -> int:
        """The trainer starts at `base_seq`: earlier slots are void. Returns the new epoch."""
        if not 0 <= base_seq <= self.end_seq:
            raise RingError(f"cannot rewind to {base_seq}: the run has {self.end_seq} slots")
        self.epoch = self._change(lambda now: protocol.rewind(self._view, base_seq, now))
        self._wake()
        return self.epoch

    def follow(self, epoch: int) -> None:
        """For the other ranks: the epoch that rank 0's `rewind` returned."""
        self.epoch = epoch

    def take(self, seq: int, stop: Stop = None) -> ReadLease:
        """Blocks until this seq is READY. A slot with wrong sums is made again, and waited for.

        Raises Poisoned, Stopped, StaleLease (somebody rewound the ring) or RingMissing.
        """
        while True:
            token = self._wait(
                lambda: self._change(lambda now: self._try_take(seq, now)), WAITS_READY, stop
            )
            lease = ReadLease(self._segment, token)
            if not (self.verify and lease.sums) or self._sums_fit(lease):
                return lease
            self.reject(lease)

    def _try_take(self, seq: int, now: int) -> Token | None:
        epoch = int(self._view.meta[at.EPOCH])
        if self.epoch is None:
            self.epoch = epoch
        if epoch != self.epoch:
            raise StaleLease(f"the ring was rewound by another trainer: epoch {epoch}")
        token = protocol.take(self._view, seq, self.id, now)
        if token is None:
            self._raise_if_poisoned()
            tail, end = self._view.meta[at.TAIL], self._view.meta[at.END_SEQ]
            if not tail <= seq < end:
                raise RingError(f"seq {seq} will not come: the ring has {tail} to {end - 1} to go")
        return token

    def _sums_fit(self, lease: ReadLease) -> bool:
        return list(lease.sums) == slot_sums(lease, self.fields, lease.total_tok, self.beat)

    def done(self, lease: ReadLease) -> bool:
        """Acknowledges; the copy off the slot must have ended. False: rewound since; slot freed."""
        done = self._change(lambda now: protocol.done(self._view, lease.token, now))
        if done:
            self._record.add_item(lease.total_tok)
        self._wake(WAITS_FREE)
        return done

    def give_back(self, lease: ReadLease) -> bool:
        """Lets go unused: the slot is READY again."""
        done = self._change(lambda now: protocol.give_back(self._view, lease.token, now))
        self._wake()
        return done

    def reject(self, lease: ReadLease) -> bool:
        """The data is not what the seal says: the seq is made again."""
        done = self._change(lambda now: protocol.reject(self._view, lease.token, now))
        self._wake()
        return done

    def close_run(self) -> None:
        """The trainer's last act, after its final checkpoint: target workers may end."""
        epoch = self.epoch
        if epoch is None or not self._change(lambda _: protocol.close(self._view, epoch)):
            raise StaleLease("the ring was rewound by another trainer: it is not ours to close")
        self._wake()


def slot_sums(
    lease: Lease, fields: Sequence[Field], total_tok: int, tick: Callable[[], None]
) -> list[int]:
    """One sum a field, over its valid prefix."""
    return [
        prefix_sum(lease.buffer(field.name), field.valid_bytes(total_tok), tick) for field in fields
    ]
