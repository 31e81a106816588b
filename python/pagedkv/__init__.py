"""The paged KV cache of transformer inference.

Keys and values live in fixed-size blocks `[num_blocks, block_size, num_kv_heads, head_dim]`, preallocated, growing
without a copy, shared between sequences, optionally packed to 8, 6 or 4 bits, and read as they are by attention.

    PagedKVCache            the cache object of one layer: keys and values that grow
    Cache, append, attend   the library: sequences, steps, prefix sharing, for those who write an engine
    reshape_and_cache, paged_attention   the same kernels over block tensors of your own
    LLM                     a GGUF model that runs on it
    pagedkv.hf, pagedkv.mlx, pagedkv.torch   at home in transformers, mlx-lm, PyTorch

Arrays are numpy's, torch's, mlx's or anything else with DLPack; what comes out is of the kind that went in.
"""

from ._core import (
    Cache,
    Group,
    LayerTensors,
    Sequence,
    Started,
    StepPlan,
    append,
    array_stats,
    attend,
    bytes_per_token,
    dequantize_symmetric,
    merge,
    num_threads,
    paged_attention,
    quantize_symmetric,
    reshape_and_cache,
    set_num_threads,
)
from .errors import (
    CapacityError,
    CorruptError,
    NoMemoryError,
    NotFiniteError,
    PagedKVError,
    StaleError,
    UnavailableError,
    UnsupportedError,
)
from .paged_kv_cache import PagedKVCache
from .quant import PagedKVQuantConfig, paged_kv_quant_mode_from_env

merge_state = merge  # FlashInfer's name

__version__ = "0.1.0"

__all__ = [
    "Cache", "CapacityError", "CorruptError", "Group", "LLM", "LayerTensors", "NoMemoryError", "NotFiniteError",
    "PagedKVCache",
    "PagedKVError", "PagedKVQuantConfig", "Sequence", "StaleError", "Started", "StepPlan", "UnavailableError",
    "UnsupportedError", "append", "array_stats", "attend", "bytes_per_token", "dequantize_symmetric", "merge",
    "merge_state", "num_threads", "paged_attention", "paged_kv_quant_mode_from_env", "quantize_symmetric",
    "reshape_and_cache", "set_num_threads",
]


TYPE_CHECKING = False
if TYPE_CHECKING:
    from .llm import LLM


def __getattr__(name: str) -> object:
    # The engine loads libllama, so it is imported when it is first asked for.
    if name == "LLM":
        from .llm import LLM

        return LLM
    raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
