"""A PagedCache in a file: rows and scales as they are stored.

The file: magic, version, size of the header, header (JSON), rows, SHA-256 of all before.
"""

import hashlib
import json
import os
import struct

import torch

import pagedkv

from .._core import parse_kv_quant
from .._files import whole_file
from .shapes import mode_of

# Rows of a prompt that are gathered or scattered at a time.
_ROWS_AT_ONCE = 512


def save(cache, path):
    """PagedCache.save."""
    cache._settle()
    if not cache._columns:
        raise ValueError(f"[save] {path}: the cache is empty")
    header = {"identity": cache._identity, "fingerprint": cache._fingerprint, "kv_quant": cache._kv_quant,
              "columns": cache._columns, "skipped": cache._skipped}
    header["payload_bytes"] = sum(n for *_, n in _pieces(cache, header))
    with whole_file(path) as plain:
        file = _HashedFile(plain)
        _write_header(file, header)
        for row, layer, first, n_rows, _ in _pieces(cache, header):
            if n_rows:
                for rows in _gather(cache, row, layer, first, n_rows):
                    file.write(rows)
        plain.write(file.digest())


def load(cls, path, config, kv_quant, fingerprint, options):
    """PagedCache.load."""
    with open(path, "rb") as file:
        header, payload = _read_header(file, path)
        cache = cls(config, header["kv_quant"], fingerprint=fingerprint, **options)
        _refuse_other(cache, path, header, kv_quant)
        _restore(cache, file, payload, header)
    return cache


def _pieces(cache, header):
    """The payload, in order: (row, layer, first position, positions, bytes)."""
    for row, skipped in enumerate(header["skipped"]):
        length = header["columns"] - skipped
        for layer, shape in cache._shapes.items():
            first = max(length - shape.window + 1, 0) if shape.window else 0
            per_token = pagedkv.bytes_per_token(header["kv_quant"], shape.num_kv_heads, shape.head_dim,
                                                shape.head_dim_v)
            yield row, layer, first, length - first, (length - first) * per_token


def _views(cache, layer):
    """Views of a layer's blocks as tensors [num_blocks, block_size, num_kv_heads, width]: K, V, then scales."""
    tensors = cache._core.tensors(layer)
    views = (tensors.k, tensors.v, tensors.k_scales, tensors.v_scales)
    return [torch.from_dlpack(view) for view in views if view is not None]


def _gather(cache, row, layer, first, n):
    """The stored bytes of n positions from `first` on, part after part."""
    plan = cache._core.plan_read([(cache._sequences[row], 1)])
    table = torch.from_numpy(plan.block_tables(cache._group_of[layer])[0]).long()
    for view in _views(cache, layer):
        for start in range(first, first + n, _ROWS_AT_ONCE):
            positions = torch.arange(start, min(start + _ROWS_AT_ONCE, first + n))
            rows = view[table[positions // cache._core.block_size], positions % cache._core.block_size]
            yield rows.contiguous().view(torch.uint8).numpy().data


def _refuse_other(cache, path, header, kv_quant):
    for name, own in cache._identity.items():
        if header["identity"].get(name) != own:
            raise ValueError(f"[load] {path}: {name} is {header['identity'].get(name)} in the file, {own} in the "
                             "config")
    if header["fingerprint"] != cache._fingerprint:
        raise ValueError(f"[load] {path}: the fingerprint is {header['fingerprint']!r} in the file, "
                         f"{cache._fingerprint!r} was given: another model's weights")
    if kv_quant is not None and mode_of(kv_quant) != header["kv_quant"]:
        raise ValueError(f"[load] {path}: kv_quant is {header['kv_quant']} in the file, {mode_of(kv_quant)} was "
                         "asked for; stored rows are not converted")
    longest = header["columns"] - min(header["skipped"])
    if 0 < cache._options.get("max_context", 0) < longest:
        raise ValueError(f"[load] {path}: {longest} tokens in the file, max_context is "
                         f"{cache._options['max_context']}")
    expected = sum(n for *_, n in _pieces(cache, header))
    if expected != header["payload_bytes"]:
        raise ValueError(f"[load] {path}: {header['payload_bytes']} bytes of rows, its lengths need {expected}")


def _restore(cache, file, payload, header):
    cache._open(len(header["skipped"]), 0, None)
    starts = {}
    for row, layer, first, n, n_bytes in _pieces(cache, header):
        starts[row, layer] = (first, n, payload)
        payload += n_bytes
    for row, (sequence, skipped) in enumerate(zip(cache._sequences, header["skipped"])):
        length = header["columns"] - skipped
        for position in range(0, length, _ROWS_AT_ONCE):
            n = min(_ROWS_AT_ONCE, length - position)
            # Positions that a window has left behind are never read: their slots stay as they are.
            with cache._core.reserve([(sequence, n)]) as plan:
                for layer in cache._shapes:
                    _scatter(cache, file, plan, layer, position, n, *starts[row, layer])
    cache._columns, cache._skipped = header["columns"], list(header["skipped"])


def _scatter(cache, file, plan, layer, position, n, first, n_saved, start):
    """Fills a step's slots from the file: positions [position, position + n) of those saved from `first` on."""
    begin, end = max(position, first), position + n
    if begin >= end:
        return
    slots = torch.from_numpy(plan.slot_mapping(cache._group_of[layer]))[begin - position:]
    for view in _views(cache, layer):
        row_bytes = view.shape[2] * view.shape[3] * view.element_size()
        file.seek(start + (begin - first) * row_bytes)
        rows = torch.frombuffer(bytearray(file.read((end - begin) * row_bytes)), dtype=torch.uint8)
        rows = rows.view(view.dtype).view(end - begin, view.shape[2], view.shape[3])
        view[slots // cache._core.block_size, slots % cache._core.block_size] = rows
        start += n_saved * row_bytes


_MAGIC = b"PAGEDKVH"
_VERSION = 1
_PREFIX = struct.Struct("<8sIQ")
_MOST_HEADER_BYTES = 1 << 20


class _HashedFile:
    def __init__(self, file):
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data):
        self._digest.update(data)
        self._file.write(data)

    def digest(self):
        return self._digest.digest()


def _write_header(file, header):
    text = json.dumps(header).encode()
    if len(text) > _MOST_HEADER_BYTES:
        raise ValueError(f"[save] the header has {len(text)} bytes, at most {_MOST_HEADER_BYTES} are allowed")
    file.write(_PREFIX.pack(_MAGIC, _VERSION, len(text)))
    file.write(text)


def _read_header(file, path):
    """Checks the whole file, then returns its header and where its rows begin. Reads at most 1 MiB at a time."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise ValueError(f"[load] {path}: not a saved PagedCache (it begins with {prefix[:8]!r}, expected {_MAGIC!r})")
    _, version, header_bytes = _PREFIX.unpack(prefix)
    if version != _VERSION:
        raise ValueError(f"[load] {path}: format version {version}, this build reads {_VERSION}")
    if header_bytes > min(size, _MOST_HEADER_BYTES):
        raise ValueError(f"[load] {path}: cut short or damaged: the header should have {header_bytes} bytes, the file "
                         f"has {size}")
    try:
        header = json.loads(file.read(header_bytes))
        _check_header(header)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"[load] {path}: damaged header: {error}") from error
    payload = _PREFIX.size + header_bytes
    expected = payload + header["payload_bytes"] + hashlib.sha256().digest_size
    if size != expected:
        raise ValueError(f"[load] {path}: cut short or damaged: {size} bytes, its header says {expected}")
    digest, left = hashlib.sha256(), expected - hashlib.sha256().digest_size
    file.seek(0)
    while left:
        piece = file.read(min(left, 1 << 20))
        if not piece:
            raise ValueError(f"[load] {path}: cut short while it was read")
        digest.update(piece)
        left -= len(piece)
    found = file.read()
    if found != digest.digest():
        raise ValueError(f"[load] {path}: damaged: SHA-256 is {digest.hexdigest()}, the file says {found.hex()}")
    return header, payload


def _check_header(header):
    """Types and ranges only; whether they fit a model is for the cache to say."""
    def whole(value, least, name):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number from {least} on")

    if not isinstance(header["identity"], dict) or not isinstance(header["fingerprint"], str):
        raise ValueError("identity or fingerprint is missing")
    whole(header["columns"], 1, "columns")
    whole(header["payload_bytes"], 0, "payload_bytes")
    if not isinstance(header["skipped"], list) or not header["skipped"]:
        raise ValueError("it has no rows")
    for skipped in header["skipped"]:
        whole(skipped, 0, "skipped")
        if skipped > header["columns"]:
            raise ValueError(f"skipped is {skipped} of {header['columns']} columns")
    if parse_kv_quant(header["kv_quant"]) != header["kv_quant"]:
        raise ValueError(f"kv_quant is {header['kv_quant']!r}")
