"""pagedkv in mlx-lm: a prompt cache whose keys and values live in blocks, and the attention that reads them packed.

    import pagedkv.mlx
    cache = pagedkv.mlx.make_prompt_cache(model, kv_quant="q8")
    with pagedkv.mlx.patch_attention():
        mlx_lm.generate(model, tokenizer, prompt, prompt_cache=cache)
    pagedkv.mlx.save("prompt.safetensors", cache)

mlx-lm's models import their attention by name, so there are two ways to read the blocks:

  as it is             every layer is handed dense K and V, decoded in every step (counted in dense_materializations)
  patch_attention()    their `scaled_dot_product_attention` is replaced by ours, which reads the blocks as they are

Words: the *rows* of a cache are the K and V of its positions. A layer with a sliding window W *sees* its newest W rows.

mlx computes lazily, our kernels read memory: K, V and queries are evaluated when they are stored and attended with.
Written for mlx-lm 0.32 on the CPU.
"""

import warnings

from .._versions import need

need("pagedkv.mlx", "mlx", mlx_lm="0.32")

import mlx_lm

from .attention import patch_attention, scaled_dot_product_attention, unpatch_attention
from .batch import PagedBatchCache
from .cache import PagedPromptCache, make_prompt_cache
from .rows import PagedRows
from .saved import load, save

if not mlx_lm.__version__.startswith("0.32."):
    warnings.warn(f"pagedkv.mlx is written for mlx-lm 0.32, this is {mlx_lm.__version__}: its caches may have changed")

__all__ = ["PagedBatchCache", "PagedPromptCache", "PagedRows", "load", "make_prompt_cache", "patch_attention", "save",
           "scaled_dot_product_attention", "unpatch_attention"]
