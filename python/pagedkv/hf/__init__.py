"""pagedkv in transformers: a cache whose keys and values live in blocks, and the attention that reads them packed.

    import pagedkv.hf                                    # registers attn_implementation="pagedkv"
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="pagedkv")
    cache = pagedkv.hf.PagedCache(model.config, kv_quant="q8")
    model.generate(**inputs, cache=cache)

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

from .._versions import need

need("pagedkv.hf", "hf", torch="2.6", transformers="5.24")

from .attention import attention, padding_mask
from .cache import PagedCache
from .layer import PagedLayer
from .packed import NAME, PackedRows, PaddingMask
from .shapes import fingerprint

__all__ = ["NAME", "PackedRows", "PaddingMask", "PagedCache", "PagedLayer", "attention", "fingerprint", "padding_mask"]
