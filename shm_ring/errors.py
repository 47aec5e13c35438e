"""What can go wrong with a ring. Each text is one line, to be printed as it stands."""


class RingError(Exception):
    """The ring cannot be used: the text names the file or the slot, and the reason."""


class RingBusy(RingError):
    """Somebody alive uses this ring; the text names the run or the party."""


class RingMissing(RingError):
    """No ring at this path, or it was removed while this process used it."""


class LayoutMismatch(RingError):
    """The ring has another version, field table, slot count or boot than this process expects."""


class NoSpace(RingError):
    """The slots do not fit; the text names the number of slots that would, and what to enlarge."""


class StaleLease(RingError):
    """The lease is no longer this party's: nothing was written, and it was counted."""


class Poisoned(RingError):
    """One seq failed three times; `seq` is its number."""

    def __init__(self, text: str, seq: int) -> None:
        super().__init__(text)
        self.seq = seq


class Stopped(RingError):
    """A wait ended because the caller's `stop()` said so."""
