"""The cache of transformers whose rows live in blocks: one pool for all layers, one sequence for each row of a batch."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import Any

import torch
from transformers.cache_utils import Cache

import pagedkv

from .. import _core
from .._frameworks import whole
from ..quant import PagedKVQuantConfig
from . import saved
from .layer import NoLayer, PagedLayer
from .packed import NAME, PackedRows
from .shapes import FORMAT_OF_DTYPE, identity_of, mode_of, shapes_of, stores_latents
from .step import Step, leading_padding

_OPTIONS = ("block_size", "num_blocks", "dynamic", "kv_memory", "max_context", "longest_chunk", "max_sequences",
            "query_path", "isa")


class PagedCache(Cache):
    """The KV cache of one batch, in blocks: pass it to generate() or forward() as `past_key_values` (or `cache`).

      config       the model's own config object; its attn_implementation is looked at in every step
      kv_quant     how K and V are stored: "f32", "f16", "bf16", "q8", "q6", "q4", or "K:V" of two of them; "off" is
                   f16. None: PAGEDKV_QUANT if set to a quantized mode, else the model's own type
      fingerprint  what else makes K and V differ, for load(): see fingerprint(model)
      options      of pagedkv.Cache: block_size, num_blocks, dynamic, kv_memory, max_context, longest_chunk,
                   max_sequences, query_path, isa; max_cache_len is max_context. max_sequences defaults to the rows of the first forward of a
                   batch, longest_chunk to its columns, at least 512

    Blocks are created in the first forward, when the batch is known: num_blocks (1024) of block_size (16) tokens for
    all rows together, and more on demand, up to kv_memory bytes. With dynamic=False that is all, and sliding layers
    have a pool of their own, for max_sequences rows (forks included) and chunks of longest_chunk columns.

    A forward is stored whole or not at all. One that an exception cuts short is abandoned: its columns do not count,
    and the next forward says so in a RuntimeWarning if it had stored any. NaN or infinity in K or V raises
    NotFiniteError at the forward's last layer; the cache is then as before this forward.

    Errors: ValueError (config, mode, options, batch size, masks), CapacityError (no room: the cache is as before this
    forward), NotFiniteError, RuntimeError (inputs that require gradients: pagedkv has no backward).
    Threads: one at a time, as any Cache.
    """

    def __init__(self, config: Any, kv_quant: str | PagedKVQuantConfig | None = None, *, fingerprint: str = "",
                 max_cache_len: int | None = None, **options: Any) -> None:
        if max_cache_len is not None:
            options["max_context"] = max_cache_len
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"[PagedCache] unknown options {sorted(unknown)}; there are {', '.join(_OPTIONS)}")
        _core.check_cache_options(**options)
        self._shapes, self._attending = shapes_of(config)
        self._config = config.get_text_config(decoder=True)
        self._stores_latents = stores_latents(self._config)
        self._identity = identity_of(config, self._shapes)
        if kv_quant is None:
            from_environment = _core.kv_quant_from_env()
            self._kv_quant = None if from_environment == "f16" else from_environment
        else:
            self._kv_quant = mode_of(kv_quant)
        self._fingerprint = fingerprint
        self._options = {"dynamic": _core.dynamic_from_env(True)} | options
        self._core = None  # pagedkv.Cache, made when the batch is known
        self._group_of = {}  # layer -> group of the core
        self._sized_for = (0, 0)  # rows, columns at once
        self._forget()
        self._recording = False
        super().__init__(layers=self._make_layers())

    def _make_layers(self):
        return [PagedLayer(self, layer, self._shapes[layer]) if layer in self._shapes else NoLayer(self, layer)
                for layer in range(self._config.num_hidden_layers)]

    def _forget(self):
        self._sequences = []  # [rows]
        self._skipped = []  # [rows] leading columns that are padding and not stored
        self._columns = 0  # of finished forwards
        self._step = None

    def __del__(self):
        # Forks share one pool: what this one holds must go back to it. At interpreter exit all of it goes anyway.
        with contextlib.suppress(Exception):
            self._release_all()

    def __repr__(self):
        return (f"PagedCache({len(self._sequences)} rows, {self.get_seq_length()} columns, {len(self._shapes)} layers, "
                f"{self._kv_quant or 'type of the model'})")

    # --- figures ---------------------------------------------------------------------------------------------------

    @property
    def core(self) -> pagedkv.Cache | None:
        """The pagedkv.Cache that has the blocks; None before the first forward."""
        return self._core

    @property
    def kv_quant(self) -> str | None:
        """How K and V are stored; None while that waits for the first forward."""
        return self._kv_quant

    def stats(self, resident: bool = False) -> dict[str, Any]:
        """Every counter of the blocks, as a dict; empty before the first forward. Forks share the counters. resident:
        also bytes_resident, for which the kernel is asked for every page."""
        return {} if self._core is None else self._core.stats(resident)

    def verify(self) -> None:
        """Walks every invariant of the blocks, and that rows are as long as they should be. RuntimeError if not."""
        if self._core is None:
            return
        self._core.verify()
        for row, sequence in enumerate(self._sequences):
            if self._core.length(sequence) != self._columns - self._skipped[row]:
                raise RuntimeError(f"[verify] row {row} has {self._core.length(sequence)} tokens, expected "
                                   f"{self._columns} columns - {self._skipped[row]} skipped")

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of finished forwards, padding included."""
        return self._columns + (self._step.n_columns if self._step is not None and self._step.complete else 0)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def get_max_length(self, layer_idx=None):
        return self._options.get("max_context") or -1 if layer_idx is None else self.layers[layer_idx].get_max_length()

    def __iter__(self):
        """(keys, values, None) of each layer, as DynamicCache gives them: dense, counted."""
        for layer in self.layers:
            yield layer.keys, layer.values, None

    @property
    def batch_size(self):
        return len(self._sequences) or -1

    @property
    def is_initialized(self):
        return bool(self._sequences)

    @property
    def is_dummy(self):
        return [isinstance(layer, NoLayer) for layer in self.layers]

    def early_initialization(self, batch_size, num_heads, head_dim, dtype, device):
        self._open(batch_size, 0, dtype)

    # --- a forward -------------------------------------------------------------------------------------------------

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Takes the new K and V of a layer.

          key_states, value_states  [rows, num_kv_heads, new columns, head_dim], K with its rotary embedding

        Returns K and V as this layer's attention reads them: with attn_implementation="pagedkv" twice the same
        PackedRows, else dense tensors of all columns that DynamicCache would return, decoded from the blocks.
        """
        packed = self._config._attn_implementation == NAME
        if self._step is not None and (self._step.complete or layer_idx in self._step.stored):
            self._settle()
        self._check_rows(key_states, value_states, layer_idx, packed)
        if packed:
            n_columns, _ = self.layers[layer_idx].get_mask_sizes(key_states.shape[2])
            rows = PackedRows(self, layer_idx, key_states, value_states, n_columns)
            return rows, rows
        try:
            step = self._step or self._begin(key_states, [0] * key_states.shape[0], packed=False)
            self._store(step, layer_idx, key_states, value_states)
            _, first = self.layers[layer_idx].get_mask_sizes(step.n_columns)
            dense = self._read_dense(step.plan, step.places(), layer_idx, first, step.n_columns, key_states.dtype)
            self._finish_if_complete(step, step.stored >= self._shapes.keys())
        except BaseException:
            self._abandon()
            raise
        return dense

    def _attend(self, rows, layer_idx, query, padding_mask, scaling, softcap, window, sinks):
        """Stores a layer's new rows and attends over all that is stored. Returns [rows, columns, num_q_heads, d]."""
        layer, shape = rows.layer, self._shapes[rows.layer]
        n_columns, n_queries = rows.key.shape[2], query.shape[2]
        if query.shape[0] != rows.key.shape[0] or n_queries > n_columns:
            raise ValueError(f"[pagedkv] queries of {query.shape[0]} rows and {n_queries} columns, keys of "
                             f"{rows.key.shape[0]} and {n_columns}")
        if n_queries < n_columns:
            # Gemma 4 asks its layers without K and V of their own for the last columns only. A plan has queries for
            # all new columns: zeros stand in, and what they read is dropped.
            query = torch.cat([query.new_zeros(*query.shape[:2], n_columns - n_queries, query.shape[3]), query], 2)
        if window is not None and window != shape.window:
            raise ValueError(f"[pagedkv] layer {layer} attends with sliding_window={window}, the config's layer "
                             f"types say {shape.window or 'none'}")
        try:
            step = self._step or self._begin(rows.key, self._padding(padding_mask, rows.key), packed=True)
            if padding_mask is not None and padding_mask is not step.mask:
                # Another layer type's mask of the same step: the rows are stored once, so it must say the same.
                if step.stored and self._padding(padding_mask, rows.key) != step.padding:
                    raise ValueError(f"[pagedkv] layer {layer} has another padding mask than the layers before it")
                step.mask = padding_mask
            self._store(step, layer, rows.key, rows.value)
            if step.plan is None:
                out = query.new_zeros(query.shape[0], query.shape[2], query.shape[1], shape.head_dim_v)
            else:
                out = step.columns(pagedkv.attend(step.plan, layer, step.tokens(query), scale=scaling,
                                                  softcap=softcap or 0.0, sinks=sinks))
            # A layer that a model runs several times, each time with rows of their own, counts as each of these.
            step.attended.add(layer if layer_idx in self._shapes else layer_idx)
            self._finish_if_complete(step, step.attended >= self._attending)
        except BaseException:
            self._abandon()
            raise
        return out if n_queries == n_columns else out[:, n_columns - n_queries:]

    def _check_rows(self, key, value, layer_idx, packed):
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("[pagedkv] keys or values require gradients, and pagedkv has no backward: call the "
                               "model under torch.no_grad() or torch.inference_mode()")
        shape = self._shapes.get(layer_idx)
        if shape is None:
            raise ValueError(f"[PagedCache] layer {layer_idx} stores no keys; those that do are {list(self._shapes)}")
        if packed and self._stores_latents:
            raise ValueError(f'[pagedkv] {self._config.model_type} stores latents that attn_implementation="{NAME}" '
                             'cannot attend to: set "sdpa" or "eager"')
        if key.device.type != "cpu":
            raise ValueError(f"[PagedCache] keys are on {key.device}; blocks are in CPU memory")
        if key.dtype not in FORMAT_OF_DTYPE:
            raise TypeError(f"[PagedCache] keys are {key.dtype}; stored are float32, float16 and bfloat16")
        expected = [(shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim_v)]
        found = [(x.shape[1], x.shape[3]) for x in (key, value)]
        if found != expected:
            raise ValueError(f"[PagedCache] layer {layer_idx} brings K and V of (heads, head_dim) {found}, the config "
                             f"says {expected}")
        if key.shape[2] < 1 or value.shape[2] != key.shape[2]:
            raise ValueError(f"[PagedCache] {key.shape[2]} columns of K, {value.shape[2]} of V")
        if (self._columns or self._step) and key.shape[0] != len(self._sequences):
            raise ValueError(f"[PagedCache] a batch of {key.shape[0]} rows, the cache holds {len(self._sequences)}: "
                             "reset() it, or batch_repeat_interleave() or batch_select_indices()")

    def _open(self, n_rows, n_columns, dtype):
        """Makes the blocks, if there are none that do, and an empty sequence for each row of a new batch."""
        if self._columns:
            return
        windowed = any(shape.window for shape in self._shapes.values())
        if self._core is not None and windowed and (n_rows > self._sized_for[0] or n_columns > self._sized_for[1]):
            # The pool of a window is made for so many rows and so long chunks. Nothing is stored: another pool.
            self._release_all()
            self._core = None
        if self._core is None:
            self._sized_for = (n_rows, max(512, n_columns))
            options = {"max_sequences": n_rows, "longest_chunk": self._sized_for[1]} | self._options
            if self._kv_quant is None:
                self._kv_quant = FORMAT_OF_DTYPE[dtype]
            groups = {}
            for layer, shape in self._shapes.items():
                groups.setdefault(shape, []).append(layer)
            query_heads = {shape.num_q_heads // shape.num_kv_heads for shape in groups}
            if len(query_heads) == 1:
                options = {"num_q_heads": query_heads.pop() * next(iter(groups)).num_kv_heads} | options
            # Tokens come without ids, so nothing could ever be found again by prefix: no keys.
            self._core = pagedkv.Cache(
                [pagedkv.Group(layers=layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                               head_dim_v=shape.head_dim_v, sliding_window=shape.window, kv_quant=self._kv_quant)
                 for shape, layers in groups.items()],
                prefix_sharing=False, fingerprint=self._fingerprint, **options)
            self._group_of = {layer: group for group, layers in enumerate(groups.values()) for layer in layers}
        if len(self._sequences) != n_rows:
            self._release_all()
            self._sequences = [self._core.start().sequence for _ in range(n_rows)]
            self._skipped = [0] * n_rows

    def _begin(self, key, padding, packed):
        """Takes the blocks of a forward. CapacityError: nothing changed."""
        n_rows, _, n_columns, _ = key.shape
        self._open(n_rows, n_columns, key.dtype)
        step = Step(None, n_columns, padding, packed)
        asked = [(self._sequences[row], n_columns - padding[row]) for row in step.places()]
        if asked:
            step.plan = self._core.reserve(asked)
        self._step = step
        return step

    def _store(self, step, layer, key, value):
        if layer in step.stored:
            return  # a layer that reuses this one's K and V
        if key.shape[2] != step.n_columns:
            raise ValueError(f"[PagedCache] layer {layer} brings {key.shape[2]} columns, the layers before it "
                             f"{step.n_columns}")
        if step.plan is not None:
            pagedkv.append(step.plan, layer, step.tokens(key), step.tokens(value))
        step.stored.add(layer)

    def _finish_if_complete(self, step, complete):
        step.complete = complete
        # While past is recorded, a step may still be taken back in part, also behind a window: see crop().
        if complete and not self._recording:
            self._commit(step.n_columns)

    def _commit(self, n_columns):
        """Ends the complete step: its first n_columns stay."""
        step, self._step = self._step, None
        if step.plan is not None:
            step.plan.commit([max(0, n_columns - step.padding[row]) for row in step.places()], all_or_none=True)
        self._columns += n_columns
        self._skipped = [skipped + min(pad, n_columns) for skipped, pad in zip(self._skipped, step.padding)]

    def _abandon(self):
        step, self._step = self._step, None
        if step is not None and step.plan is not None:
            step.plan.abandon()

    def _settle(self):
        """Ends the pending step: a complete one is kept, one that was cut short is dropped and reported."""
        if self._step is None:
            return
        if self._step.complete:
            self._commit(self._step.n_columns)
            return
        step = self._step
        self._abandon()
        missing = sorted(self._attending - step.attended if step.packed else self._shapes.keys() - step.stored)
        warnings.warn(f"[PagedCache] a forward of {step.n_columns} columns was cut short: layers {missing} never came, "
                      "nothing of it is kept", RuntimeWarning, stacklevel=3)

    def _padding(self, mask, key):
        n_rows, _, n_columns, _ = key.shape
        seen = self.get_seq_length()
        return leading_padding(mask, n_columns, seen, self._skipped if seen else [0] * n_rows)

    # --- dense reads -----------------------------------------------------------------------------------------------

    def _read_dense(self, plan, places, layer, first, n_new, dtype):
        """K and V of columns `first` ... end, [rows, num_kv_heads, columns, d]; what is not stored is 0."""
        shape = self._shapes[layer]
        n = self._columns + n_new - first
        out = [torch.empty(len(self._sequences), shape.num_kv_heads, n, d) for d in (shape.head_dim, shape.head_dim_v)]
        place_of = {row: place for place, row in enumerate(places)}
        for row, skipped in enumerate(self._skipped):
            hidden = min(max(skipped - first, 0), n)
            for x in out:
                x[row, :, :hidden] = 0
            if row in place_of:
                self._core.read_dense(plan, place_of[row], layer, first=max(first - skipped, 0),
                                      out_k=out[0][row, :, hidden:], out_v=out[1][row, :, hidden:])
        return tuple(x.to(dtype) for x in out)

    def _read_all(self, layer):
        """K and V as DynamicCache holds them between forwards; (None, None) while there is nothing."""
        self._settle()
        window = self._shapes[layer].window
        if not self._columns:
            return None, None
        first = max(self._columns - window + 1, 0) if window else 0
        places = [row for row, skipped in enumerate(self._skipped) if skipped < self._columns]
        plan = self._core.plan_read([(self._sequences[row], 1) for row in places])
        dtype = {name: dtype for dtype, name in FORMAT_OF_DTYPE.items()}.get(self._kv_quant, torch.float32)
        return self._read_dense(plan, places, layer, first, 0, dtype)

    # --- taking back, moving rows ----------------------------------------------------------------------------------

    def activate_past_recording(self) -> None:
        """From now on the last forward can be taken back by crop() in part or whole, also behind a sliding window."""
        self._recording = True

    def is_recording_past(self, layer_idx):
        return self._recording

    def crop(self, tokens_to_remove: int) -> None:
        """Removes the last -tokens_to_remove columns of every row; 0 removes nothing.

        Behind a sliding window only the last forward can be removed, and only after activate_past_recording().
        Errors: ValueError (positive, as in DynamicCache; more than there is; behind what a window still holds): the
        cache is then unchanged.
        """
        n = -whole("tokens_to_remove", tokens_to_remove)
        if n < 0:
            raise ValueError(f"[crop] {tokens_to_remove} is above 0: pass the columns to remove as a negative number")
        if n > self.get_seq_length():
            raise ValueError(f"[crop] {n} columns to remove, the cache has {self.get_seq_length()}")
        if self._step is not None and self._step.complete and n <= self._step.n_columns:
            self._commit(self._step.n_columns - n)
            return
        self._settle()
        if n == 0:
            return
        columns = self._columns - n
        shorter = []
        try:
            # All rows or none: forks are cut, and take the rows' place once every one of them could be.
            for sequence, skipped in zip(self._sequences, self._skipped):
                shorter.append(self._core.fork(sequence))
                self._core.truncate(shorter[-1], max(0, columns - skipped))
        except BaseException:
            self._release(shorter)
            raise
        self._release(self._sequences)
        self._sequences = shorter
        self._skipped = [min(skipped, columns) for skipped in self._skipped]
        self._columns = columns

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row i becomes what row beam_idx[i] was. Rows that are taken twice share their blocks until they write."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times, copies beside each other, sharing their blocks until they write."""
        self._take_rows([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps the rows that `indices` (integers, or a mask) selects, in that order."""
        if self._sequences:
            indices = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            self._take_rows(torch.arange(len(self._sequences))[indices].tolist())

    def _take_rows(self, sources):
        self._settle()
        if not self._sequences or sources == list(range(len(self._sequences))):
            return
        rows, forks = [], []
        try:
            for place, source in enumerate(sources):
                first = sources.index(source) == place
                rows.append(self._sequences[source] if first else self._core.fork(self._sequences[source]))
                if not first:
                    forks.append(rows[-1])
        except BaseException:
            self._release(forks)
            raise
        self._release([sequence for row, sequence in enumerate(self._sequences) if row not in sources])
        self._sequences = rows
        self._skipped = [self._skipped[source] for source in sources]

    def reset(self) -> None:
        """Empties the cache; the blocks stay for the next batch, whatever its size."""
        self._abandon()
        self._release_all()
        self._forget()

    def fork(self) -> PagedCache:
        """A second cache with the same rows, over the same blocks: shared until one of the two writes.

        copy.copy and copy.deepcopy do the same.
        """
        self._settle()
        twin = type(self).__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin._forget()  # before anything can fail: the twin must never release these rows
        twin.layers = twin._make_layers()
        twin._columns = self._columns
        twin._skipped = list(self._skipped)
        for sequence in self._sequences:
            twin._sequences.append(self._core.fork(sequence))
        return twin

    def __copy__(self):
        return self.fork()

    def __deepcopy__(self, memo):
        return self.fork()

    def __reduce__(self):
        raise TypeError("[PagedCache] blocks are not pickled: save() the cache to a file and load() it")

    def _release(self, sequences):
        for sequence in sequences:
            self._core.release(sequence)

    def _release_all(self):
        self._abandon()
        sequences, self._sequences = self._sequences, []
        self._release(sequences)

    # --- files -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the rows to a safetensors file, codes and scales as they are stored: nothing is quantized again.

        A sliding layer saves what its window still needs. The file is written beside `path` and takes its place when
        it is whole, so that a crash or a full disk leaves the old file. Only the owner may read it: it has the text in
        it, in a way. Errors: ValueError (nothing stored), OSError (the old file is as it was).
        """
        saved.save(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], config: Any, kv_quant: str | PagedKVQuantConfig | None = None, *,
             fingerprint: str = "", **options: Any) -> PagedCache:
        """The cache that save() wrote, as a new one; generation goes on as if it had never been saved.

          config    of the same model; what differs is named in the error
          kv_quant  None: as in the file. Anything else must be the same as in the file
          options   as for PagedCache; they need not be those it was saved with

        Nothing is built before the whole file has been checked. Errors: FileNotFoundError; ValueError for a file that
        is no such file, of another version, cut short, damaged, of another model, of another kv_quant, or longer than
        max_context; CapacityError.
        """
        return saved.load(cls, path, config, kv_quant, fingerprint, options)
