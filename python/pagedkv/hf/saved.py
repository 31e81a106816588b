"""A PagedCache in a safetensors file: rows and scales as they are stored."""

import torch

from .. import _safetensors
from .._core import parse_kv_quant
from .shapes import mode_of

_FILE_FORMAT, _FILE_VERSION = "pagedkv.hf", 1
_WORDS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int8: "I8", torch.uint8: "U8"}
# Rows of a prompt that are gathered or scattered at a time.
_ROWS_AT_ONCE = 512


def save(cache, path):
    """PagedCache.save."""
    cache._settle()
    if not cache._columns:
        raise ValueError(f"[save] {path}: the cache is empty")
    about = {"identity": cache._identity, "fingerprint": cache._fingerprint, "kv_quant": cache._kv_quant,
             "columns": cache._columns, "skipped": cache._skipped}
    views = {layer: _views(cache, layer) for layer in cache._shapes}
    plans = {row: cache._core.plan_read([(cache._sequences[row], 1)])
             for row, skipped in enumerate(cache._skipped) if skipped < cache._columns}
    tensors = {}
    for row, layer, first, n in _saved_rows(cache, about):
        table = torch.from_numpy(plans[row].block_tables(cache._group_of[layer])[0]).long() if n else None
        for name, view in views[layer].items():
            tensors[f"{row}.{layer}.{name}"] = _safetensors.Tensor(
                _WORDS[view.dtype], (n, *view.shape[2:]), _gather(view, table, first, n))
    _safetensors.write(path, _FILE_FORMAT, _FILE_VERSION, about, tensors)


def load(cls, path, config, kv_quant, fingerprint, options):
    """PagedCache.load."""
    with _safetensors.File(path, _FILE_FORMAT, _FILE_VERSION) as file:
        try:
            _check(file.about)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"[load] {path}: damaged header: {error}") from error
        cache = cls(config, file.about["kv_quant"], fingerprint=fingerprint, **options)
        _refuse_other(cache, path, file, kv_quant)
        _restore(cache, path, file)
    return cache


def _saved_rows(cache, about):
    """What is saved: (row, layer, first position, positions)."""
    for row, skipped in enumerate(about["skipped"]):
        length = about["columns"] - skipped
        for layer, shape in cache._shapes.items():
            first = max(length - shape.window + 1, 0) if shape.window else 0
            yield row, layer, first, length - first


def _views(cache, layer):
    """Views of a layer's blocks by name, as tensors [num_blocks, block_size, num_kv_heads, width]."""
    tensors = cache._core.tensors(layer)
    views = {"keys": tensors.k, "values": tensors.v, "keys.scales": tensors.k_scales, "values.scales": tensors.v_scales}
    return {name: torch.from_dlpack(view) for name, view in views.items() if view is not None}


def _gather(view, table, first, n):
    """The stored bytes of n positions from `first` on."""
    block_size = view.shape[1]
    for start in range(first, first + n, _ROWS_AT_ONCE):
        positions = torch.arange(start, min(start + _ROWS_AT_ONCE, first + n))
        rows = view[table[positions // block_size], positions % block_size]
        yield rows.contiguous().view(torch.uint8).numpy().data


def _refuse_other(cache, path, file, kv_quant):
    about = file.about
    for name, own in cache._identity.items():
        if about["identity"].get(name) != own:
            raise ValueError(f"[load] {path}: {name} is {about['identity'].get(name)} in the file, {own} in the config")
    if about["fingerprint"] != cache._fingerprint:
        raise ValueError(f"[load] {path}: the fingerprint is {about['fingerprint']!r} in the file, "
                         f"{cache._fingerprint!r} was given: another model's weights")
    if kv_quant is not None and mode_of(kv_quant) != about["kv_quant"]:
        raise ValueError(f"[load] {path}: kv_quant is {about['kv_quant']} in the file, {mode_of(kv_quant)} was "
                         "asked for; stored rows are not converted")
    longest = about["columns"] - min(about["skipped"])
    if 0 < cache._options.get("max_context", 0) < longest:
        raise ValueError(f"[load] {path}: {longest} tokens in the file, max_context is "
                         f"{cache._options['max_context']}")
    for row, layer, _, n in _saved_rows(cache, about):
        for name in (f"{row}.{layer}.keys", f"{row}.{layer}.values"):
            found = file.tensors.get(name)
            if found is None or found.shape[0] != n:
                raise ValueError(f"[load] {path}: {name} should have {n} tokens, it has "
                                 f"{found.shape[0] if found else 'none'}")


def _restore(cache, path, file):
    about = file.about
    cache._open(len(about["skipped"]), 0, None)
    views = {layer: _views(cache, layer) for layer in cache._shapes}
    starts = {}
    for row, layer, first, n in _saved_rows(cache, about):
        starts[row, layer] = first
        for name, view in views[layer].items():
            found = file.tensors.get(f"{row}.{layer}.{name}")
            expected = _safetensors.Tensor(_WORDS[view.dtype], (n, *view.shape[2:]))
            if found != expected:
                raise ValueError(f"[load] {path}: {row}.{layer}.{name} is {found and found[:2]}, expected {expected[:2]}")
    for row, (sequence, skipped) in enumerate(zip(cache._sequences, about["skipped"])):
        length = about["columns"] - skipped
        for position in range(0, length, _ROWS_AT_ONCE):
            n = min(_ROWS_AT_ONCE, length - position)
            # Positions that a window has left behind are never read: their slots stay as they are.
            with cache._core.reserve([(sequence, n)]) as plan:
                for layer in cache._shapes:
                    slots = torch.from_numpy(plan.slot_mapping(cache._group_of[layer]))
                    _scatter(file, f"{row}.{layer}", views[layer], slots, position, starts[row, layer])
    cache._columns, cache._skipped = about["columns"], list(about["skipped"])


def _scatter(file, place, views, slots, position, first):
    """Fills slots, those of positions from `position` on, from the file, which has the positions from `first` on."""
    begin, end = max(position, first), position + len(slots)
    if begin >= end:
        return
    slots = slots[begin - position:]
    for name, view in views.items():
        rows = torch.from_numpy(file.rows(f"{place}.{name}", begin - first, end - begin)).view(view.dtype)
        view[slots // view.shape[1], slots % view.shape[1]] = rows


def _check(about):
    """Types and ranges only; whether they fit a model is for the cache to say."""
    def whole(value, least, name):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number from {least} on")

    if not isinstance(about["identity"], dict) or not isinstance(about["fingerprint"], str):
        raise ValueError("identity or fingerprint is missing")
    whole(about["columns"], 1, "columns")
    if not isinstance(about["skipped"], list) or not about["skipped"]:
        raise ValueError("it has no rows")
    for skipped in about["skipped"]:
        whole(skipped, 0, "skipped")
        if skipped > about["columns"]:
            raise ValueError(f"skipped is {skipped} of {about['columns']} columns")
    if parse_kv_quant(about["kv_quant"]) != about["kv_quant"]:
        raise ValueError(f"kv_quant is {about['kv_quant']!r}")
