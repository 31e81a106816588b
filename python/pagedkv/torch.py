"""PyTorch operators, with fake tensors, so that torch.compile takes them into its graphs.

    torch.ops.pagedkv.reshape_and_cache, paged_attention, merge, quantize_symmetric, dequantize_symmetric

They are pagedkv's functions of those names over tensors in CPU memory, also reachable as pagedkv.torch.NAME; with
return_lse=True pagedkv.torch.paged_attention is torch.ops.pagedkv.paged_attention_lse. There is no backward: calling it
raises.
"""

from typing import Any, Optional

from . import _core
from ._versions import need

need("pagedkv.torch", "torch", torch="2.6")

import torch
from torch import Tensor

__all__ = ["dequantize_symmetric", "merge", "paged_attention", "quantize_symmetric", "reshape_and_cache"]

_ROW_BYTES = {"q8": lambda d: d, "q6": lambda d: d // 4 * 3, "q4": lambda d: (d + 1) // 2}


def _no_backward(operator):
    """Makes a backward through `operator` say what is the matter."""
    name = operator._qualname

    def backward(ctx, *gradients):
        raise RuntimeError(f"{name} has no backward: pagedkv is for inference. Call the model under torch.no_grad() or "
                           "detach the tensors")

    operator.register_autograd(backward)
    return operator


@_no_backward
@torch.library.custom_op("pagedkv::quantize_symmetric", mutates_args=(), device_types="cpu")
def quantize_symmetric(x: Tensor, mode: str = "q8") -> tuple[Tensor, Tensor]:
    """x [..., head_dim] -> codes [..., row_bytes], scales [..., 1] float32."""
    return _core.quantize_symmetric(x.detach(), mode)


@quantize_symmetric.register_fake
def _(x, mode="q8"):
    name = _core.parse_kv_quant(mode)
    codes = x.new_empty(*x.shape[:-1], _ROW_BYTES[name](x.shape[-1]), dtype=torch.int8 if name == "q8" else torch.uint8)
    return codes, x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@_no_backward
@torch.library.custom_op("pagedkv::dequantize_symmetric", mutates_args=(), device_types="cpu")
def dequantize_symmetric(codes: Tensor, scales: Tensor, head_dim: int, mode: str = "q8") -> Tensor:
    """codes [..., row_bytes], scales [..., 1] -> [..., head_dim] float32."""
    return _core.dequantize_symmetric(codes.detach(), scales.detach(), head_dim, mode)


@dequantize_symmetric.register_fake
def _(codes, scales, head_dim, mode="q8"):
    return codes.new_empty(*codes.shape[:-1], head_dim, dtype=torch.float32)


@torch.library.custom_op("pagedkv::reshape_and_cache", device_types="cpu",
                         mutates_args=("key_cache", "value_cache", "key_scales", "value_scales"))
def reshape_and_cache(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
                      key_scales: Optional[Tensor] = None, value_scales: Optional[Tensor] = None) -> None:
    """Writes rows [n_tokens, num_kv_heads, head_dim] into the slots of block tensors."""
    _core.reshape_and_cache(key.detach(), value.detach(), key_cache.detach(), value_cache.detach(), slot_mapping,
                            key_scales=key_scales, value_scales=value_scales)


@reshape_and_cache.register_fake
def _(key, value, key_cache, value_cache, slot_mapping, key_scales=None, value_scales=None):
    return None


def _attention_operator(name, returns_lse):
    """The operator over either table form; what an operator returns is fixed, so with lse it is another one."""

    def attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Optional[Tensor] = None,
                  seq_lens: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
                  scale: Optional[float] = None, key_scales: Optional[Tensor] = None,
                  value_scales: Optional[Tensor] = None, softcap: float = 0.0, sliding_window: Optional[int] = None,
                  sinks: Optional[Tensor] = None, head_dim_v: Optional[int] = None, kv_indptr: Optional[Tensor] = None,
                  kv_indices: Optional[Tensor] = None,
                  kv_last_page_len: Optional[Tensor] = None) -> tuple[Tensor, Tensor] if returns_lse else Tensor:
        scales = [tensor if tensor is None else tensor.detach() for tensor in (key_scales, value_scales, sinks)]
        return _core.paged_attention(query.detach(), key_cache.detach(), value_cache.detach(), block_tables, seq_lens,
                                     cu_seqlens_q, scale=scale, key_scales=scales[0], value_scales=scales[1],
                                     softcap=softcap, sliding_window=sliding_window, sinks=scales[2],
                                     head_dim_v=head_dim_v, kv_indptr=kv_indptr, kv_indices=kv_indices,
                                     kv_last_page_len=kv_last_page_len, return_lse=returns_lse)

    def fake(query, key_cache, value_cache, block_tables=None, seq_lens=None, cu_seqlens_q=None, scale=None,
             key_scales=None, value_scales=None, softcap=0.0, sliding_window=None, sinks=None, head_dim_v=None,
             kv_indptr=None, kv_indices=None, kv_last_page_len=None):
        out = query.new_empty(*query.shape[:-1], query.shape[-1] if head_dim_v is None else head_dim_v)
        return (out, query.new_empty(query.shape[:-1], dtype=torch.float32)) if returns_lse else out

    operator = torch.library.custom_op(name, attention, mutates_args=(), device_types="cpu")
    operator.register_fake(fake)
    return _no_backward(operator)


_attention = _attention_operator("pagedkv::paged_attention", False)
_attention_lse = _attention_operator("pagedkv::paged_attention_lse", True)


def paged_attention(query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables: Optional[Tensor] = None,
                    seq_lens: Optional[Tensor] = None, cu_seqlens_q: Optional[Tensor] = None,
                    scale: Optional[float] = None, key_scales: Optional[Tensor] = None,
                    value_scales: Optional[Tensor] = None, softcap: float = 0.0, sliding_window: Optional[int] = None,
                    sinks: Optional[Tensor] = None, *, head_dim_v: Optional[int] = None,
                    kv_indptr: Optional[Tensor] = None, kv_indices: Optional[Tensor] = None,
                    kv_last_page_len: Optional[Tensor] = None, return_lse: bool = False) -> Any:
    """query [n_tokens, num_q_heads, head_dim] over block tensors -> [n_tokens, num_q_heads, head_dim_v]; with return_lse also
    lse [n_tokens, num_q_heads] float32.

    Give block_tables and seq_lens, or kv_indptr, kv_indices and kv_last_page_len: see pagedkv.paged_attention.
    """
    operator = _attention_lse if return_lse else _attention
    return operator(query, key_cache, value_cache, block_tables, seq_lens, cu_seqlens_q, scale, key_scales,
                    value_scales, softcap, sliding_window, sinks, head_dim_v, kv_indptr, kv_indices, kv_last_page_len)


@_no_backward
@torch.library.custom_op("pagedkv::merge", mutates_args=(), device_types="cpu")
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint keys: out [n_tokens, num_q_heads, head_dim], lse [n_tokens, num_q_heads]."""
    return _core.merge(out_a.detach(), lse_a.detach(), out_b.detach(), lse_b.detach())


@merge.register_fake
def _(out_a, lse_a, out_b, lse_b):
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape, dtype=torch.float32)
