"""The prompt cache of one layer, and the list of them that a model is given."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models import base
from mlx_lm.models import cache as own  # mlx-lm's own caches

from .. import _core
from .._frameworks import from_numpy
from ..paged_kv_cache import PagedKVCache
from ..quant import PagedKVQuantConfig
from .attention import hands_rows_on, remember
from .rows import PagedRows, pair

FORMAT_OF_DTYPE = {mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}
# The longest prefill step that mlx-lm takes unless told otherwise; sizes what a window keeps from the start.
_PREFILL_STEP = 2048
# Positions that are passed over at a time when a window no longer has their rows.
_SKIPPED_AT_ONCE = 512


def make_prompt_cache(model: Any, kv_quant: str | None = None, *, block_size: int = 16, num_blocks: int = 64,
                      dynamic: bool = True, keep_behind_window: bool = False) -> list[Any]:
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
    for layer, (entry, window) in enumerate(layers_of(model)):
        if window is NOT_PAGED:
            kept.setdefault(type(entry).__name__, []).append(layer)
            made.append(entry)
        else:
            made.append(PagedPromptCache(block_size, num_blocks, config, dynamic, window, keep_behind_window))
    if kept:
        layers = "; ".join(f"{name}: layers {', '.join(map(str, numbers))}" for name, numbers in kept.items())
        warnings.warn(f"these layers keep mlx-lm's own cache, which is neither paged nor quantized: {layers}",
                      RuntimeWarning, stacklevel=2)
    return made


NOT_PAGED = object()


def layers_of(model):
    """What mlx-lm would give each layer, and the window of ours: None for full attention, or NOT_PAGED."""
    def window_of(entry):
        if type(entry) is own.KVCache:
            return None
        if type(entry) is own.RotatingKVCache and entry.keep == 0:
            return entry.max_size
        return NOT_PAGED

    return [(entry, window_of(entry)) for entry in own.make_prompt_cache(model)]


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

    def __init__(self, block_size: int = 16, num_blocks: int = 64, kv_quant_config: PagedKVQuantConfig | str | None = None,
                 dynamic: bool = True, sliding_window: int | None = None, keep_behind_window: bool = False) -> None:
        super().__init__(block_size, num_blocks, kv_quant_config, dynamic)
        if sliding_window is not None:
            _core.check_cache_options(sliding_window=sliding_window)
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
        return remember(mask, N, offset + N, window)

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
                rows = pair(snapshot, snapshot._shapes(snapshot._held()), self._dtype)
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
        from .batch import PagedBatchCache  # which is made of these

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
        if self._pool is None and config.mode == "off" and keys.dtype in FORMAT_OF_DTYPE:
            self.kv_quant_config = PagedKVQuantConfig(FORMAT_OF_DTYPE[keys.dtype])
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
        if hands_rows_on(frame):
            return pair(self, self._shapes(self._seen), self._dtype)
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
            n = q.shape[2]
            if n != self._n_new or n == 1:
                self._settle()
            if self._plan is None:
                plan = self._pool.plan_read([(sequence, n) for sequence in self._sequences])
                return _core.attend(plan, 0, q, sinks=sinks, **options)
            return _core.attend(self._plan, 0, q, sinks=sinks, **options)

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
                self.kv_quant_config = PagedKVQuantConfig(FORMAT_OF_DTYPE[keys.dtype])
            self._shape = self._checked_shape(keys, values)
            self._pool, self._sequences = self._open(self._shape)
            # Positions that the window has left behind are never read: their slots stay as they are.
            for start in range(0, offset - n, _SKIPPED_AT_ONCE):
                skipped = min(_SKIPPED_AT_ONCE, offset - n - start)
                plan = self._pool.reserve([(sequence, skipped) for sequence in self._sequences])
                plan.slot_mapping()  # they are ours to leave
                plan.commit()
        self.update_without_fetch(keys, values)
