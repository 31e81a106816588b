"""Locks that a fork waits for: no thread is inside when the process is copied, and the child finds them open."""

import os
import weakref
from _thread import RLock

_all = weakref.WeakSet()
_forking = RLock()
_held = []


def fork_safe_lock():
    """A lock that may be taken again by the thread that has it."""
    lock = RLock()
    with _forking:
        _all.add(lock)
    return lock


def _before_fork():
    _forking.acquire()
    for lock in _all:
        lock.acquire()
        _held.append(lock)


def _after_fork():
    while _held:
        _held.pop().release()
    _forking.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
