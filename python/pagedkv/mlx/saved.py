"""A prompt cache in a safetensors file: rows as they are stored."""

import hashlib
import json
import mmap
import os
import struct

import mlx.core as mx
import numpy as np

from .. import _core
from .._files import whole_file
from ..quant import PagedKVQuantConfig
from .cache import FORMAT_OF_DTYPE, NOT_PAGED, PagedPromptCache, layers_of

_FILE_FORMAT, _FILE_VERSION = "pagedkv.mlx", 1
_MOST_HEADER_BYTES = 1 << 26
_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8, "U8": np.uint8}
_TYPE_OF_FORMAT = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8": "I8", "q6": "U8", "q4": "U8"}
_NO_DIGEST = "0" * 64


def save(path, cache, metadata=None):
    """Writes a prompt cache to one file, for `load`: mlx-lm's own loader only knows its own caches.

      path      the file; replaced only when the new one is whole and on the disk
      cache     list of PagedPromptCache, one a layer
      metadata  dict of strings, handed back by load

    A safetensors file: for each layer the rows as they are stored, codes and scales apart, `[batch, num_kv_heads, n,
    width]`; the settings and a SHA-256 of everything in its metadata. A layer with a window saves what it sees.
    Errors: ValueError (a layer with another cache, metadata that are not strings), OSError; the old file is as it was.
    """
    metadata = {} if metadata is None else dict(metadata)
    if not all(isinstance(word, str) for pair in metadata.items() for word in pair):
        raise ValueError("[save] metadata must be a dict of strings")
    layers, arrays = [], {}
    for number, layer in enumerate(cache):
        if not isinstance(layer, PagedPromptCache):
            raise ValueError(f"[save] layer {number} is a {type(layer).__name__}, only PagedPromptCache can be saved")
        with layer._lock:
            layer._settle()
            layers.append({"offset": layer.offset, "mode": layer.kv_quant_config.mode, "block_size": layer.block_size,
                           "num_blocks": layer.num_blocks, "dynamic": layer.dynamic,
                           "sliding_window": layer.sliding_window, "keep_behind_window": layer.keep_behind_window,
                           "head_dim": None if layer.empty() else layer._shape[2:],
                           "dtype": None if layer.empty() else _name_of(layer._dtype)})
            if not layer.empty():
                arrays.update((f"{number}.{name}", array) for name, array in _stored(layer).items())
    header, start = {}, 0
    for name, (kind, array) in arrays.items():
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    header["__metadata__"] = {"format": _FILE_FORMAT, "version": str(_FILE_VERSION), "sha256": _NO_DIGEST,
                              "layers": json.dumps(layers), "metadata": json.dumps(metadata)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that rows are aligned
    digest = hashlib.sha256(text)
    for _, array in arrays.values():
        digest.update(array)
    text = text.replace(_NO_DIGEST.encode(), digest.hexdigest().encode(), 1)
    with whole_file(path) as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for _, array in arrays.values():
            file.write(array)


def load(path, model=None, kv_quant=None, return_metadata=False):
    """The prompt cache that `save` wrote; generation goes on as if it had never been saved.

      model            refuse a file whose number of layers or windows are not this model's
      kv_quant         refuse a file with another mode; stored rows are not converted
      return_metadata  return (cache, metadata)

    Whether it is of the same weights, metadata must tell. Nothing is built before the whole file has been checked.
    Errors: FileNotFoundError; ValueError for a file that is no such file, of another version, cut short, damaged, or
    refused as above; CapacityError.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 8:
            raise ValueError(f"[load] {path}: no safetensors file: it has {size} bytes")
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))  # closed when nobody reads it
    header, start = _checked_header(path, content, size)
    try:
        layers = json.loads(header["__metadata__"]["layers"])
        metadata = json.loads(header["__metadata__"]["metadata"])
        _refuse_other(path, layers, model, kv_quant)
        cache = [_loaded(header, content, start, number, layer) for number, layer in enumerate(layers)]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"[load] {path}: damaged: {type(error).__name__}: {error}") from error
    return (cache, metadata) if return_metadata else cache


def _parts(mode):
    """The formats of K and V."""
    key, _, value = mode.partition(":")
    return key, value or key


def _name_of(dtype):
    return str(dtype).rpartition(".")[2]  # "float32" of "mlx.core.float32"


def _stored(layer):
    """The rows of a layer as its blocks have them.

    Returns name -> (safetensors type, array [batch, num_kv_heads, n, width])."""
    n = layer._held()
    positions = np.arange(layer.offset - n, layer.offset)
    plan = layer._pool.plan_read([(sequence, 1) for sequence in layer._sequences])
    tables = plan.block_tables()[:, positions // layer.block_size]
    views = layer._pool.tensors(0)

    def gather(view):
        rows = np.from_dlpack(view)[tables, positions % layer.block_size]  # [batch, n, num_kv_heads, width]
        return np.ascontiguousarray(rows.transpose(0, 2, 1, 3))

    modes = _parts(layer.kv_quant_config.mode)
    decoded = layer._decoded(n) if "bf16" in modes else None
    out = {}
    for part, (name, mode) in enumerate(zip(("keys", "values"), modes)):
        if mode == "bf16":  # numpy has none: through float32 and back, exactly
            rows = (decoded[part].view(np.uint32) >> 16).astype(np.uint16)
        else:
            rows = gather((views.k, views.v)[part])
        out[name] = (_TYPE_OF_FORMAT[mode], rows)
        if mode.startswith("q"):
            out[name + ".scales"] = ("F32", gather((views.k_scales, views.v_scales)[part]))
    return out


def _loaded(header, content, start, number, layer):
    cache = PagedPromptCache(layer["block_size"], layer["num_blocks"], PagedKVQuantConfig(layer["mode"]),
                             layer["dynamic"], layer["sliding_window"], layer["keep_behind_window"])
    if layer["offset"] == 0:
        return cache

    def array(name, mode):
        entry = header[f"{number}.{name}"]
        first, end = entry["data_offsets"]
        kind, shape = _TYPES[entry["dtype"]], entry["shape"]
        n_bytes = np.dtype(kind).itemsize * int(np.prod(shape))
        if entry["dtype"] != mode or len(shape) != 4 or first < 0 or end - first != n_bytes:
            raise TypeError(f"{name} of layer {number} do not fit their description")
        return np.frombuffer(content, kind, int(np.prod(shape)), start + first).reshape(shape)

    rows = []
    for name, mode, head_dim in zip(("keys", "values"), _parts(layer["mode"]), layer["head_dim"]):
        stored = array(name, _TYPE_OF_FORMAT[mode])
        if mode == "bf16":
            stored = mx.array(stored).view(mx.bfloat16)
        elif mode.startswith("q"):
            # A row that is decoded and encoded again gives the same codes and scale, bit by bit: with q = 2^k - 1, the
            # decoded maximum q * s rounds to the very maximum that s was made from, because no float is nearer to it.
            stored = _core.dequantize_symmetric(stored, array(name + ".scales", "F32"), head_dim, mode)
        rows.append(stored)
    cache._restore(*rows, layer["offset"])
    cache._kind, cache._dtype = "mlx", {_name_of(dtype): dtype for dtype in FORMAT_OF_DTYPE}[layer["dtype"]]
    return cache


def _checked_header(path, content, size):
    """Checks the file as a whole. Returns its header and where its rows begin."""
    header_bytes, = struct.unpack("<Q", content[:8])
    if header_bytes > min(size - 8, _MOST_HEADER_BYTES):
        raise ValueError(f"[load] {path}: cut short, or no safetensors file: a header of {header_bytes} bytes, {size} "
                         "in all")
    text = bytes(content[8:8 + header_bytes])
    try:
        header = json.loads(text)
        about = header.get("__metadata__") or {}
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        found = about.get("format"), about.get("version"), about.get("sha256")
        expected = 8 + header_bytes + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ValueError(f"[load] {path}: damaged header, or no safetensors file: {error}") from error
    if found[0] != _FILE_FORMAT:
        raise ValueError(f"[load] {path}: not a saved prompt cache of pagedkv.mlx: its format is {found[0]!r}")
    if found[1] != str(_FILE_VERSION):
        raise ValueError(f"[load] {path}: format version {found[1]}, this build reads {_FILE_VERSION}")
    if size != expected:
        raise ValueError(f"[load] {path}: cut short or damaged: {size} bytes, its header says {expected}")
    digest = hashlib.sha256(text.replace(str(found[2]).encode(), _NO_DIGEST.encode(), 1))
    digest.update(content[8 + header_bytes:])
    if digest.hexdigest() != found[2]:
        raise ValueError(f"[load] {path}: damaged: SHA-256 is {digest.hexdigest()}, the file says {found[2]}")
    return header, 8 + header_bytes


def _refuse_other(path, layers, model, kv_quant):
    if model is not None:
        windows = [window for _, window in layers_of(model)]
        if len(windows) != len(layers):
            raise ValueError(f"[load] {path}: {len(layers)} layers in the file, {len(windows)} in the model")
        for number, (layer, window) in enumerate(zip(layers, windows)):
            if layer["sliding_window"] != window:
                of_model = "a cache that is not paged" if window is NOT_PAGED else f"window {window}"
                raise ValueError(f"[load] {path}: layer {number} has window {layer['sliding_window']} in the file, "
                                 f"{of_model} in the model")
    if kv_quant is not None:
        asked = _parts(PagedKVQuantConfig(kv_quant).mode)
        for number, layer in enumerate(layers):
            if _parts(layer["mode"]) != asked:
                raise ValueError(f"[load] {path}: layer {number} is {layer['mode']} in the file, {kv_quant} was asked "
                                 "for; stored rows are not converted")
