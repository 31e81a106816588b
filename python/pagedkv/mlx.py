"""pagedkv in mlx-lm: a prompt cache whose keys and values live in blocks, and the attention that reads them packed.

    import pagedkv.mlx
    cache = pagedkv.mlx.make_prompt_cache(model, kv_quant="q8")
    with pagedkv.mlx.patch_attention():
        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)
    pagedkv.mlx.save("prompt.safetensors", cache)

mlx-lm's models import their attention by name, so there are two ways to read the blocks:

  as it is             every layer is handed dense K and V, decoded in every step (counted in dense_materializations)
  patch_attention()    their `scaled_dot_product_attention` is replaced by ours, which reads the blocks as they are

Words: the *rows* of a cache are the K and V of its positions. A layer with a sliding window W *sees* its newest W rows.

mlx computes lazily, our kernels read memory: K, V and queries are evaluated when they are stored and attended with.
Written for mlx-lm 0.32 on the CPU.
"""

import contextlib
import hashlib
import json
import mmap
import os
import struct
import sys
import tempfile
import warnings
import weakref

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models import base
from mlx_lm.models import cache as own  # mlx-lm's own caches

from . import _core
from ._frameworks import from_numpy
from .paged_kv_cache import PagedKVCache
from .quant import PagedKVQuantConfig

if not mlx_lm.__version__.startswith("0.32."):
    warnings.warn(f"pagedkv.mlx is written for mlx-lm 0.32, this is {mlx_lm.__version__}: its caches may have changed")

__all__ = ["PagedBatchCache", "PagedPromptCache", "PagedRows", "load", "make_prompt_cache", "patch_attention", "save",
           "unpatch_attention"]

_FORMAT_OF_DTYPE = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}
# The longest prefill step that mlx-lm takes unless told otherwise; sizes what a window keeps from the start.
_PREFILL_STEP = 2048
# Positions that are passed over at a time when a window no longer has their rows.
_SKIPPED_AT_ONCE = 512


def make_prompt_cache(model, kv_quant=None, *, block_size=16, num_blocks=64, dynamic=True, keep_behind_window=False):
    """One cache for each layer of an mlx-lm model, to be passed as `prompt_cache`.

      kv_quant            how K and V are stored: "f32", "f16", "bf16", "q8", "q6", "q4", or "K:V" of two of them.
                          "off": the type of the model's own K and V. None: PAGEDKV_QUANT if set, else "off"
      block_size          tokens of a block
      num_blocks          blocks of each layer that exist from the start
      dynamic             grow past them on demand; False: CapacityError when they are full
      keep_behind_window  layers with a sliding window keep the rows behind it, too: the memory of a full layer, but any
                          trim works. Speculative decoding past the window needs it (mlx-lm's own cache cannot)

    A KVCache becomes a paged cache, a RotatingKVCache one with its window, whose blocks are given back once they lie
    behind it. Layers with another state (recurrent, chunked, with attention sinks that are kept) keep mlx-lm's own
    cache; one RuntimeWarning names them.
    Errors: ValueError (mode, sizes).
    """
    config = None if kv_quant is None else PagedKVQuantConfig(kv_quant)
    made, kept = [], {}
    for layer, (entry, window) in enumerate(_layers_of(model)):
        if window is _NOT_PAGED:
            kept.setdefault(type(entry).__name__, []).append(layer)
            made.append(entry)
        else:
            made.append(PagedPromptCache(block_size, num_blocks, config, dynamic, window, keep_behind_window))
    if kept:
        layers = "; ".join(f"{name}: layers {', '.join(map(str, numbers))}" for name, numbers in kept.items())
        warnings.warn(f"these layers keep mlx-lm's own cache, which is neither paged nor quantized: {layers}",
                      RuntimeWarning, stacklevel=2)
    return made


_NOT_PAGED = object()


def _layers_of(model):
    """What mlx-lm would give each layer, and the window of ours: None for full attention, or _NOT_PAGED."""
    def window_of(entry):
        if type(entry) is own.KVCache:
            return None
        if type(entry) is own.RotatingKVCache and entry.keep == 0:
            return entry.max_size
        return _NOT_PAGED

    return [(entry, window_of(entry)) for entry in own.make_prompt_cache(model)]


# --- rows that were fetched ----------------------------------------------------------------------------------------


class _Fetch:
    """The newest rows of a cache as one fetch promised them, decoded at most once."""

    def __init__(self, cache, shapes, dtype):
        self.cache, self.shapes, self.dtype = cache, shapes, dtype
        self._change = cache._changes
        self._dense = None

    def dense(self):
        if self._dense is None:
            if self.cache._changes != self._change:
                raise RuntimeError("rows are read that were fetched before the cache changed")
            self._dense = self.cache._newest(self.shapes[0][2])
        return self._dense


class PagedRows:
    """Stands where mlx-lm has an array of keys or values, [batch, num_kv_heads, n, head_dim], while the rows stay in
    their blocks.

    `shape` and `dtype` cost nothing. `array()`, indexing, arithmetic and every method of mx.array decode the rows
    (counted in dense_materializations). Functions of mx refuse it with a TypeError.
    """

    ndim = 4

    def __init__(self, fetch, part):
        self._fetch, self._part = fetch, part

    @property
    def shape(self):
        return self._fetch.shapes[self._part]

    @property
    def dtype(self):
        return self._fetch.dtype

    def array(self):
        """The rows as an mx.array. Errors: RuntimeError when the cache has changed since."""
        return self._fetch.dense()[self._part]

    __mlx_array__ = array

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.array(), name)

    def __getitem__(self, index):
        return self.array()[index]

    def __deepcopy__(self, memo):
        return self  # it never changes

    def __repr__(self):
        return (f"PagedRows({('keys', 'values')[self._part]}, {self.shape}, in blocks: pagedkv.mlx.save writes them, "
                "array() decodes them)")


def _pair(cache, shapes, dtype):
    fetch = _Fetch(cache, shapes, dtype)
    return PagedRows(fetch, 0), PagedRows(fetch, 1)


# --- the caches ----------------------------------------------------------------------------------------------------


class PagedPromptCache(PagedKVCache):
    """The cache of one layer: PagedKVCache with the protocol of mlx-lm 0.32's KVCache and RotatingKVCache.

      sliding_window      keys a query sees, its own included; None: all
      keep_behind_window  do not give back what lies behind the window

    The other parameters are PagedKVCache's. Where the mode is "off", rows are stored in the type of the first ones.

    `offset` counts positions, also those that a window has dropped. copy.copy, copy.deepcopy and `fork` give an
    independent cache that shares blocks until one of the two writes. `state` is a snapshot that shares them as well;
    its rows are PagedRows, so `mx.eval([c.state ...])`, which mlx-lm calls after each prefill step, costs nothing.

    What a step of a windowed layer brings is checked for NaN and infinity when the step is over, at the latest by the
    next call: that one raises NotFiniteError, and the step is taken back.
    """

    def __init__(self, block_size=16, num_blocks=64, kv_quant_config=None, dynamic=True, sliding_window=None,
                 keep_behind_window=False):
        super().__init__(block_size, num_blocks, kv_quant_config, dynamic)
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window is {sliding_window}, allowed are 1 and more, or None")
        self.sliding_window = sliding_window
        self.keep_behind_window = keep_behind_window
        self._plan = None  # the step that is not over, of a layer that drops rows at its end
        self._n_new = 0  # its positions
        self._seen = 0  # rows that the last fetch gave
        self._changes = 0

    @classmethod
    def from_cache(cls, entry, block_size=16, num_blocks=64, kv_quant_config=None, dynamic=True):
        """Takes over one of mlx-lm's KVCache or RotatingKVCache, or anything with .keys .values .offset.

        Errors: ValueError (a RotatingKVCache that keeps its first tokens, rows that are missing), CapacityError.
        """
        window, keys, values = None, entry.keys, entry.values
        if isinstance(entry, own.RotatingKVCache):
            if entry.keep:
                raise ValueError(f"the RotatingKVCache keeps its first {entry.keep} tokens; a window has none to keep")
            window = entry.max_size
            if keys is not None:
                keys, values = entry._temporal_order(keys), entry._temporal_order(values)
        elif keys is not None:
            keys, values = keys[:, :, :entry.offset], values[:, :, :entry.offset]
        cache = cls(block_size, num_blocks, kv_quant_config, dynamic, window)
        cache._restore(keys, values, int(entry.offset))
        return cache

    # --- size --------------------------------------------------------------------------------------------------

    @property
    def offset(self) -> int:
        """Positions of each batch row, those of the step that is not over included."""
        with self._lock:
            return PagedKVCache.offset.fget(self) + self._n_new

    def size(self) -> int:
        """Tokens that attention sees."""
        return self.offset if self.sliding_window is None else min(self.offset, self.sliding_window)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that hold the rows, padding included; blocks that forks share count in each."""
        with self._lock:
            self._settle()
            return PagedKVCache.nbytes.fget(self)

    @property
    def _drops(self):
        return self.sliding_window is not None and not self.keep_behind_window

    def is_trimmable(self) -> bool:
        """Whether any trim is possible: as for RotatingKVCache, not once rows have been dropped."""
        return not self._drops or self.offset < self.sliding_window

    def trim(self, n) -> int:
        """Removes the last n positions, at most all; returns how many. ValueError, and no change, where the window has
        dropped rows that the shorter cache would see."""
        with self._lock:
            self._settle()
            removed = super().trim(n)
            self._changes += removed > 0
            return removed

    # --- writing -----------------------------------------------------------------------------------------------

    def update_without_fetch(self, keys, values):
        with self._lock:
            self._append(keys, values)
            self._settle()

    def update_and_fetch(self, keys, values):
        """Appends [batch, num_kv_heads, n, head_dim]; returns the keys and values that these positions see: mx.arrays,
        or PagedRows where a model with our attention calls (see patch_attention). On an error nothing has changed."""
        with self._lock:
            seen = self._seen_by(keys.shape[2])
            self._append(keys, values)
            self._seen = seen
            return self._fetch(sys._getframe(1))

    def keys_and_values(self):
        """What the last update_and_fetch returned."""
        with self._lock:
            return self._fetch(sys._getframe(1))

    def fork(self):
        """A second cache with the same content. Blocks are shared until one of the two writes into them."""
        with self._lock:
            self._settle()
            return super().fork()

    def __copy__(self):
        return self.fork()

    def to_quantized(self, group_size=64, bits=4):
        """Refuses: mlx-lm's kv_bits would replace this cache by a dense one."""
        raise ValueError(f"kv_bits={bits} is mlx-lm's own quantization; for a paged cache, say "
                         "make_prompt_cache(model, kv_quant=...)")

    # --- reading -----------------------------------------------------------------------------------------------

    def make_mask(self, N, return_array=False, window_size=None):
        """The mask of the next N positions over what they are about to see: None, "causal", or a bool array."""
        offset, window = self.offset, window_size
        if self.sliding_window is None:
            mask = own.create_attention_mask(N, offset, return_array, window_size)
        else:
            before = self._seen_by(0)
            window = window_size or self.sliding_window
            if N > 1:
                needed = return_array or before + N > window
                mask = base.create_causal_mask(N, before, window_size=window) if needed else "causal"
            elif window < self.sliding_window and offset >= window:
                mask = mx.arange(before + 1) > before - window
            else:
                mask = None
        return _remember(mask, N, offset + N, window)

    def paged_attention(self, q, scale=None, sliding_window=-1, mask=None, softcap=0.0):
        """As PagedKVCache's, within the cache's window. It ends the step: ValueError where rows that these queries see
        have been dropped by that (a model's attention does not: see patch_attention)."""
        with self._lock:
            self._settle()
            if sliding_window == -1 and self.sliding_window is not None:
                sliding_window = self.sliding_window
            return super().paged_attention(q, scale, sliding_window, mask, softcap)

    @property
    def state(self):
        """(keys, values, offset, block_size, num_blocks, mode, dynamic, sliding_window, keep_behind_window), for
        from_state. Assigning replaces the content and the settings; keys and values may also be arrays."""
        with self._lock:
            rows = (None, None)
            if self._pool is not None:
                snapshot = self.fork()
                rows = _pair(snapshot, snapshot._shapes(snapshot._held()), self._dtype)
            return (*rows, self.offset, self.block_size, self.num_blocks, self.kv_quant_config.mode, self.dynamic,
                    self.sliding_window, self.keep_behind_window)

    @state.setter
    def state(self, state):
        keys, values, offset, block_size, num_blocks, mode, dynamic, window, keep = state
        if isinstance(keys, PagedRows):
            fresh = keys._fetch.cache.fork()
            if fresh.offset != offset:
                raise ValueError(f"the state is of {offset} positions, its rows are of {fresh.offset}")
        else:
            fresh = type(self)(block_size, num_blocks, PagedKVQuantConfig(mode), dynamic, window, keep)
            fresh._restore(keys, values, offset)
        # What was there is given back by `fresh`, which leaves with it.
        changes = self.__dict__.get("_changes", 0)
        self.__dict__, fresh.__dict__ = fresh.__dict__, self.__dict__
        self._changes = changes + 1

    @classmethod
    def from_state(cls, state):
        cache = cls()
        cache.state = state
        return cache

    @classmethod
    def merge(cls, caches):
        """One cache for a batch of prompts, as mlx-lm's batch generation asks for it: see PagedBatchCache."""
        return PagedBatchCache.merge(caches)

    # --- inside ------------------------------------------------------------------------------------------------

    def _open(self, shape):
        batch, heads, head_dim, head_dim_v = shape
        if batch < 1:
            raise ValueError(f"the batch is {batch}, at least 1 is needed")
        pool = _core.Cache(num_kv_heads=heads, head_dim=head_dim, head_dim_v=head_dim_v, kv_quant=self.kv_quant_config,
                           sliding_window=self.sliding_window if self._drops else 0, block_size=self.block_size,
                           num_blocks=self.num_blocks * batch, dynamic=self.dynamic, longest_chunk=_PREFILL_STEP,
                           max_sequences=batch, prefix_sharing=False)
        return pool, [pool.start().sequence for _ in range(batch)]

    def _append(self, keys, values):
        """Stores rows. Where rows are dropped, the step stays open: its queries still see what its end gives back."""
        self._settle()
        config = self.kv_quant_config
        if self._pool is None and config.mode == "off" and keys.dtype in _FORMAT_OF_DTYPE:
            self.kv_quant_config = PagedKVQuantConfig(_FORMAT_OF_DTYPE[keys.dtype])
        try:
            if self._drops:
                self._begin(keys, values)
            else:
                super().update_without_fetch(keys, values)
        except BaseException:
            if self._pool is None:
                self.kv_quant_config = config
            raise
        self._changes += 1

    def _begin(self, keys, values):
        shape = self._checked_shape(keys, values)
        pool, sequences = (self._pool, self._sequences) if self._pool is not None else self._open(shape)
        if keys.shape[2] == 0:
            return
        plan = pool.reserve([(sequence, keys.shape[2]) for sequence in sequences])
        try:
            _core.append(plan, 0, keys, values)
        except BaseException:
            plan.abandon()
            raise
        self._pool, self._sequences, self._shape = pool, sequences, shape
        self._kind, self._dtype = "mlx", keys.dtype
        self._plan, self._n_new = plan, keys.shape[2]

    def _settle(self):
        """Ends the step that is open."""
        if self._plan is None:
            return
        plan, self._plan, self._n_new = self._plan, None, 0
        try:
            plan.commit(all_or_none=True)
        except BaseException:
            self._changes += 1
            raise

    def _take_back(self, n):
        """Undoes an append of n positions that nothing has followed."""
        if self._plan is not None:
            self._plan.abandon()
            self._plan, self._n_new = None, 0
            self._changes += 1
        else:
            self.trim(n)

    def _seen_by(self, n):
        """Rows that the next n positions see between them, their own included."""
        before = self.offset
        return n + (before if self.sliding_window is None else min(before, self.sliding_window - 1))

    def _held(self):
        """Rows that can be read."""
        if not self._drops:
            return self.offset
        return self._seen if self._plan is not None else min(self.offset, self.sliding_window)

    def _shapes(self, n):
        batch, heads, head_dim, head_dim_v = self._shape
        return (batch, heads, n, head_dim), (batch, heads, n, head_dim_v)

    def _fetch(self, frame):
        if self._pool is None:
            return None, None
        if _hands_rows_on(frame):
            return _pair(self, self._shapes(self._seen), self._dtype)
        return self._newest(self._seen)

    def _newest(self, n):
        """The newest n rows, dense."""
        return tuple(from_numpy(array, "mlx", self._dtype) for array in self._decoded(n))

    def _decoded(self, n=None):
        n = self._held() if n is None else n
        keys, values = (np.empty(shape, np.float32) for shape in self._shapes(n))
        if n:
            plan = self._plan or self._pool.plan_read([(sequence, 1) for sequence in self._sequences])
            for row in range(len(self._sequences)):
                self._pool.read_dense(plan, row, 0, self.offset - n, keys[row], values[row])
        return keys, values

    def _ends(self):
        return self.offset

    def _attend(self, q, scale, window, sinks):
        """Attention of the newest positions, q [batch, num_q_heads, n, head_dim], over the blocks."""
        with self._lock:
            if self.sliding_window is not None:
                window = self.sliding_window if window is None else min(window, self.sliding_window)
            options = {"scale": scale, "sliding_window": window}
            n, num_q_heads = q.shape[2], q.shape[1]
            if n != self._n_new or n == 1:
                self._settle()
            if self._plan is None:
                plan = self._pool.plan_read([(sequence, n) for sequence in self._sequences], num_q_heads)
                return _core.attend(plan, 0, q, sinks=sinks, **options)
            # A step attends with as many query heads as its pool was made for, and the pool was made when K and V
            # came, before the queries: with one query head for each KV head. So each of a group takes its turn.
            heads = self._shape[1]
            groups = q.reshape(q.shape[0], heads, num_q_heads // heads, n, q.shape[3])
            turns = []
            for turn in range(num_q_heads // heads):
                own_sinks = None if sinks is None else sinks.reshape(heads, -1)[:, turn]
                turns.append(_core.attend(self._plan, 0, groups[:, :, turn], sinks=own_sinks, **options))
            return mx.stack(turns, axis=2).reshape(*q.shape[:3], -1)

    def _restore(self, keys, values, offset):
        """Fills an empty cache with its newest rows, dense, up to position `offset`."""
        if not offset or keys is None:
            if offset:
                raise ValueError(f"offset is {offset}, but there are no keys")
            return
        self._checked_shape(keys, values)
        n = keys.shape[2]
        needed = min(offset, self.sliding_window) if self._drops else offset
        if not needed <= n <= offset:
            raise ValueError(f"offset is {offset}, there are {n} rows, {needed} to {offset} are needed")
        if n < offset:
            if self.kv_quant_config.mode == "off":
                self.kv_quant_config = PagedKVQuantConfig(_FORMAT_OF_DTYPE[keys.dtype])
            self._shape = self._checked_shape(keys, values)
            self._pool, self._sequences = self._open(self._shape)
            # Positions that the window has left behind are never read: their slots stay as they are.
            for start in range(0, offset - n, _SKIPPED_AT_ONCE):
                skipped = min(_SKIPPED_AT_ONCE, offset - n - start)
                self._pool.reserve([(sequence, skipped) for sequence in self._sequences]).commit()
        self.update_without_fetch(keys, values)


class PagedBatchCache:
    """The cache of one layer for a batch of prompts of different lengths, with the protocol of mlx-lm's BatchKVCache.

    Each prompt is a PagedPromptCache of its own, and padding is never stored: of the columns that a step brings, a
    prompt takes those that are its tokens. So batches are joined, filtered and split without copying a row.

    Where attention is not ours, rows come dense and padded at the right, and the mask covers the padding.
    """

    def __init__(self, prompts):
        self._prompts = list(prompts)
        self._padding = [0] * len(self._prompts)  # columns at the left that are still to come
        self._coming = [None] * len(self._prompts)  # tokens that are still to come before padding; None: no end
        self._tokens = []  # of the last step, for each prompt: its first column, and the one after its last
        self._seen = []  # rows that its positions see
        self._changes = 0

    @classmethod
    def merge(cls, caches):
        """Forks of the caches as one batch; they are not changed themselves.

        Errors: ValueError for caches of another kind, of more than one row, or of different windows.
        """
        for cache in caches:
            if not isinstance(cache, PagedPromptCache):
                raise ValueError(f"[merge] a {type(cache).__name__} in one batch with paged caches: make all of them "
                                 "with pagedkv.mlx.make_prompt_cache")
            if len(cache._sequences) > 1:
                raise ValueError(f"[merge] a cache has {len(cache._sequences)} batch rows, each must have 1")
        _same_window([cache.sliding_window for cache in caches])
        return cls(cache.fork() for cache in caches)

    @property
    def offset(self):
        """int32 [batch]: the position of the next column in each prompt; below 0 while padding is to come."""
        return mx.array([prompt.offset - padding for prompt, padding in zip(self._prompts, self._padding)], mx.int32)

    def size(self) -> int:
        return max((prompt.size() for prompt in self._prompts), default=0)

    def empty(self) -> bool:
        return all(prompt.empty() for prompt in self._prompts)

    @property
    def nbytes(self) -> int:
        return sum(prompt.nbytes for prompt in self._prompts)

    def paged_stats(self) -> list:
        """PagedKVCache.paged_stats of each prompt."""
        return [prompt.paged_stats() for prompt in self._prompts]

    def is_trimmable(self) -> bool:
        return all(prompt.is_trimmable() for prompt in self._prompts)

    def trim(self, n) -> int:
        """Removes the last n positions of every prompt, at most all of the shortest; returns how many."""
        n = max(0, min(n, *(prompt.offset for prompt in self._prompts)))
        for prompt in self._prompts:
            prompt.trim(n)
        self._changes += n > 0
        return n

    # --- the batch ---------------------------------------------------------------------------------------------

    def prepare(self, *, left_padding=None, lengths=None, right_padding=None):
        """What the next steps bring: for each prompt, columns of padding at the left, or tokens before padding.

        Errors: ValueError (left padding behind tokens, right padding without lengths).
        """
        if left_padding is not None:
            if not self.empty():
                raise ValueError("[prepare] left padding can only come before the first tokens")
            self._padding = [have + more for have, more in zip(self._padding, left_padding)]
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("[prepare] right padding needs the lengths of what comes before it")
            self._coming = list(lengths)

    def finalize(self):
        """The padding at the right has passed."""
        self._coming = [None] * len(self._prompts)

    def filter(self, batch_indices):
        """Keeps the given prompts, in this order."""
        indices = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        for name in ("_prompts", "_padding", "_coming"):
            setattr(self, name, [getattr(self, name)[i] for i in indices])
        self._changes += 1

    def extend(self, other):
        """Takes the prompts of another batch in, too. ValueError for one that is not paged, or of another window."""
        if not isinstance(other, PagedBatchCache):
            raise ValueError(f"[extend] a {type(other).__name__} cannot join a paged batch: make all caches with "
                             "pagedkv.mlx.make_prompt_cache")
        _same_window([prompt.sliding_window for prompt in (*self._prompts, *other._prompts)])
        for name in ("_prompts", "_padding", "_coming"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self._changes += 1

    def extract(self, idx):
        """One prompt's cache, sharing blocks with this one until either writes."""
        return self._prompts[idx].fork()

    def fork(self):
        """A second batch with the same content; blocks are shared as those of PagedPromptCache are."""
        other = type(self)(prompt.fork() for prompt in self._prompts)
        other._padding, other._coming = list(self._padding), list(self._coming)
        return other

    def __copy__(self):
        return self.fork()

    def __deepcopy__(self, memo):
        return self.fork()

    @property
    def state(self):
        return [prompt.state for prompt in self._prompts], list(self._padding), list(self._coming)

    @state.setter
    def state(self, state):
        prompts, padding, coming = state
        changes = self.__dict__.get("_changes", 0)
        self.__init__([PagedPromptCache.from_state(prompt) for prompt in prompts])
        self._padding, self._coming, self._changes = list(padding), list(coming), changes + 1

    @classmethod
    def from_state(cls, state):
        cache = cls([])
        cache.state = state
        return cache

    # --- a step ------------------------------------------------------------------------------------------------

    def _columns(self, n):
        """Of the next n columns, those that are each prompt's tokens: (first, the one after the last)."""
        spans = []
        for padding, coming in zip(self._padding, self._coming):
            first = min(padding, n)
            spans.append((first, n if coming is None else min(n, first + coming)))
        return spans

    def make_mask(self, N, return_array=False, window_size=None):
        """bool [batch, 1, N, n] over the rows as update_and_fetch returns them dense."""
        spans = self._columns(N)
        before, first, end = (mx.array(x)[:, None, None, None] for x in zip(*(
            (prompt._seen_by(0), span[0], span[1]) for prompt, span in zip(self._prompts, spans))))
        columns = mx.arange(N)[:, None]
        n_rows = before + end - first
        rows = mx.arange(n_rows.max().item())
        newest = before + columns - first  # the row of the query's own position
        mask = (rows <= newest) & (rows < n_rows)
        window = window_size or self._prompts[0].sliding_window
        if window is not None:
            mask = mask & (rows > newest - window)
        # Padding must see something: a row without any key is NaN in a dense softmax.
        mask = mx.where((columns >= first) & (columns < end), mask, rows == 0)
        return _remember(mask, N, tuple(prompt.offset + b - a for prompt, (a, b) in zip(self._prompts, spans)), window)

    def update_and_fetch(self, keys, values):
        """Stores [batch, num_kv_heads, n, head_dim], padding left out; returns as PagedPromptCache does.

        On an error nothing has changed. Errors: ValueError (batch size), and those of PagedPromptCache.
        """
        if keys.shape[0] != len(self._prompts):
            raise ValueError(f"keys are {list(keys.shape)}, the batch has {len(self._prompts)} prompts")
        n = keys.shape[2]
        spans = self._columns(n)
        seen = [prompt._seen_by(end - first) for prompt, (first, end) in zip(self._prompts, spans)]
        parts = [(keys[row:row + 1, :, first:end], values[row:row + 1, :, first:end])
                 for row, (first, end) in enumerate(spans)]
        mx.eval(parts)  # together, not one by one
        stored = []
        try:
            for prompt, part in zip(self._prompts, parts):
                if part[0].shape[2]:
                    prompt._append(*part)
                    stored.append((prompt, part[0].shape[2]))
        except BaseException:
            for prompt, n_stored in stored:
                prompt._take_back(n_stored)
            raise
        for row, (first, end) in enumerate(spans):
            self._padding[row] -= first
            if self._coming[row] is not None:
                self._coming[row] -= end - first
            self._prompts[row]._seen = seen[row]
        self._tokens, self._seen = spans, seen
        self._changes += 1
        self._row_shapes = ((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype)
        return self._fetch(sys._getframe(1))

    def keys_and_values(self):
        """What the last update_and_fetch returned."""
        return self._fetch(sys._getframe(1))

    def _fetch(self, frame):
        n = max(self._seen)
        if not _hands_rows_on(frame):
            return self._newest(n)
        *shapes, dtype = self._row_shapes
        return _pair(self, [(len(self._prompts), heads, n, dim) for heads, dim in shapes], dtype)

    def _newest(self, n):
        *shapes, dtype = self._row_shapes
        rows = [prompt._newest(seen) if seen else [mx.zeros((1, heads, 0, dim), dtype) for heads, dim in shapes]
                for prompt, seen in zip(self._prompts, self._seen)]
        return tuple(mx.concatenate([_padded(row[part], 0, n) for row in rows]) for part in (0, 1))

    def _ends(self):
        return tuple(prompt.offset for prompt in self._prompts)

    def _attend(self, q, scale, window, sinks):
        parts = [q[row:row + 1, :, first:end] for row, (first, end) in enumerate(self._tokens)]
        mx.eval(parts)
        out = []
        for prompt, part, (first, _) in zip(self._prompts, parts, self._tokens):
            if part.shape[2]:
                rows = prompt._attend(part, scale, window, sinks)
            else:
                rows = mx.zeros((1, q.shape[1], 0, self._row_shapes[1][1]), q.dtype)
            out.append(_padded(rows, first, q.shape[2]))
        return mx.concatenate(out)


def _same_window(windows):
    if len(set(windows)) > 1:
        raise ValueError(f"caches of one batch have the windows {windows}, they must have the same one")


def _padded(rows, first, n):
    """[1, heads, m, dim] -> [1, heads, n, dim], rows from place `first` on, zeros around them."""
    return mx.pad(rows, [(0, 0), (0, 0), (first, n - first - rows.shape[2]), (0, 0)])


# --- the attention -------------------------------------------------------------------------------------------------

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

    def __enter__(self):
        return self

    def __exit__(self, *_):
        unpatch_attention()


def patch_attention():
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


def unpatch_attention():
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


def _hands_rows_on(frame):
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


def _remember(mask, n, ends, window):
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


# --- files: safetensors, rows as they are stored -------------------------------------------------------------------

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
    with _whole_file(path) as file:
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
    cache._kind, cache._dtype = "mlx", {_name_of(dtype): dtype for dtype in _FORMAT_OF_DTYPE}[layer["dtype"]]
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
        windows = [window for _, window in _layers_of(model)]
        if len(windows) != len(layers):
            raise ValueError(f"[load] {path}: {len(layers)} layers in the file, {len(windows)} in the model")
        for number, (layer, window) in enumerate(zip(layers, windows)):
            if layer["sliding_window"] != window:
                of_model = "a cache that is not paged" if window is _NOT_PAGED else f"window {window}"
                raise ValueError(f"[load] {path}: layer {number} has window {layer['sliding_window']} in the file, "
                                 f"{of_model} in the model")
    if kv_quant is not None:
        asked = _parts(PagedKVQuantConfig(kv_quant).mode)
        for number, layer in enumerate(layers):
            if _parts(layer["mode"]) != asked:
                raise ValueError(f"[load] {path}: layer {number} is {layer['mode']} in the file, {kv_quant} was asked "
                                 "for; stored rows are not converted")


@contextlib.contextmanager
def _whole_file(path):
    """A file to write that takes the place of `path` at the end; on an error nothing has happened."""
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
