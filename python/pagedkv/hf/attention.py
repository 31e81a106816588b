"""attn_implementation="pagedkv": the attention and its mask, registered with transformers."""

import warnings

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, and_masks, causal_mask_function, sliding_window_overlay
from transformers.modeling_utils import AttentionInterface

from .packed import NAME, PackedRows, PaddingMask

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

    Without a PagedCache, keys and values are tensors, and sdpa answers, with one notice.

    Returns ([rows, new columns, num_q_heads, head_dim_v], None); rows of padding are 0.
    Errors: what is not causal attention over left-padded rows is refused with a ValueError that names it.
    """
    if not isinstance(key, PackedRows) or value is not key:
        return _without_blocks(module, query, key, value, attention_mask, scaling, sliding_window,
                               kwargs | dict(dropout=dropout, softcap=softcap, s_aux=s_aux, is_causal=is_causal))
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


_noticed = False


def _without_blocks(module, query, key, value, attention_mask, scaling, window, kwargs):
    """What is called without a PagedCache, a plain forward or another cache's, is answered by sdpa."""
    global _noticed
    for name in ("softcap", "s_aux"):
        if kwargs[name] is not None:
            raise ValueError(f"[pagedkv] without a PagedCache attention is sdpa's, which has no {name}: pass "
                             'past_key_values=PagedCache(model.config), or set attn_implementation="eager"')
    if not _noticed:
        _noticed = True
        warnings.warn(f'attn_implementation="{NAME}" was called without a PagedCache: sdpa answers. Pass '
                      "past_key_values=PagedCache(model.config) to read blocks", RuntimeWarning, stacklevel=4)
    causal = kwargs["is_causal"] if kwargs["is_causal"] is not None else getattr(module, "is_causal", True)
    if isinstance(attention_mask, PaddingMask) or (causal and attention_mask is None):
        # Columns count from the first key that there is; the queries are the last ones.
        n_queries, n_keys = query.shape[2], key.shape[2]
        column = torch.arange(n_keys, device=query.device)
        row = column[n_keys - n_queries:, None]
        seen = column <= row
        if window is not None:
            seen &= column > row - window
        if attention_mask is not None:
            padding = attention_mask.as_subclass(torch.Tensor)[..., -n_keys:]
            seen = (seen & padding) | (column == row)  # a row of padding sees itself, so that it is no NaN
        attention_mask = seen.expand(query.shape[0], 1, n_queries, n_keys)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling,
                                  dropout=kwargs["dropout"], is_causal=causal)


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


def padding_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=causal_mask_function,
                 attention_mask=None, allow_is_causal_skip=True, **kwargs):
    """The mask of attn_implementation="pagedkv": the PaddingMask of all columns, or None without padding.

    Causality and windows are the attention's own; ValueError for any other pattern.
    """
    if not allow_is_causal_skip or not _is_causal(mask_function):
        raise ValueError(f'[pagedkv] the model asks for a mask that is not plainly causal (bidirectional, chunked, '
                         f'packed or with an overlay): attn_implementation="{NAME}" has none; use "sdpa" or "eager"')
    if int(q_offset) + q_length != kv_offset + kv_length:
        raise ValueError(f"[pagedkv] {q_length} queries from column {int(q_offset)} on do not end with the "
                         f"{kv_offset + kv_length} columns of keys: a cache of a fixed length (StaticCache) is not "
                         "supported; use PagedCache or DynamicCache")
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] != kv_offset + kv_length:
        raise ValueError(f"[pagedkv] the attention mask has {attention_mask.shape[-1]} columns, expected "
                         f"{kv_offset + kv_length - q_length} in the cache and {q_length} new ones")
    return None if attention_mask.all() else attention_mask[:, None, None].as_subclass(PaddingMask)


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, padding_mask)
