"""Safetensors files that are checked whole before anything of them is used.

Their metadata say what the file is and in which version, hold JSON values of the writer's, and a SHA-256 of header and
rows, made with zeros in the digest's own place. Written and read piece by piece: rows are never in memory twice.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ._files import whole_file

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8}
_MOST_HEADER_BYTES = 1 << 26
_BYTES_AT_ONCE = 1 << 18
_NO_DIGEST = b"0" * 64


class Tensor(NamedTuple):
    dtype: str  # a key of _TYPES
    shape: tuple
    pieces: Iterable = ()  # its bytes, in order: contiguous buffers


def write(path, kind, version, about, tensors):
    """Writes a file of this kind, whole or not at all.

      about    name -> JSON value
      tensors  name -> Tensor

    Errors: ValueError (a header of more bytes than are read again), OSError; a file that was there is as it was.
    """
    metadata = {"format": kind, "version": str(version), "sha256": _NO_DIGEST.decode()}
    metadata.update((name, json.dumps(value)) for name, value in about.items())
    header, end = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        start, end = end, end + _bytes_of(tensor)
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that rows are aligned
    if len(text) > _MOST_HEADER_BYTES:
        raise ValueError(f"[save] {path}: the header has {len(text)} bytes, at most {_MOST_HEADER_BYTES} are allowed")
    digest = hashlib.sha256(text)
    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            for piece in tensor.pieces:
                digest.update(piece)
                file.write(piece)
        file.seek(8)
        file.write(text.replace(_NO_DIGEST, digest.hexdigest().encode(), 1))


class File:
    """A file of this kind and version, found whole and undamaged; close it, or use it with `with`.

      about    name -> JSON value, as written
      tensors  name -> Tensor, without pieces; all their bytes are there

    Errors: FileNotFoundError; ValueError, which names the path.
    """

    def __init__(self, path, kind, version):
        self._path = path
        self._file = open(path, "rb")
        try:
            self._check(kind, version)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._file.close()

    def rows(self, name, first=0, n=None):
        """Rows [first, first + n) of a tensor, by default all; bfloat16 as uint16."""
        dtype, shape, _ = self.tensors[name]
        rows = np.empty((shape[0] - first if n is None else n, *shape[1:]), _TYPES[dtype])
        self._file.seek(self._starts[name] + first * _bytes_of(Tensor(dtype, shape[1:])))
        if self._file.readinto(rows) != rows.nbytes:
            raise ValueError(f"[load] {self._path}: cut short while it was read")
        return rows

    def _check(self, kind, version):
        size = os.fstat(self._file.fileno()).st_size
        if size < 8:
            raise ValueError(f"[load] {self._path}: no safetensors file: it has {size} bytes")
        header_bytes, = struct.unpack("<Q", self._file.read(8))
        if header_bytes > min(size - 8, _MOST_HEADER_BYTES):
            raise ValueError(f"[load] {self._path}: cut short, or no safetensors file: a header of {header_bytes} bytes, "
                             f"{size} in all")
        text = self._file.read(header_bytes)
        try:
            header = json.loads(text)
            metadata = header.pop("__metadata__", None) or {}
            found = metadata.pop("format", None), metadata.pop("version", None), metadata.pop("sha256", None)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"[load] {self._path}: damaged header, or no safetensors file: {error}") from error
        if found[0] != kind:
            raise ValueError(f"[load] {self._path}: not a file of {kind}: its format is {found[0]!r}")
        if found[1] != str(version):
            raise ValueError(f"[load] {self._path}: format version {found[1]}, this build reads {version}")
        try:
            end = self._take(header, metadata, 8 + header_bytes)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"[load] {self._path}: damaged header: {type(error).__name__}: {error}") from error
        if size != end:
            raise ValueError(f"[load] {self._path}: cut short or damaged: {size} bytes, its header says {end}")
        digest = hashlib.sha256(text.replace(str(found[2]).encode(), _NO_DIGEST, 1))
        while piece := self._file.read(_BYTES_AT_ONCE):
            digest.update(piece)
        if digest.hexdigest() != found[2]:
            raise ValueError(f"[load] {self._path}: damaged: SHA-256 is {digest.hexdigest()}, the file says {found[2]}")

    def _take(self, header, metadata, start):
        """Reads what the header says; rows begin at `start`. Returns where they end."""
        self.about = {name: json.loads(value) for name, value in metadata.items()}
        self.tensors, self._starts, end = {}, {}, start
        for name, entry in header.items():
            tensor = Tensor(entry["dtype"], tuple(entry["shape"]))
            if not tensor.shape or any(type(n) is not int or n < 0 for n in tensor.shape):
                raise ValueError(f"{name} has shape {entry['shape']}")
            self.tensors[name], self._starts[name] = tensor, end
            expected = [end - start, end - start + _bytes_of(tensor)]
            if entry["data_offsets"] != expected:
                raise ValueError(f"{name} is at {entry['data_offsets']}, expected {expected}")
            end = start + expected[1]
        return end


def _bytes_of(tensor):
    return np.dtype(_TYPES[tensor.dtype]).itemsize * math.prod(tensor.shape)
