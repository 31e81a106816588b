"""Attention and quantization in numpy, float64, written from the definitions alone (docs/formats.md, docs/numerics.md)."""

import numpy as np

QMAX = {"q8": 127, "q6": 31, "q4": 7}
BIAS = {"q8": 0, "q6": 32, "q4": 8}


def attention(q, k, v, scale=None, window=None, softcap=0.0, sinks=None):
    """Causal attention, aligned to the end.

    q [n, num_q_heads, d]   k, v [length, num_kv_heads, d]   returns out [n, num_q_heads, d_v], lse [n, num_q_heads]
    """
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    n, heads, d = q.shape
    length = len(k)
    group = heads // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    logits = np.einsum("nhd,lhd->nhl", q, k) * (d**-0.5 if scale is None else scale)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    rows, columns = np.arange(length - n, length)[:, None], np.arange(length)[None]
    seen = columns <= rows
    if window:
        seen &= columns > rows - window
    logits = np.where(seen[:, None], logits, -np.inf)
    extra = np.full((n, heads, 1), -np.inf) if sinks is None else np.broadcast_to(
        np.asarray(sinks, np.float64)[None, :, None], (n, heads, 1))
    empty = ~seen.any(1)
    extra = np.where(empty[:, None, None], -np.inf, extra)
    everything = np.concatenate([logits, extra], 2)
    top = np.maximum(everything.max(2, keepdims=True), -1e300)
    total = np.exp(everything - top).sum(2)
    out = np.einsum("nhl,lhd->nhd", np.exp(logits - top), v) / np.where(total > 0, total, 1)[..., None]
    with np.errstate(divide="ignore"):
        return out, top[..., 0] + np.log(total)


def quantize(x, mode):
    """Codes as stored and scales of rows [..., d], float32, as docs/formats.md defines them."""
    x = np.asarray(x, np.float32)
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(QMAX[mode]), np.float32(1e-6))
    codes = np.clip(np.rint(x / scale), -QMAX[mode], QMAX[mode]).astype(np.int32) + BIAS[mode]
    if mode == "q8":
        return codes.astype(np.int8), scale
    if mode == "q4":
        if codes.shape[-1] % 2:
            codes = np.concatenate([codes, np.full_like(codes[..., :1], 8)], -1)
        return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8), scale
    a, b, c, d = (codes[..., i::4] for i in range(4))
    bits = a | b << 6 | c << 12 | d << 18
    return np.stack([bits & 255, bits >> 8 & 255, bits >> 16], -1).reshape(*x.shape[:-1], -1).astype(np.uint8), scale


def stored(x, mode):
    """What a cache of this mode gives back for rows x."""
    x = np.asarray(x, np.float32)
    if mode in ("f32",):
        return x
    if mode in ("off", "f16"):
        return x.astype(np.float16).astype(np.float32)
    if mode == "bf16":
        bits = x.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    scale = np.maximum(np.abs(x).max(-1, keepdims=True) / np.float32(QMAX[mode]), np.float32(1e-6))
    return np.clip(np.rint(x / scale), -QMAX[mode], QMAX[mode]).astype(np.float32) * scale


# Largest error against attention in double over the stored values, relative to the largest value: float32 sums, and
# queries and weights rounded to integers where the format is multiplied as codes (docs/numerics.md section 2a).
TOLERANCE = {"f32": 2e-6, "f16": 2e-6, "off": 2e-6, "bf16": 2e-6, "q8": 1e-3, "q6": 2e-2, "q4": 2e-2}
