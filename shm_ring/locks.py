"""Kernel locks on byte ranges of meta.bin, mutual exclusion that even SIGKILL releases.

They are open file description (OFD) locks, which belong to one `os.open`; a forked child would keep
them after its parent's death. So every child closes the descriptor, and using a ring there is a
RingError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

from .crash import crash_point
from .errors import RingBusy, RingError
from .layout import CTRL_LOCK, CTRL_NS, CTRL_OWNER

_FLOCK = struct.Struct("hhqqi4x")  # l_type, l_whence, l_start, l_len, l_pid (must be 0)
_SLOW_NS = 10_000_000
_PAUSES_S = (0.0, 0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005)

_open_files: weakref.WeakSet[LockFile] = weakref.WeakSet()


def _request(kind: int, offset: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, offset, length, 0)


class LockFile:
    """One descriptor of meta.bin and the locks taken by it; `writable=False` can only ask."""

    fd = -1

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self.fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        _open_files.add(self)

    def try_lock(self, offset: int, length: int = 1) -> bool:
        return self.apply(_request(fcntl.F_WRLCK, offset, length))

    def unlock(self, offset: int, length: int = 1) -> None:
        self.apply(_request(fcntl.F_UNLCK, offset, length))

    def apply(self, request: bytes) -> bool:
        """Sets or clears a lock without waiting. False: somebody else holds it."""
        try:
            fcntl.fcntl(self.fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise self._failure(error) from None
        except ValueError as error:  # fcntl refuses a descriptor of -1
            raise self._failure(error) from None
        return True

    def held_elsewhere(self, offset: int, length: int = 1) -> bool:
        """Whether another open file holds a lock in this range. Takes nothing."""
        request = _request(fcntl.F_WRLCK, offset, length)
        try:
            answer = fcntl.fcntl(self.fd, fcntl.F_OFD_GETLK, request)
        except (OSError, ValueError) as error:
            raise self._failure(error) from None
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def _failure(self, error: Exception) -> RingError:
        if self.fd < 0:
            return RingError(
                "this ring was left, or this process was forked from one of its parties"
            )
        return RingError(f"locking the ring's meta.bin failed: {error}")

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __del__(self) -> None:
        self.close()


def _close_in_child() -> None:
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_child)


class Control:
    """`with control:` holds CTRL, the one lock around every state change, and this process's mutex.

    Waits for a stopped holder up to the ring's limit, then raises RingBusy that names it: nothing
    else is safe. `slow` is set by a wait of more than 10 ms. Not for signal handlers.
    """

    def __init__(self, file: LockFile, meta: memoryview, party: int = -1) -> None:
        self._file, self._meta, self.party = file, meta, party
        self._mutex = threading.Lock()
        self._thread = 0
        self._take = _request(fcntl.F_WRLCK, CTRL_LOCK, 1)
        self._free = _request(fcntl.F_UNLCK, CTRL_LOCK, 1)
        self.slow = False
        self.beat: Callable[[int], None] = lambda now: None
        """Called now and then while waiting: who waits for a stopped holder is not silent."""

    def __enter__(self) -> None:
        if self._thread == threading.get_ident():
            return  # a KeyboardInterrupt at the start of __exit__ left it held: go on from there
        self._mutex.acquire()
        try:
            self._thread = threading.get_ident()
            if not self._file.apply(self._take):
                self._wait()
            self._meta[CTRL_OWNER] = os.getpid() << 32 | self.party & 0xFFFF
        except BaseException:
            self.__exit__()
            raise
        crash_point("ctrl.locked")

    def _wait(self) -> None:
        start, limit_ns = time.monotonic_ns(), self._meta[CTRL_NS]
        tries = 0
        while not self._file.apply(self._take):
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
            now = time.monotonic_ns()
            self.beat(now)
            if now - start > limit_ns:
                raise RingBusy(
                    f"process {self._meta[CTRL_OWNER] >> 32} has held the ring's lock for "
                    f"{limit_ns / 1e9:.0f} s; if it is stopped, kill -CONT or -KILL it"
                )
        self.slow |= time.monotonic_ns() - start > _SLOW_NS

    def __exit__(self, *exc_info: object) -> None:
        if self._file.fd >= 0:
            self._file.apply(self._free)
        self._thread = 0
        self._mutex.release()
        crash_point("ctrl.unlocked")
