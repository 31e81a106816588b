"""What differs between numpy, torch and mlx where a dense array must be made."""

import operator
import sys


def kind_of(array) -> str:
    """`numpy`, `torch`, `mlx`, or `other` for anything else that DLPack brings in."""
    root = type(array).__module__.partition(".")[0]
    return root if root in ("numpy", "torch", "mlx") else "other"


def dtype_of(array):
    """The type a dense copy should have: the array's own, so that what went in comes out."""
    return getattr(array, "dtype", None)


def from_numpy(array, kind, dtype):
    """A float32 numpy array as one of the framework `kind`, of type `dtype`."""
    if kind == "torch":
        tensor = sys.modules["torch"].from_numpy(array)
        return tensor if dtype is None else tensor.to(dtype)
    if kind == "mlx":
        return sys.modules["mlx.core"].array(array, dtype=dtype)
    return array if dtype is None or kind == "other" else array.astype(dtype, copy=False)


def to_numpy(array):
    """An array of any framework as numpy's; bfloat16, which numpy lacks, as float32."""
    import numpy as np

    kind = kind_of(array)
    if kind == "torch":
        torch = sys.modules["torch"]
        array = (array.float() if array.dtype == torch.bfloat16 else array).detach().numpy()
    elif kind == "mlx":
        mx = sys.modules["mlx.core"]
        array = array.astype(mx.float32) if array.dtype == mx.bfloat16 else array
    return np.asarray(array)


def causal_mask(n, offset, window, kind):
    """bool [n, offset + n]: which keys each of n new positions sees; window: keys back, the own one included, or None."""
    import numpy as np

    rows = np.arange(offset, offset + n)[:, None]
    columns = np.arange(offset + n)[None]
    mask = rows >= columns
    if window is not None:
        mask &= rows < columns + window
    if kind == "torch":
        return sys.modules["torch"].from_numpy(mask)
    if kind == "mlx":
        return sys.modules["mlx.core"].array(mask)
    return mask


def whole(name, value):
    """An integer of any kind as Python's. TypeError: `name` is `value`, allowed are integers; a bool or float is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    of = "" if value is None else f", of type {type(value).__name__}"
    raise TypeError(f"{name} is {value!r:.60}{of}, allowed are integers")
