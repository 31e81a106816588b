"""What mlx-lm's models carry in the place of keys and values while the rows stay in their blocks."""


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


def pair(cache, shapes, dtype):
    fetch = _Fetch(cache, shapes, dtype)
    return PagedRows(fetch, 0), PagedRows(fetch, 1)
