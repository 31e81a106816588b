"""The calls of the integrations that the documentation names, for type checkers: tools/types. Nothing runs it."""

from typing import Any

import torch

import pagedkv.hf
import pagedkv.mlx
import pagedkv.torch


def transformers_cache(config: Any, model: Any, path: str) -> None:
    cache = pagedkv.hf.PagedCache(config, kv_quant="q8", block_size=16, dynamic=True, max_cache_len=4096)
    model.generate(cache=cache)
    cache.crop(-1)
    twin = cache.fork()
    twin.batch_repeat_interleave(2)
    cache.save(path)
    loaded = pagedkv.hf.PagedCache.load(path, config, fingerprint=pagedkv.hf.fingerprint(model))
    print(loaded.stats(resident=True)["bytes_resident"], loaded.get_seq_length() + 1, loaded.kv_quant)


def mlx_cache(model: Any, path: str) -> None:
    cache = pagedkv.mlx.make_prompt_cache(model, kv_quant="q8")
    with pagedkv.mlx.patch_attention():
        print(len(cache))
    pagedkv.mlx.save(path, cache, {"model": "name"})
    print(len(pagedkv.mlx.load(path, model)))


def torch_operators(query: torch.Tensor, blocks: torch.Tensor, tables: torch.Tensor) -> None:
    pagedkv.torch.reshape_and_cache(query, query, blocks, blocks, tables)
    out, lse = pagedkv.torch.paged_attention(query, blocks, blocks, kv_indptr=tables, kv_indices=tables,
                                             kv_last_page_len=tables, head_dim_v=64, return_lse=True)
    merged, _ = pagedkv.torch.merge(out, lse, out, lse)
    codes, scales = pagedkv.torch.quantize_symmetric(merged, "q8")
    print(pagedkv.torch.dequantize_symmetric(codes, scales, 64, "q8").shape)
