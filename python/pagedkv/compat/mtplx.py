"""The names of the article "What Is a Paged KV Cache in MTPLX?", so that its snippets run with the import changed.

docs/compat.md lists what differs, on purpose.
"""

from .._core import dequantize_symmetric, quantize_symmetric
from ..paged_kv_cache import PagedKVCache
from ..quant import PagedKVQuantConfig, paged_kv_quant_mode_from_env

VllmMetalPagedKVCache = PagedKVCache

__all__ = ["PagedKVQuantConfig", "VllmMetalPagedKVCache", "dequantize_symmetric", "paged_kv_quant_mode_from_env",
           "quantize_symmetric"]
