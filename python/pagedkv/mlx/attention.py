"""The attention that reads blocks in the place of mlx-lm's, and the masks it knows."""

import sys
import weakref

import mlx.core as mx
from mlx_lm.models import base

from .rows import PagedRows

# Models that do more with the rows than to hand them to `scaled_dot_product_attention`, such as multiplying latents or
# capping logits: they are given dense arrays also while their attention is ours.
_READS_ROWS = frozenset((
    "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "gear", "glm4_moe_lite", "kimi_k3",
    "kimi_linear", "longcat_flash", "minimax_m3_vl", "mistral4", "phi3small", "plamo", "stablelm"))
_ATTENTION = "scaled_dot_product_attention"
_replaced = None  # mlx-lm's own function while ours is in its place
_patches = 0


class _Patch:
    """Undoes patch_attention when its block ends."""

    def __enter__(self) -> "_Patch":
        return self

    def __exit__(self, *_: object) -> None:
        unpatch_attention()


def patch_attention() -> _Patch:
    """Makes mlx-lm's models attend over the packed blocks of paged caches, until unpatch_attention().

    It replaces `scaled_dot_product_attention` in mlx_lm.models.base and in every module of mlx_lm.models that has
    imported it, now and as long as it lasts; for caches that are not paged it calls mlx-lm's own. Calls nest, and each
    needs its unpatch_attention; as a context manager, `with patch_attention():`, it comes by itself. It is for the
    whole process: do not patch or unpatch while a model runs.

    Stay dense, and counted: models without that function or that do more with K and V than to hand them on (gemma2,
    deepseek_v3 and others with latents), masks that did not come from the cache's make_mask, and prompts without a
    causal mask.
    """
    global _replaced, _patches
    if _patches == 0:
        _replaced = base.scaled_dot_product_attention
        _replace(_replaced, scaled_dot_product_attention)
    _patches += 1
    return _Patch()


def unpatch_attention() -> None:
    """Ends the last patch_attention; without one, nothing happens."""
    global _replaced, _patches
    if _patches == 0:
        return
    _patches -= 1
    if _patches == 0:
        _replace(scaled_dot_product_attention, _replaced)
        _replaced = None


def _replace(old, new):
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, _ATTENTION, None) is old:
            setattr(module, _ATTENTION, new)


def hands_rows_on(frame):
    """Whether the code of `frame` gives the rows it fetches to our attention, and to nothing else."""
    names = frame.f_globals
    return (names.get(_ATTENTION) is scaled_dot_product_attention
            and names.get("__name__", "").rpartition(".")[2] not in _READS_ROWS)


def scaled_dot_product_attention(queries, keys, values, cache, scale, mask, sinks=None):
    """In the place of mlx-lm's function of this name (see patch_attention): over PagedRows it reads the blocks.

      queries  [batch, num_q_heads, n, head_dim], the newest n positions
      sinks    [num_q_heads] logits that join each row's denominator, or None
      returns  [batch, num_q_heads, n, head_dim_v] of the queries' type
    """
    if isinstance(keys, PagedRows) and isinstance(values, PagedRows):
        paged = keys._fetch.cache
        known, window = _window_of(mask, queries.shape[2], paged)
        if known and values._fetch.cache is paged:
            return paged._attend(queries, scale, window, None if sinks is None else sinks.astype(mx.float32))
    if isinstance(keys, PagedRows):
        keys = keys.array()
    if isinstance(values, PagedRows):
        values = values.array()
    attention = base.scaled_dot_product_attention if _replaced is None else _replaced
    return attention(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)


# Masks that caches made: id -> (reference, columns, positions at their end, window). A mask that comes back is known by
# itself, and never computed: a lazy array costs nothing until somebody looks.
_masks = {}


def remember(mask, n, ends, window):
    if isinstance(mask, mx.array):
        name = id(mask)
        _masks[name] = (weakref.ref(mask, lambda _: _masks.pop(name, None)), n, ends, window)
    return mask


def _window_of(mask, n, cache):
    """Whether `mask` is the causal one of the cache's newest n positions, and its window (None: no other than the
    cache's own)."""
    if mask is None:
        return n == 1, None
    if isinstance(mask, str):
        return mask == "causal", None
    made, columns, ends, window = _masks.get(id(mask), (lambda: None, 0, 0, None))
    if made() is not mask or columns != n or ends != cache._ends():
        return False, None
    # A mask wider than the cache's window sees what happens to be there, which no window describes.
    limit = getattr(cache, "sliding_window", None)
    return not (n > 1 and limit is not None and window is not None and window > limit), window
