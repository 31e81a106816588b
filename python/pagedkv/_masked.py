"""Attention over dense rows, for masks that packed blocks cannot be read with."""

import numpy as np

from ._frameworks import causal_mask, to_numpy


def mask_of(mask, shape):
    """A caller's mask as numpy's: bool (True: is seen) or float32 (added to the logits), as in torch.

      shape  [batch, num_q_heads, n, offset], which it must be or broadcast to; n and offset themselves, or 1

    Errors: TypeError, ValueError.
    """
    if not hasattr(mask, "__array__") and not hasattr(mask, "__dlpack__"):
        raise TypeError(f"mask is {mask!r:.60}, of type {type(mask).__name__}, allowed are None, 'causal' and arrays")
    array = to_numpy(mask)
    if array.dtype != bool and array.dtype.kind != "f":
        raise TypeError(f"mask has elements of type {array.dtype}, allowed are bool (True: the key is seen) and floats "
                        "(added to the logits)")
    padded = (1,) * (4 - array.ndim) + array.shape
    if array.ndim > 4 or any(have not in (1, want) for have, want in zip(padded, shape)):
        raise ValueError(f"mask is {list(array.shape)}, expected what broadcasts to {list(shape)}: batch, num_q_heads, "
                         "new positions, all positions")
    return array if array.dtype == bool else array.astype(np.float32)


def masked_attention(q, keys, values, mask, scale, sliding_window, softcap):
    """q [batch, num_q_heads, n, d], keys and values [batch, num_kv_heads, offset, d], float32; mask: see mask_of."""
    keys, values = (np.repeat(array, q.shape[1] // array.shape[1], axis=1) for array in (keys, values))
    logits = np.einsum("bhqd,bhkd->bhqk", q, keys) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap:
        logits = np.tanh(logits / softcap) * softcap
    if mask.dtype != bool:
        logits, mask = logits + mask, True
    if sliding_window not in (None, -1):
        mask = mask & causal_mask(q.shape[2], keys.shape[2] - q.shape[2], sliding_window, "numpy")
    logits = np.where(mask, logits, -np.inf)
    # A row that sees nothing has no maximum, and gives 0.
    weights = np.exp(logits - np.maximum(logits.max(-1, keepdims=True), np.finfo(np.float32).min))
    total = weights.sum(-1, keepdims=True)
    out = np.einsum("bhqk,bhkd->bhqd", weights, values) / np.where(total > 0, total, 1)
    return out.astype(np.float32)
