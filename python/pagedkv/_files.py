"""Files that are there whole or not at all."""

import contextlib
import fcntl
import os
import tempfile


def _remove_left(folder, name):
    """What saves that were killed have left: temporary files of this name that nobody holds locked."""
    for entry in os.listdir(folder):
        if not (entry.startswith(f".{name}.") and entry.endswith(".tmp")):
            continue
        with contextlib.suppress(OSError), open(os.path.join(folder, entry), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(file.name)


@contextlib.contextmanager
def whole_file(path):
    """A file to write that takes the place of `path` at the end; on an error nothing has happened. Only the owner may
    read it."""
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    _remove_left(folder, name)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            fcntl.flock(handle, fcntl.LOCK_EX)  # as long as we live
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    # The name itself is on the disk only once its folder is.
    folder_handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(folder_handle)
    finally:
        os.close(folder_handle)
