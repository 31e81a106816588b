"""A prompt cache in a safetensors file: rows as they are stored."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _core, _safetensors
from ..quant import PagedKVQuantConfig
from .cache import FORMAT_OF_DTYPE, NOT_PAGED, PagedPromptCache, layers_of

_FILE_FORMAT, _FILE_VERSION = "pagedkv.mlx", 1
_TYPE_OF_FORMAT = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8": "I8", "q6": "U8", "q4": "U8"}


def save(path: str | os.PathLike[str], cache: Any, metadata: Any = None) -> None:
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
    layers, tensors = [], {}
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
                tensors.update((f"{number}.{name}", tensor) for name, tensor in _stored(layer).items())
    _safetensors.write(path, _FILE_FORMAT, _FILE_VERSION, {"layers": layers, "metadata": metadata}, tensors)


def load(path: str | os.PathLike[str], model: Any = None, kv_quant: str | None = None,
         return_metadata: bool = False) -> Any:
    """The prompt cache that `save` wrote; generation goes on as if it had never been saved.

      model            refuse a file whose number of layers or windows are not this model's
      kv_quant         refuse a file with another mode; stored rows are not converted
      return_metadata  return (cache, metadata)

    Whether it is of the same weights, metadata must tell. Nothing is built before the whole file has been checked.
    Errors: FileNotFoundError; ValueError for a file that is no such file, of another version, cut short, damaged, or
    refused as above; CapacityError.
    """
    with _safetensors.File(path, _FILE_FORMAT, _FILE_VERSION) as file:
        try:
            layers, metadata = file.about["layers"], file.about["metadata"]
            _refuse_other(path, layers, model, kv_quant)
            cache = [_loaded(file, number, layer) for number, layer in enumerate(layers)]
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

    Returns name -> tensor [batch, num_kv_heads, n, width]."""
    n = layer._held()
    positions = np.arange(layer.offset - n, layer.offset)
    plan = layer._pool.plan_read([(sequence, 1) for sequence in layer._sequences])
    tables = plan.block_tables()[:, positions // layer.block_size]
    views = layer._pool.tensors(0)

    def gather(view):
        rows = np.from_dlpack(view)[tables, positions % layer.block_size]  # [batch, n, num_kv_heads, width]
        return np.ascontiguousarray(rows.transpose(0, 2, 1, 3))

    def tensor(dtype, rows):
        return _safetensors.Tensor(dtype, rows.shape, [rows])

    modes = _parts(layer.kv_quant_config.mode)
    decoded = layer._decoded(n) if "bf16" in modes else None
    out = {}
    for part, (name, mode) in enumerate(zip(("keys", "values"), modes)):
        if mode == "bf16":  # numpy has none: through float32 and back, exactly
            rows = (decoded[part].view(np.uint32) >> 16).astype(np.uint16)
        else:
            rows = gather((views.k, views.v)[part])
        out[name] = tensor(_TYPE_OF_FORMAT[mode], rows)
        if mode.startswith("q"):
            out[name + ".scales"] = tensor("F32", gather((views.k_scales, views.v_scales)[part]))
    return out


def _loaded(file, number, layer):
    cache = PagedPromptCache(layer["block_size"], layer["num_blocks"], PagedKVQuantConfig(layer["mode"]),
                             layer["dynamic"], layer["sliding_window"], layer["keep_behind_window"])
    if layer["offset"] == 0:
        return cache

    def array(name, dtype):
        found = file.tensors[f"{number}.{name}"]
        if found.dtype != dtype or len(found.shape) != 4:
            raise TypeError(f"{name} of layer {number} is {found.dtype} {found.shape}, expected {dtype} in four dimensions")
        return file.rows(f"{number}.{name}")

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
