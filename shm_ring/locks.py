"""Kernel locks on byte ranges of meta.bin (open file description locks): mutual exclusion that SIGKILL releases.

An OFD lock belongs to one `os.open`, so a forked child would keep it after its parent's death: the descriptor is
closed in every child, and a child that goes on using the ring gets a RingError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
import time
import weakref
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
    """One descriptor of meta.bin that holds this party's locks. `writable=False` can only ask, not lock."""

    def __init__(self, path: Path, *, writable: bool = True) -> None:
        self.fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
        _open_files.add(self)

    def try_lock(self, offset: int, length: int = 1) -> bool:
        return self._set(_request(fcntl.F_WRLCK, offset, length))

    def unlock(self, offset: int, length: int = 1) -> None:
        self._set(_request(fcntl.F_UNLCK, offset, length))

    def _set(self, request: bytes) -> bool:
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
        """Whether another open file holds a lock in this range. Takes nothing, needs no write permission."""
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
    """`with control:` holds CTRL, the one lock around every state change, against processes and threads.

    Waits for a stopped holder up to the ring's limit, then raises RingBusy that names it: nothing else is safe.
    `waits` counts the holds that took longer than 10 ms to get.
    """

    def __init__(self, file: LockFile, meta: memoryview, party: int = 0) -> None:
        self._file, self._meta, self.party = file, meta, party
        self._mutex = threading.Lock()
        self._thread = 0
        self._take = _request(fcntl.F_WRLCK, CTRL_LOCK, 1)
        self._free = _request(fcntl.F_UNLCK, CTRL_LOCK, 1)
        self.waits = 0

    def __enter__(self) -> None:
        # A KeyboardInterrupt at the first instruction of __exit__ leaves both locks held: the same thread takes over.
        if self._thread == threading.get_ident():
            return
        self._mutex.acquire()
        try:
            self._thread = threading.get_ident()
            if not self._file._set(self._take):
                self._wait()
            self._meta[CTRL_OWNER] = os.getpid() << 32 | self.party + 1
        except BaseException:
            self.__exit__()
            raise
        crash_point("ctrl.locked")

    def _wait(self) -> None:
        start = time.monotonic_ns()
        tries = 0
        while not self._file._set(self._take):
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
            if time.monotonic_ns() - start > max(self._meta[CTRL_NS], _SLOW_NS):
                raise RingBusy(
                    f"process {self._meta[CTRL_OWNER] >> 32} (party {(self._meta[CTRL_OWNER] & 255) - 1}) "
                    f"holds the ring's lock for {self._meta[CTRL_NS] / 1e9:.0f} s: stopped? kill -KILL it"
                )
        self.waits += time.monotonic_ns() - start > _SLOW_NS

    def __exit__(self, *exc_info: object) -> None:
        self._file._set(self._free)
        self._thread = 0
        self._mutex.release()
        crash_point("ctrl.unlocked")
