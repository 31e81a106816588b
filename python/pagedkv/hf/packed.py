"""What travels through a model in the place of keys, values and masks, from the cache to our attention."""

import torch

NAME = "pagedkv"  # of the attention, as in attn_implementation="pagedkv"


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
        _refuse(getattr(func, "__name__", func))

    def __getattr__(self, name):
        if hasattr(torch.Tensor, name):
            _refuse(name)
        raise AttributeError(f"'{type(self).__name__}' object has no attribute {name!r}")

    def __getitem__(self, index):
        _refuse("[]")


def _refuse(what):
    raise TypeError(f"[pagedkv] {what} was called on packed keys or values. Only "
                    f'attn_implementation="{NAME}" reads them: the config that PagedCache was made with asks for '
                    "it, the layer that computes does not. Make the cache with the model's own config, or set "
                    "another attn_implementation")


class PaddingMask(torch.Tensor):
    """bool [rows, 1, 1, columns]: True for a token, False for padding. In four dimensions, for models that cut queries
    off a mask; a type of its own, for a caller's own mask must not pass for it."""
