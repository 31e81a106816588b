"""The layers of a PagedCache, for code that walks `cache.layers`."""

import weakref

from transformers.cache_utils import CacheLayerMixin

from .shapes import LayerShape


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


class NoLayer(PagedLayer):
    """A layer without K and V of its own: it reuses another's, or has no attention."""

    def __init__(self, cache, layer):
        super().__init__(cache, layer, LayerShape(0, 0, 0, 0, 0))

    keys = values = None
