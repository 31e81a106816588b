"""pagedkv in transformers: a cache whose keys and values live in blocks, and the attention that reads them packed.

    import pagedkv.hf                                    # registers attn_implementation="pagedkv"
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pagedkv")
    cache = pagedkv.hf.PagedCache(model.config, kv_quant="q8")
    model.generate(**inputs, past_key_values=cache)

The model's attn_implementation, looked at in every step, decides how the blocks are read:

  "pagedkv"          attention over the packed blocks. Nothing is ever made dense.
  eager, sdpa, ...   every layer is handed dense K and V, decoded from the blocks in every step; counted in
                     stats()["dense_materializations"]. Any mask that DynamicCache allows is allowed.

Words: a *row* is one entry of the batch, and one sequence of the cache. A *column* is one entry of the model's input
in every row, padding included; transformers counts in columns. A *position* counts the stored tokens of one row:

    position = column - skipped[row]

With attn_implementation="pagedkv" left padding is skipped, not stored. The stock attentions store it as any token,
because only their mask, which the cache never sees, tells it from the rest.

Written for transformers 5.24.
"""

import contextlib
import hashlib
import json
import os
import struct
import tempfile
import warnings
import weakref
from dataclasses import dataclass, field

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs
from transformers.masking_utils import AttentionMaskInterface, and_masks, causal_mask_function, sliding_window_overlay
from transformers.modeling_utils import AttentionInterface

import pagedkv

from ._core import kv_quant_from_env, parse_kv_quant

NAME = "pagedkv"  # of the attention, as in attn_implementation="pagedkv"

_FORMAT_OF_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
_OPTIONS = ("block_size", "num_blocks", "dynamic", "kv_memory", "max_context", "longest_chunk", "max_sequences",
            "query_path", "isa")
# Rows of a prompt that are gathered or scattered at a time when a cache is saved or loaded.
_ROWS_AT_ONCE = 512


# --- what a config says about its layers ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _LayerShape:
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    num_q_heads: int
    window: int  # keys a query sees, itself included; 0: all


def _shapes_of(config):
    """The layers of a decoder that store K and V, and those that read them.

    Returns ({layer: _LayerShape}, {layers that attend}). A layer that reuses another's K and V only attends.
    Errors: ValueError for an encoder-decoder, and for a layer whose state is not K and V of every token.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"[PagedCache] {config.model_type} is an encoder-decoder; only decoders are supported")
    text = config.get_text_config(decoder=True)
    kinds, extras = get_layer_types_and_kwargs(text)
    sharing = getattr(text, "kv_sharing_modes", None) or [None] * len(kinds)
    stored, attending = {}, set()
    for layer, (kind, extra, own, mode) in enumerate(zip(kinds, extras, text.per_layer_config, sharing)):
        if kind == "dummy":
            if mode == "reuse":
                attending.add(layer)
            continue
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise ValueError(f"[PagedCache] layer {layer} of {text.model_type} is of type {kind}; supported are "
                             "full_attention, sliding_attention and chunked_attention")
        heads = own.num_attention_heads
        if _stores_latents(text):
            # DeepSeek's latents: one head, the compressed rows as K and the rotated part as V.
            shape = (1, own.kv_lora_rank, own.qk_rope_head_dim)
        else:
            head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
            shape = (getattr(own, "num_key_value_heads", None) or heads, head_dim, head_dim)
        stored[layer] = _LayerShape(*shape, num_q_heads=heads, window=extra.get("sliding_window") or 0)
        attending.add(layer)
    if not stored:
        raise ValueError(f"[PagedCache] {text.model_type} has no attention layer")
    return stored, attending


def _mode(kv_quant):
    """A word, or a PagedKVQuantConfig, as the mode's own name: "q8", "f32", "q8:q4"."""
    config = pagedkv.PagedKVQuantConfig(kv_quant) if isinstance(kv_quant, str) else kv_quant
    return parse_kv_quant(config.mode)


def _stores_latents(text):
    return getattr(text, "kv_lora_rank", None) is not None


def _identity(config, shapes):
    """What of a config makes K and V differ, as it is written to a file: names and JSON values."""
    text = config.get_text_config(decoder=True)
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "rope_parameters")
    identity = {name: getattr(text, name, None) for name in names}
    identity["layers"] = [[layer, s.num_kv_heads, s.head_dim, s.head_dim_v, s.window] for layer, s in shapes.items()]
    return json.loads(json.dumps(identity, default=str))


def fingerprint(model):
    """Tells models of the same shape apart: SHA-256, in hex, over every parameter's name, shape and 64 of its values.

    Give it to PagedCache(fingerprint=...) and PagedCache.load(fingerprint=...): a file of another model, or of the
    same one before it was trained on, is then refused. A config alone does not know the weights.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].to(torch.float32).cpu()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


# --- one forward of the model --------------------------------------------------------------------------------------


@dataclass
class _Step:
    """One forward: the columns it brings, the plan that has their slots, and which layers have come so far."""

    plan: object  # StepPlan, or None when every new column is padding
    n_columns: int
    padding: list  # [rows] leading new columns that are padding and not stored
    packed: bool  # begun by our attention
    stored: set = field(default_factory=set)  # layers whose rows are in the blocks
    attended: set = field(default_factory=set)  # layers that have read them
    complete: bool = False
    mask: object = None  # the padding mask that was checked last

    def places(self):
        """The rows that take part, in the plan's order."""
        return [row for row, pad in enumerate(self.padding) if pad < self.n_columns]

    def tokens(self, x):
        """x [rows, heads, columns, d] -> [plan.n_tokens, heads, d], a view where the layout allows it."""
        if any(self.padding):
            return torch.cat([x[row, :, self.padding[row]:].transpose(0, 1) for row in self.places()])
        if x.shape[0] == 1:
            return x[0].transpose(0, 1)
        return x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3])

    def columns(self, x):
        """x [plan.n_tokens, heads, d] -> [rows, columns, heads, d], padding is 0."""
        n_rows = len(self.padding)
        if not any(self.padding):
            return x.reshape(n_rows, self.n_columns, *x.shape[1:])
        out = x.new_zeros(n_rows, self.n_columns, *x.shape[1:])
        first = 0
        for row in self.places():
            n = self.n_columns - self.padding[row]
            out[row, self.padding[row]:] = x[first:first + n]
            first += n
        return out


class PackedRows:
    """What PagedCache.update hands to attn_implementation="pagedkv" in place of K, and of V: where to find them.

    An attention function does not get the cache; this carries it there. No tensor: whoever computes with it gets a
    TypeError that says which attention is needed.
    """

    __slots__ = ("cache", "layer", "key", "value", "shape")

    def __init__(self, cache, layer, key, value, n_columns):
        self.cache, self.layer = cache, layer
        self.key, self.value = key, value  # [rows, num_kv_heads, new columns, d]
        # Of the tensor that it stands for: models look at the length.
        self.shape = torch.Size((key.shape[0], key.shape[1], n_columns, key.shape[3]))

    @property
    def dtype(self):
        return self.key.dtype

    @property
    def device(self):
        return self.key.device

    def to(self, *args, **kwargs):
        return self  # models that share K and V between layers move them along with their layers

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise TypeError(f"[pagedkv] {getattr(func, '__name__', func)} was called on packed keys or values. Only "
                        f'attn_implementation="{NAME}" reads them: the config that PagedCache was made with asks for '
                        "it, the layer that computes does not. Make the cache with the model's own config, or set "
                        "another attn_implementation")


class PagedLayer(CacheLayerMixin):
    """One layer of a PagedCache, for code that walks `cache.layers`. Layers change together, through the cache."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False  # blocks are taken by steps, not in advance

    def __init__(self, cache, layer, shape):
        # Not super().__init__(): keys and values are read from the blocks, not kept. The cache owns its layers; a
        # weak way back lets it give its blocks back as soon as nobody holds it.
        self._cache, self._layer, self._shape = weakref.proxy(cache), layer, shape
        self.is_sliding = shape.window > 0

    def __repr__(self):
        return f"PagedLayer({self._layer})"

    @property
    def is_initialized(self):
        return self._cache.is_initialized

    @property
    def keys(self):
        """Dense K, [rows, num_kv_heads, columns, head_dim] of what DynamicCache would hold; counted. None: nothing."""
        return self._cache._read_all(self._layer)[0]

    @property
    def values(self):
        return self._cache._read_all(self._layer)[1]

    def lazy_initialization(self, key_states, value_states):
        pass

    def update(self, key_states, value_states, *args, **kwargs):
        return self._cache.update(key_states, value_states, self._layer)

    def get_mask_sizes(self, query_length):
        """(columns of K, first of them) in the step that brings query_length columns."""
        seen = self.get_seq_length()
        first = max(seen - self._shape.window + 1, 0) if self._shape.window else 0
        return seen + query_length - first, first

    def get_seq_length(self):
        return self._cache.get_seq_length()

    def get_max_length(self):
        return self._shape.window or self._cache._options.get("max_context") or -1

    def _together(self, *args, **kwargs):
        raise NotImplementedError("[PagedLayer] the layers of a PagedCache change together: call the cache's method")

    reset = crop = reorder_cache = batch_repeat_interleave = batch_select_indices = offload = prefetch = _together


class _NoLayer(PagedLayer):
    """A layer without K and V of its own: it reuses another's, or has no attention."""

    def __init__(self, cache, layer):
        super().__init__(cache, layer, _LayerShape(0, 0, 0, 0, 0))

    keys = values = None


# --- the cache -----------------------------------------------------------------------------------------------------


class PagedCache(Cache):
    """The KV cache of one batch, in blocks: pass it to generate() or forward() as `past_key_values` (or `cache`).

      config       the model's own config object; its attn_implementation is looked at in every step
      kv_quant     how K and V are stored: "f32", "f16", "bf16", "q8", "q6", "q4", or "K:V" of two of them; "off" is
                   f16. None: PAGEDKV_QUANT if set to a quantized mode, else the model's own type
      fingerprint  what else makes K and V differ, for load(): see fingerprint(model)
      options      of pagedkv.Cache: block_size, num_blocks, dynamic, kv_memory, max_context, longest_chunk,
                   max_sequences, query_path, isa. max_sequences defaults to the rows of the first forward of a
                   batch, longest_chunk to its columns, at least 512

    Blocks are created in the first forward, when the batch is known. Memory follows pagedkv.Cache: num_blocks (1024)
    of block_size (16) tokens for all rows together, more only with dynamic=True or PAGEDKV_DYNAMIC. Sliding layers
    have a pool of their own, for max_sequences rows and chunks of longest_chunk columns.

    A forward is stored whole or not at all. One that an exception cuts short is abandoned: its columns do not count,
    and the next forward says so in a RuntimeWarning if it had stored any. NaN or infinity in K or V raises
    NotFiniteError at the forward's last layer; the cache is then as before this forward.

    Errors: ValueError (config, mode, options, batch size, masks), CapacityError (no room: the cache is as before this
    forward), NotFiniteError, RuntimeError (inputs that require gradients: pagedkv has no backward).
    Threads: one at a time, as any Cache.
    """

    def __init__(self, config, kv_quant=None, *, fingerprint="", **options):
        unknown = set(options) - set(_OPTIONS)
        if unknown:
            raise ValueError(f"[PagedCache] unknown options {sorted(unknown)}; there are {', '.join(_OPTIONS)}")
        self._shapes, self._attending = _shapes_of(config)
        self._config = config.get_text_config(decoder=True)
        self._identity = _identity(config, self._shapes)
        if kv_quant is None:
            from_environment = kv_quant_from_env()
            self._kv_quant = None if from_environment == "f16" else from_environment
        else:
            self._kv_quant = _mode(kv_quant)
        self._fingerprint = fingerprint
        self._options = options
        self._core = None  # pagedkv.Cache, made when the batch is known
        self._group_of = {}  # layer -> group of the core
        self._sized_for = (0, 0)  # rows, columns at once
        self._forget()
        self._recording = False
        super().__init__(layers=self._make_layers())

    def _make_layers(self):
        return [PagedLayer(self, layer, self._shapes[layer]) if layer in self._shapes else _NoLayer(self, layer)
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
    def core(self):
        """The pagedkv.Cache that has the blocks; None before the first forward."""
        return self._core

    @property
    def kv_quant(self):
        """How K and V are stored; None while that waits for the first forward."""
        return self._kv_quant

    def stats(self):
        """Every counter of the blocks, as a dict; empty before the first forward. Forks share the counters."""
        return {} if self._core is None else self._core.stats()

    def verify(self):
        """Walks every invariant of the blocks, and that rows are as long as they should be. RuntimeError if not."""
        if self._core is None:
            return
        self._core.verify()
        for row, sequence in enumerate(self._sequences):
            if self._core.length(sequence) != self._columns - self._skipped[row]:
                raise RuntimeError(f"[verify] row {row} has {self._core.length(sequence)} tokens, expected "
                                   f"{self._columns} columns - {self._skipped[row]} skipped")

    def get_seq_length(self, layer_idx=0):
        """Columns of finished forwards, padding included."""
        return self._columns + (self._step.n_columns if self._step is not None and self._step.complete else 0)

    def get_mask_sizes(self, query_length, layer_idx):
        return self.layers[layer_idx].get_mask_sizes(query_length)

    def get_max_length(self, layer_idx=None):
        return self._options.get("max_context") or -1 if layer_idx is None else self.layers[layer_idx].get_max_length()

    @property
    def batch_size(self):
        return len(self._sequences) or -1

    @property
    def is_initialized(self):
        return bool(self._sequences)

    @property
    def is_dummy(self):
        return [isinstance(layer, _NoLayer) for layer in self.layers]

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
        with self._step_or_nothing():
            step = self._step or self._begin(key_states, [0] * key_states.shape[0], packed=False)
            self._store(step, layer_idx, key_states, value_states)
            _, first = self.layers[layer_idx].get_mask_sizes(step.n_columns)
            dense = self._read_dense(step.plan, step.places(), layer_idx, first, step.n_columns, key_states.dtype)
            self._finish_if_complete(step, step.stored >= self._shapes.keys())
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
        with self._step_or_nothing():
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
            step.attended.add(layer_idx)
            self._finish_if_complete(step, step.attended >= self._attending)
        return out[:, n_columns - n_queries:]

    def _check_rows(self, key, value, layer_idx, packed):
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise RuntimeError("[pagedkv] keys or values require gradients, and pagedkv has no backward: call the "
                               "model under torch.no_grad() or torch.inference_mode()")
        shape = self._shapes.get(layer_idx)
        if shape is None:
            raise ValueError(f"[PagedCache] layer {layer_idx} stores no keys; those that do are {list(self._shapes)}")
        if packed and _stores_latents(self._config):
            raise ValueError(f'[pagedkv] {self._config.model_type} stores latents that attn_implementation="{NAME}" '
                             'cannot attend to: set "sdpa" or "eager"')
        if key.device.type != "cpu":
            raise ValueError(f"[PagedCache] keys are on {key.device}; blocks are in CPU memory")
        if key.dtype not in _FORMAT_OF_DTYPE:
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
                self._kv_quant = _FORMAT_OF_DTYPE[dtype]
            groups = {}
            for layer, shape in self._shapes.items():
                groups.setdefault(shape, []).append(layer)
            # Tokens come without ids, so nothing could ever be found again by prefix: no keys.
            self._core = pagedkv.Cache(
                [pagedkv.Group(layers=layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim,
                               head_dim_v=shape.head_dim_v, num_q_heads=shape.num_q_heads,
                               sliding_window=shape.window, kv_quant=self._kv_quant)
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
        step = _Step(None, n_columns, padding, packed)
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

    @contextlib.contextmanager
    def _step_or_nothing(self):
        """An error inside ends the step without a trace."""
        try:
            yield
        except BaseException:
            self._abandon()
            raise

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
        """The leading new columns of each row that are padding, from the mask over all columns.

        Errors: ValueError for what is no left padding, and where the mask and what is stored disagree.
        """
        n_rows, n_columns = key.shape[0], key.shape[2]
        seen = self.get_seq_length()
        skipped = self._skipped if seen else [0] * n_rows
        padded = [0] * n_rows
        if mask is not None:
            if not isinstance(mask, PaddingMask):
                raise ValueError(f'[pagedkv] a custom attention mask {list(mask.shape)}: attn_implementation="{NAME}" '
                                 "takes 2D padding masks only")
            mask = mask.as_subclass(torch.Tensor)[:, 0, 0]
            if tuple(mask.shape) != (n_rows, seen + n_columns):
                raise ValueError(f"[pagedkv] the attention mask is {list(mask.shape)}, expected {n_rows} rows of "
                                 f"{seen} columns in the cache and {n_columns} new ones")
            counts = (~mask).sum(-1)
            wrong = (mask != (torch.arange(mask.shape[1]) >= counts[:, None])).nonzero()
            if len(wrong):
                row = int(wrong[0, 0])
                column = int((~mask[row]).nonzero()[-1])
                raise ValueError(f"[pagedkv] row {row} of the attention mask hides column {column} behind columns that "
                                 "it shows: only left padding is supported, no right padding and no holes")
            padded = counts.tolist()
        new = []
        for row in range(n_rows):
            started = skipped[row] < seen
            if padded[row] != skipped[row] and (started or padded[row] < skipped[row]):
                said = f"hides {padded[row]} leading columns" if mask is not None else "is not given"
                raise ValueError(f"[pagedkv] row {row}: the attention mask {said}, in the forwards before it hid "
                                 f"{skipped[row]}. Pass the mask over all columns in every forward; a cache that "
                                 "another attn_implementation filled holds padding as tokens")
            new.append(padded[row] - skipped[row])
        return new

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
        dtype = {name: dtype for dtype, name in _FORMAT_OF_DTYPE.items()}.get(self._kv_quant, torch.float32)
        return self._read_dense(plan, places, layer, first, 0, dtype)

    # --- taking back, moving rows ----------------------------------------------------------------------------------

    def activate_past_recording(self):
        """From now on the last forward can be taken back by crop() in part or whole, also behind a sliding window."""
        self._recording = True

    def is_recording_past(self, layer_idx):
        return self._recording

    def crop(self, tokens_to_remove):
        """Removes the last -tokens_to_remove columns of every row; 0 removes nothing.

        Behind a sliding window only the last forward can be removed, and only after activate_past_recording().
        Errors: ValueError (positive, as in DynamicCache; more than there is; behind what a window still holds): the
        cache is then unchanged.
        """
        n = -int(tokens_to_remove)
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

    def reorder_cache(self, beam_idx):
        """Row i becomes what row beam_idx[i] was. Rows that are taken twice share their blocks until they write."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats):
        """Every row `repeats` times, copies beside each other, sharing their blocks until they write."""
        self._take_rows([row for row in range(len(self._sequences)) for _ in range(repeats)])

    def batch_select_indices(self, indices):
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

    def reset(self):
        """Empties the cache; the blocks stay for the next batch, whatever its size."""
        self._abandon()
        self._release_all()
        self._forget()

    def fork(self):
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

    def save(self, path):
        """Writes the rows to one file, bytes and scales as they are stored: nothing is quantized again.

        A sliding layer saves what its window still needs. The file is written beside `path` and takes its place when
        it is whole, so that a crash or a full disk leaves the old file. Only the owner may read it: it has the text in
        it, in a way. Errors: ValueError (nothing stored), OSError (the old file is as it was).
        """
        self._settle()
        if not self._columns:
            raise ValueError(f"[save] {path}: the cache is empty")
        header = {"identity": self._identity, "fingerprint": self._fingerprint, "kv_quant": self._kv_quant,
                  "columns": self._columns, "skipped": self._skipped}
        header["payload_bytes"] = sum(n for *_, n in self._pieces(header))
        with _whole_file(path) as file:
            _write_header(file, header)
            for row, layer, first, n_rows, _ in self._pieces(header):
                if n_rows:
                    for rows in self._gather(row, layer, first, n_rows):
                        file.write(rows)

    @classmethod
    def load(cls, path, config, kv_quant=None, *, fingerprint="", **options):
        """The cache that save() wrote, as a new one; generation goes on as if it had never been saved.

          config    of the same model; what differs is named in the error
          kv_quant  None: as in the file. Anything else must be the same as in the file
          options   as for PagedCache; they need not be those it was saved with

        Nothing is built before the whole file has been checked. Errors: FileNotFoundError; ValueError for a file that
        is no such file, of another version, cut short, damaged, of another model, of another kv_quant, or longer than
        max_context; CapacityError.
        """
        with open(path, "rb") as file:
            header, payload = _read_header(file, path)
            cache = cls(config, header["kv_quant"], fingerprint=fingerprint, **options)
            cache._refuse_other(path, header, kv_quant)
            cache._restore(file, payload, header)
        return cache

    def _pieces(self, header):
        """The payload, in order: (row, layer, first position, positions, bytes)."""
        for row, skipped in enumerate(header["skipped"]):
            length = header["columns"] - skipped
            for layer, shape in self._shapes.items():
                first = max(length - shape.window + 1, 0) if shape.window else 0
                per_token = pagedkv.bytes_per_token(header["kv_quant"], shape.num_kv_heads, shape.head_dim,
                                                    shape.head_dim_v)
                yield row, layer, first, length - first, (length - first) * per_token

    def _views(self, layer):
        """Views of a layer's blocks as tensors [num_blocks, block_size, num_kv_heads, width]: K, V, then scales."""
        tensors = self._core.tensors(layer)
        views = (tensors.k, tensors.v, tensors.k_scales, tensors.v_scales)
        return [torch.from_dlpack(view) for view in views if view is not None]

    def _gather(self, row, layer, first, n):
        """The stored bytes of n positions from `first` on, part after part."""
        plan = self._core.plan_read([(self._sequences[row], 1)])
        table = torch.from_numpy(plan.block_tables(self._group_of[layer])[0]).long()
        for view in self._views(layer):
            for start in range(first, first + n, _ROWS_AT_ONCE):
                positions = torch.arange(start, min(start + _ROWS_AT_ONCE, first + n))
                rows = view[table[positions // self._core.block_size], positions % self._core.block_size]
                yield rows.contiguous().view(torch.uint8).numpy().data

    def _refuse_other(self, path, header, kv_quant):
        for name, own in self._identity.items():
            if header["identity"].get(name) != own:
                raise ValueError(f"[load] {path}: {name} is {header['identity'].get(name)} in the file, {own} in the "
                                 "config")
        if header["fingerprint"] != self._fingerprint:
            raise ValueError(f"[load] {path}: the fingerprint is {header['fingerprint']!r} in the file, "
                             f"{self._fingerprint!r} was given: another model's weights")
        if kv_quant is not None and _mode(kv_quant) != header["kv_quant"]:
            raise ValueError(f"[load] {path}: kv_quant is {header['kv_quant']} in the file, {_mode(kv_quant)} was "
                             "asked for; stored rows are not converted")
        longest = header["columns"] - min(header["skipped"])
        if 0 < self._options.get("max_context", 0) < longest:
            raise ValueError(f"[load] {path}: {longest} tokens in the file, max_context is "
                             f"{self._options['max_context']}")
        expected = sum(n for *_, n in self._pieces(header))
        if expected != header["payload_bytes"]:
            raise ValueError(f"[load] {path}: {header['payload_bytes']} bytes of rows, its lengths need {expected}")

    def _restore(self, file, payload, header):
        self._open(len(header["skipped"]), 0, None)
        starts = {}
        for row, layer, first, n, n_bytes in self._pieces(header):
            starts[row, layer] = (first, n, payload)
            payload += n_bytes
        for row, (sequence, skipped) in enumerate(zip(self._sequences, header["skipped"])):
            length = header["columns"] - skipped
            for position in range(0, length, _ROWS_AT_ONCE):
                n = min(_ROWS_AT_ONCE, length - position)
                # Positions that a window has left behind are never read: their slots stay as they are.
                with self._core.reserve([(sequence, n)]) as plan:
                    for layer in self._shapes:
                        self._scatter(file, plan, layer, position, n, *starts[row, layer])
        self._columns, self._skipped = header["columns"], list(header["skipped"])

    def _scatter(self, file, plan, layer, position, n, first, n_saved, start):
        """Fills a step's slots from the file: positions [position, position + n) of those saved from `first` on."""
        begin, end = max(position, first), position + n
        if begin >= end:
            return
        slots = torch.from_numpy(plan.slot_mapping(self._group_of[layer]))[begin - position:]
        for view in self._views(layer):
            row_bytes = view.shape[2] * view.shape[3] * view.element_size()
            file.seek(start + (begin - first) * row_bytes)
            rows = torch.frombuffer(bytearray(file.read((end - begin) * row_bytes)), dtype=torch.uint8)
            rows = rows.view(view.dtype).view(end - begin, view.shape[2], view.shape[3])
            view[slots // self._core.block_size, slots % self._core.block_size] = rows
            start += n_saved * row_bytes


# --- the file: magic, version, size of the header, header (JSON), rows, SHA-256 of all before -----------------------

_MAGIC = b"PAGEDKVH"
_VERSION = 1
_PREFIX = struct.Struct("<8sIQ")
_MOST_HEADER_BYTES = 1 << 20


class _HashedFile:
    def __init__(self, file):
        self._file, self._digest = file, hashlib.sha256()

    def write(self, data):
        self._digest.update(data)
        self._file.write(data)

    def digest(self):
        return self._digest.digest()


@contextlib.contextmanager
def _whole_file(path):
    """A file to write that takes the place of `path` at the end, hash appended; on an error nothing has happened."""
    path = os.path.abspath(os.fspath(path))
    folder, name = os.path.split(path)
    handle, temporary = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            hashed = _HashedFile(file)
            yield hashed
            file.write(hashed.digest())
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


def _write_header(file, header):
    text = json.dumps(header).encode()
    if len(text) > _MOST_HEADER_BYTES:
        raise ValueError(f"[save] the header has {len(text)} bytes, at most {_MOST_HEADER_BYTES} are allowed")
    file.write(_PREFIX.pack(_MAGIC, _VERSION, len(text)))
    file.write(text)


def _read_header(file, path):
    """Checks the whole file, then returns its header and where its rows begin. Reads at most 1 MiB at a time."""
    size = os.fstat(file.fileno()).st_size
    prefix = file.read(_PREFIX.size)
    if len(prefix) < _PREFIX.size or not prefix.startswith(_MAGIC):
        raise ValueError(f"[load] {path}: not a saved PagedCache (it begins with {prefix[:8]!r}, expected {_MAGIC!r})")
    _, version, header_bytes = _PREFIX.unpack(prefix)
    if version != _VERSION:
        raise ValueError(f"[load] {path}: format version {version}, this build reads {_VERSION}")
    if header_bytes > min(size, _MOST_HEADER_BYTES):
        raise ValueError(f"[load] {path}: cut short or damaged: the header should have {header_bytes} bytes, the file "
                         f"has {size}")
    try:
        header = json.loads(file.read(header_bytes))
        _check_header(header)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"[load] {path}: damaged header: {error}") from error
    payload = _PREFIX.size + header_bytes
    expected = payload + header["payload_bytes"] + hashlib.sha256().digest_size
    if size != expected:
        raise ValueError(f"[load] {path}: cut short or damaged: {size} bytes, its header says {expected}")
    digest, left = hashlib.sha256(), expected - hashlib.sha256().digest_size
    file.seek(0)
    while left:
        piece = file.read(min(left, 1 << 20))
        if not piece:
            raise ValueError(f"[load] {path}: cut short while it was read")
        digest.update(piece)
        left -= len(piece)
    found = file.read()
    if found != digest.digest():
        raise ValueError(f"[load] {path}: damaged: SHA-256 is {digest.hexdigest()}, the file says {found.hex()}")
    return header, payload


def _check_header(header):
    """Types and ranges only; whether they fit a model is for the cache to say."""
    def whole(value, least, name):
        if type(value) is not int or value < least:
            raise ValueError(f"{name} is {value!r}, expected a whole number from {least} on")

    if not isinstance(header["identity"], dict) or not isinstance(header["fingerprint"], str):
        raise ValueError("identity or fingerprint is missing")
    whole(header["columns"], 1, "columns")
    whole(header["payload_bytes"], 0, "payload_bytes")
    if not isinstance(header["skipped"], list) or not header["skipped"]:
        raise ValueError("it has no rows")
    for skipped in header["skipped"]:
        whole(skipped, 0, "skipped")
        if skipped > header["columns"]:
            raise ValueError(f"skipped is {skipped} of {header['columns']} columns")
    if parse_kv_quant(header["kv_quant"]) != header["kv_quant"]:
        raise ValueError(f"kv_quant is {header['kv_quant']!r}")


# --- the attention and its mask ------------------------------------------------------------------------------------

# Arguments of attention that change the result and that pagedkv does not have.
_FOREIGN = ("position_bias", "head_mask", "indices", "block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens",
            "sinks", "relative_bias", "alibi")


def attention(module, query, key, value, attention_mask=None, dropout=0.0, scaling=None, softcap=None,
              sliding_window=None, s_aux=None, is_causal=None, **kwargs):
    """attn_implementation="pagedkv": stores the layer's new K and V, then attends over the packed blocks.

      query           [rows, num_q_heads, new columns, head_dim]
      key, value      the PackedRows that PagedCache.update returned
      attention_mask  None, or what padding_mask returned
      s_aux           [num_q_heads] sink logits

    Returns ([rows, new columns, num_q_heads, head_dim_v], None); rows of padding are 0.
    Errors: what is not causal attention over left-padded rows is refused with a ValueError that names it.
    """
    if not isinstance(key, PackedRows) or value is not key:
        raise ValueError(f'[pagedkv] attn_implementation="{NAME}" was called with {type(key).__name__}, not with what '
                         "pagedkv.hf.PagedCache.update returns. Pass past_key_values=PagedCache(model.config); for "
                         f'parts without a cache (a vision tower) set attn_implementation={{"text_config": "{NAME}"}}')
    if dropout:
        raise ValueError(f"[pagedkv] dropout is {dropout}: pagedkv has none; call model.eval()")
    if not (is_causal if is_causal is not None else getattr(module, "is_causal", True)):
        raise ValueError("[pagedkv] the layer attends in both directions; pagedkv is causal")
    if kwargs.get("output_attentions"):
        raise ValueError('[pagedkv] output_attentions: the weights are never formed; use attn_implementation="eager"')
    for name in _FOREIGN:
        if kwargs.get(name) is not None:
            raise ValueError(f"[pagedkv] attention with {name} is not supported")
    if torch.is_grad_enabled() and query.requires_grad:
        raise RuntimeError("[pagedkv] queries require gradients, and pagedkv has no backward: call the model under "
                           "torch.no_grad() or torch.inference_mode()")
    if s_aux is not None:
        s_aux = s_aux.detach()
    layer_idx = getattr(module, "layer_idx", key.layer)
    return key.cache._attend(key, layer_idx, query, attention_mask, scaling, softcap, sliding_window, s_aux), None


_AND_CODE = and_masks().__code__
_WINDOW_CODE = sliding_window_overlay(1).__code__


def _is_causal(mask_function):
    """Whether it is transformers' causal mask, with a sliding window or without, and nothing else."""
    if mask_function is causal_mask_function:
        return True
    if getattr(mask_function, "__code__", None) is not _AND_CODE:
        return False
    parts = mask_function.__closure__[0].cell_contents
    return (len(parts) == 2 and getattr(parts[0], "__code__", None) is _WINDOW_CODE and
            parts[1] is causal_mask_function)


class PaddingMask(torch.Tensor):
    """bool [rows, 1, 1, columns]: True for a token, False for padding. In four dimensions, for models that cut queries
    off a mask; a type of its own, for a caller's own mask must not pass for it."""


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
                 attention_mask=None, allow_is_causal_skip=True, **kwargs):
    """The mask of attn_implementation="pagedkv": the PaddingMask of all columns, or None without padding.

    Causality and windows are the attention's own; ValueError for any other pattern.
    """
    if not allow_is_causal_skip or not _is_causal(mask_function):
        raise ValueError(f'[pagedkv] the model asks for a mask that is not plainly causal (bidirectional, chunked, '
                         f'packed or with an overlay): attn_implementation="{NAME}" has none; use "sdpa" or "eager"')
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] != kv_offset + kv_length:
        raise ValueError(f"[pagedkv] the attention mask has {attention_mask.shape[-1]} columns, expected "
                         f"{kv_offset + kv_length - q_length} in the cache and {q_length} new ones")
    return None if attention_mask.all() else attention_mask[:, None, None].as_subclass(PaddingMask)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
