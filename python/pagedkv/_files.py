"""Files that are there whole or not at all."""

import contextlib
import os
import tempfile


@contextlib.contextmanager
def whole_file(path):
    """A file to write that takes the place of `path` at the end; on an error nothing has happened. Only the owner may
    read it."""
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
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
