"""The cache object of the article "What Is a Paged KV Cache in MTPLX?": keys and values of one layer that grow."""

from __future__ import annotations

import warnings

from . import _core
from ._frameworks import causal_mask, dtype_of, from_numpy, kind_of, to_numpy, whole
from ._locks import fork_safe_lock
from .errors import CapacityError
from .quant import PagedKVQuantConfig, paged_kv_quant_mode_from_env

TYPE_CHECKING = False
if TYPE_CHECKING:  # not at run time: typing takes a while to import
    from typing import Any


class PagedKVCache:
    """Keys and values of one layer, for any batch, in blocks of one pool.

    block_size       tokens of a block, 1 to 256
    num_blocks       blocks of each batch row that exist from the start
    kv_quant_config  PagedKVQuantConfig, a mode, or None: as the environment says (see paged_kv_quant_mode_from_env)
    dynamic          grow past num_blocks on demand; None: PAGEDKV_DYNAMIC, then MTPLX_DYNAMIC_PAGED_KV, else off

    Until the first write the shape is unknown and no memory is held. Arrays are [batch, num_kv_heads, n_tokens,
    head_dim] of numpy, torch, mlx or any other framework with DLPack. Any thread may call it; calls take turns.
    """

    def __init__(self, block_size: int = 16, num_blocks: int = 1024,
                 kv_quant_config: PagedKVQuantConfig | str | None = None, dynamic: bool | None = None) -> None:
        if kv_quant_config is None:
            kv_quant_config = PagedKVQuantConfig(paged_kv_quant_mode_from_env())
        elif not isinstance(kv_quant_config, PagedKVQuantConfig):
            kv_quant_config = PagedKVQuantConfig(kv_quant_config)
        _core.check_cache_options(block_size=block_size, num_blocks=num_blocks, dynamic=dynamic)
        for name, value, most in (("block_size", block_size, 256), ("num_blocks", num_blocks, 2**31 - 1)):
            if not 1 <= value <= most:
                raise ValueError(f"{name} is {value}, allowed are 1 to {most}")
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.kv_quant_config = kv_quant_config
        self.dynamic = _core.dynamic_from_env(False) if dynamic is None else bool(dynamic)
        self._lock = fork_safe_lock()
        self._pool = None  # from the first write on
        self._sequences = []  # one a batch row
        self._shape = None  # (batch, num_kv_heads, head_dim, head_dim_v)
        self._kind, self._dtype = "numpy", None
        self._fallbacks = {}

    @classmethod
    def from_cache(cls, entry: Any, block_size: int = 16, num_blocks: int = 1024,
                   kv_quant_config: PagedKVQuantConfig | str | None = None, dynamic: bool | None = None) -> PagedKVCache:
        """Takes over the first `entry.offset` tokens of `entry.keys` and `entry.values`, arrays as above. A pool of
        num_blocks must hold them, unless it may grow: CapacityError."""
        cache = cls(block_size, num_blocks, kv_quant_config, dynamic)
        offset = int(entry.offset)
        if offset < 0:
            raise ValueError(f"offset is {offset}")
        if offset == 0 or entry.keys is None:
            if offset:
                raise ValueError(f"offset is {offset}, but there are no keys")
            return cache
        for name, array in (("keys", entry.keys), ("values", entry.values)):
            if array.shape[2] < offset:
                raise ValueError(f"offset is {offset}, {name} hold {array.shape[2]} tokens")
        cache.update_without_fetch(entry.keys[:, :, :offset], entry.values[:, :, :offset])
        return cache

    # --- size ------------------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Tokens of each batch row that fit without growing; before the first write as asked, then as committed."""
        with self._lock:
            if self._pool is None:
                return self.block_size * self.num_blocks
            blocks = self._pool.committed_capacity // self.block_size
            return blocks // len(self._sequences) * self.block_size

    @property
    def offset(self) -> int:
        """Tokens stored of each batch row."""
        with self._lock:
            return self._pool.length(self._sequences[0]) if self._sequences else 0

    def size(self) -> int:
        """Tokens stored of each batch row."""
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that hold the tokens, padding included."""
        with self._lock:
            if self._pool is None:
                return 0
            return sum(map(self._pool.blocks_held, self._sequences)) * self._pool.image_bytes()

    def _grow_to_capacity(self, required_tokens):
        """Makes room for so many tokens in each batch row, now. CapacityError where dynamic is off and the pool is
        smaller, or memory ends."""
        with self._lock:
            if required_tokens <= self.capacity:
                return
            if not self.dynamic:
                need = -(-required_tokens // self.block_size)
                raise CapacityError(
                    f"need {required_tokens} tokens ({need} blocks), have {self.capacity} tokens "
                    f"({self.capacity // self.block_size} blocks); dynamic growth is off (dynamic=True, or "
                    "PAGEDKV_DYNAMIC=1)")
            if self._pool is not None:
                blocks = -(-required_tokens // self.block_size) * len(self._sequences)  # a row's are its own
                self._pool.grow_to_capacity(blocks * self.block_size)
                return
            blocks = -(-required_tokens // self.block_size)
            if blocks > 2**31 - 1:
                raise CapacityError(f"{blocks} blocks are needed, the limit is {2**31 - 1}")
            self.num_blocks = blocks

    # --- writing ---------------------------------------------------------------------------------------------

    def update_without_fetch(self, keys: Any, values: Any) -> None:
        """Appends [batch, num_kv_heads, n, head_dim]. On an error nothing has changed.

        Errors: CapacityError, NotFiniteError, ValueError (shapes), TypeError (arrays)."""
        with self._lock:
            shape = self._checked_shape(keys, values)
            n = keys.shape[2]
            if n == 0:
                return
            pool, sequences = self._pool, self._sequences
            if pool is None:
                pool, sequences = self._open(shape)
            plan = pool.reserve([(sequence, n) for sequence in sequences])
            try:
                _core.append(plan, 0, keys, values)
            except BaseException:
                plan.abandon()
                raise
            plan.commit(all_or_none=True)
            if self._pool is None:
                self._pool, self._sequences, self._shape = pool, sequences, shape
            self._kind, self._dtype = kind_of(keys), dtype_of(keys)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Appends, and returns everything stored: keys and values [batch, num_kv_heads, offset, head_dim], decoded into
        dense arrays (counted in dense_materializations; `paged_attention` needs none)."""
        with self._lock:
            self.update_without_fetch(keys, values)
            return self._dense()

    def trim(self, n: int) -> int:
        """Removes the last n tokens of every batch row, at most all; returns how many."""
        n = whole("n", n)
        with self._lock:
            length = self.offset
            removed = max(0, min(n, length))
            if removed:
                for sequence in self._sequences:
                    self._pool.truncate(sequence, length - removed)
            return removed

    def is_trimmable(self) -> bool:
        return True

    def fork(self) -> PagedKVCache:
        """A second cache with the same content. Blocks are shared until one of the two writes into them."""
        with self._lock:
            other = type(self).__new__(type(self))
            other.__dict__.update(self.__dict__)
            other._lock = fork_safe_lock()
            other._fallbacks = {}
            other._sequences = []  # so that a fork that fails gives back just what it took
            for sequence in self._sequences:
                other._sequences.append(self._pool.fork(sequence))
            return other

    def __copy__(self) -> PagedKVCache:
        return self.fork()

    def __deepcopy__(self, memo: Any) -> PagedKVCache:
        return self.fork()

    def __reduce__(self):
        raise TypeError(f"[{type(self).__name__}] blocks are not pickled: take .state, or save a file with pagedkv.mlx")

    def __del__(self):
        # The pool may live on in a fork.
        for sequence in getattr(self, "_sequences", ()):
            self._pool.release(sequence)

    # --- reading ---------------------------------------------------------------------------------------------

    def paged_attention(self, q: Any, scale: float | None = None, sliding_window: int | None = -1, mask: Any = None,
                        softcap: float = 0.0) -> Any:
        """Causal attention of the newest positions, over the packed blocks.

        q               [batch, num_q_heads, n, head_dim]; the last row belongs to position offset - 1
        scale           None: 1/sqrt(head_dim)
        sliding_window  keys a query sees, its own included; -1: all
        mask            None or "causal"; an array that broadcasts to [batch, num_q_heads, n, offset], of bools (True: the
                        key is seen) or floats (added to the logits), is answered by dense attention, which is slower,
                        warns once and is counted
        returns         [batch, num_q_heads, n, head_dim_v]
        """
        with self._lock:
            if self._pool is None or self.offset == 0:
                raise ValueError("the cache is empty")
            shape = getattr(q, "shape", ())
            if len(shape) != 4 or shape[0] != len(self._sequences) or shape[3] != self._shape[2]:
                raise ValueError(f"q is {list(shape)}, expected [{len(self._sequences)}, num_q_heads, n, "
                                 f"{self._shape[2]}]")
            plan = self._pool.plan_read([(sequence, shape[2]) for sequence in self._sequences])
            if mask is not None and not (isinstance(mask, str) and mask == "causal"):
                return self._masked_attention(q, mask, scale, sliding_window, softcap)
            return _core.attend(plan, 0, q, scale=scale, sliding_window=sliding_window, softcap=softcap)

    @property
    def keys(self) -> Any:
        """[batch, num_kv_heads, offset, head_dim], decoded (counted), or None before the first write."""
        return self._dense()[0]

    @property
    def values(self) -> Any:
        """[batch, num_kv_heads, offset, head_dim_v], decoded (counted), or None before the first write."""
        return self._dense()[1]

    @property
    def state(self) -> tuple[Any, Any]:
        """(keys, values), decoded; assigning a pair replaces the content."""
        return self._dense()

    @state.setter
    def state(self, pair: tuple[Any, Any]) -> None:
        keys, values = pair
        with self._lock:
            fresh = type(self).__new__(type(self))
            fresh.__dict__.update(self.__dict__)
            fresh._pool, fresh._sequences, fresh._shape = None, [], None
            if keys is not None:
                fresh.update_without_fetch(keys, values)
            # What was there is given back by `fresh`, which leaves with it.
            names = ("_pool", "_sequences", "_shape", "_kind", "_dtype")
            for name in names:
                mine = self.__dict__[name]
                self.__dict__[name] = fresh.__dict__[name]
                fresh.__dict__[name] = mine

    @property
    def meta_state(self) -> tuple[str, ...]:
        """What `state` leaves out, as strings: block_size, num_blocks, mode, dynamic, offset."""
        return (str(self.block_size), str(self.num_blocks), self.kv_quant_config.mode, str(int(self.dynamic)),
                str(self.offset))

    @meta_state.setter
    def meta_state(self, strings: tuple[str, ...]) -> None:
        block_size, num_blocks, mode, dynamic, offset = strings
        with self._lock:
            if self._pool is not None and int(offset) != self.offset:
                raise ValueError(f"meta_state is of {offset} tokens, the cache has {self.offset}")
            if self._pool is None:
                self.block_size, self.num_blocks = int(block_size), int(num_blocks)
                self.kv_quant_config, self.dynamic = PagedKVQuantConfig(mode), bool(int(dynamic))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        """The mask of the next N positions, as mlx-lm's caches give it: None for one position that sees all, "causal",
        or a bool array [N, offset + N]."""
        with self._lock:
            offset = self.offset
            if window_size is not None and offset + N > window_size:
                return causal_mask(N, offset, window_size, self._kind)
            if N == 1:
                return None
            return causal_mask(N, offset, None, self._kind) if return_array else "causal"

    def paged_stats(self, resident: bool = False) -> dict[str, Any]:
        """Every counter of the pool, with block_size, mode, capacity, offset and nbytes of this cache. resident: also
        bytes_resident, for which the kernel is asked for every page."""
        with self._lock:
            stats = self._pool.stats(resident) if self._pool is not None else {}
            stats["fallbacks"] = {**stats.get("fallbacks", {}), **self._fallbacks}
            stats.update(block_size=self.block_size, mode=self.kv_quant_config.mode, capacity=self.capacity,
                         offset=self.offset, nbytes=self.nbytes)
            return stats

    def __repr__(self):
        return (f"{type(self).__name__}(offset={self.offset}, capacity={self.capacity}, block_size={self.block_size}, "
                f"mode={self.kv_quant_config.mode!r})")

    # --- inside ----------------------------------------------------------------------------------------------

    def _checked_shape(self, keys, values):
        for name, array in (("keys", keys), ("values", values)):
            if len(getattr(array, "shape", ())) != 4:
                found = list(array.shape) if hasattr(array, "shape") else type(array).__name__
                error = ValueError if hasattr(array, "shape") else TypeError
                raise error(f"{name} are {found}, expected an array [batch, num_kv_heads, n, head_dim]")
        if tuple(keys.shape[:3]) != tuple(values.shape[:3]):
            raise ValueError(f"keys are {list(keys.shape)}, values {list(values.shape)}: batch, heads and tokens differ")
        shape = (keys.shape[0], keys.shape[1], keys.shape[3], values.shape[3])
        if self._shape is not None and shape != self._shape:
            raise ValueError(f"keys are {list(keys.shape)} and values {list(values.shape)}; the cache was made for batch "
                             f"{self._shape[0]}, {self._shape[1]} heads, head_dim {self._shape[2]}:{self._shape[3]}")
        return shape

    def _open(self, shape):
        batch, heads, head_dim, head_dim_v = shape
        if batch < 1:
            raise ValueError(f"the batch is {batch}, at least 1 is needed")
        pool = _core.Cache(num_kv_heads=heads, head_dim=head_dim, head_dim_v=head_dim_v,
                           kv_quant=self.kv_quant_config, block_size=self.block_size,
                           num_blocks=self.num_blocks * batch, dynamic=self.dynamic, max_sequences=batch,
                           prefix_sharing=False)
        return pool, [pool.start().sequence for _ in range(batch)]

    def _decoded(self):
        """Keys and values as float32 numpy arrays."""
        import numpy as np

        batch, heads, head_dim, head_dim_v = self._shape
        n = self.offset
        keys, values = (np.empty((batch, heads, n, dim), np.float32) for dim in (head_dim, head_dim_v))
        if n:
            plan = self._pool.plan_read([(sequence, 1) for sequence in self._sequences])
            for row in range(batch):
                self._pool.read_dense(plan, row, 0, 0, keys[row], values[row])
        return keys, values

    def _dense(self):
        with self._lock:
            if self._pool is None:
                return None, None
            return tuple(from_numpy(array, self._kind, self._dtype) for array in self._decoded())

    def _masked_attention(self, q, mask, scale, sliding_window, softcap):
        import numpy as np

        from ._masked import mask_of, masked_attention

        if isinstance(mask, str):
            raise ValueError(f"mask is {mask!r}, allowed are None, 'causal' or an array")
        _core.check_attention(q, scale=scale, sliding_window=sliding_window, softcap=softcap)
        mask = mask_of(mask, (*q.shape[:3], self.offset))
        if "paged_attention" not in self._fallbacks:
            self._fallbacks["paged_attention"] = "a mask array: dense attention"
            warnings.warn("paged_attention got a mask array: dense attention runs, which reads an unpacked copy",
                          RuntimeWarning, stacklevel=3)
        out = masked_attention(np.asarray(to_numpy(q), np.float32), *self._decoded(), mask, scale, sliding_window, softcap)
        return from_numpy(out, kind_of(q), dtype_of(q))
