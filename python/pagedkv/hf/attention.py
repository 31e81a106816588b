"""attn_implementation="pagedkv": the attention and its mask, registered with transformers."""

import torch
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
