"""The errors that only pagedkv raises. Each is also the standard error that a caller who does not know us would catch."""


class PagedKVError(Exception):
    """Base of them all."""


class CapacityError(PagedKVError, ValueError):
    """No room now; the message has need and have. Nothing was changed."""


class NotFiniteError(PagedKVError, ValueError):
    """NaN or infinity in keys or values; the message says where."""


class StaleError(PagedKVError, LookupError):
    """The sequence has been released, the plan's step has ended, or what a plan reads has changed."""


class UnsupportedError(PagedKVError, NotImplementedError):
    """Well-formed, but this build does not do it."""


class CorruptError(PagedKVError, ValueError):
    """Bytes that contradict themselves or their header."""


class UnavailableError(PagedKVError, RuntimeError):
    """The system refused I/O or a thread, or the engine has ended."""


class NoMemoryError(PagedKVError, MemoryError):
    """The system, or the cgroup, gave no more memory. Nothing was changed."""
