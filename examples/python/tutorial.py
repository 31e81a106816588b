"""A walk through the cache: build one, fork it, quantize it, look at its numbers, measure it. Needs only numpy.

    python examples/python/tutorial.py
"""

import time

import numpy as np
from numpy.typing import NDArray

import pagedkv

rng = np.random.default_rng(0)


def rows(*shape: int) -> NDArray[np.float32]:
    return rng.standard_normal(shape, np.float32)


# --- 1. Keys and values that grow: the article's cache object --------------------------------------------------------

cache = pagedkv.PagedKVCache(block_size=16, num_blocks=256, kv_quant_config="q8")
cache.update_without_fetch(rows(1, 8, 1000, 128), rows(1, 8, 1000, 128))  # [batch, num_kv_heads, n, head_dim]
print(f"1. {cache.offset} tokens of {cache.capacity}, in {cache.nbytes:,} bytes")

# Attention reads the packed blocks: there is no unpacked copy, and the counter shows it.
out = cache.paged_attention(rows(1, 32, 1, 128))
print(f"   attention {out.shape}, unpacked copies: {cache.paged_stats()['dense_materializations']}")

# --- 2. A fork shares every block until one of the two writes --------------------------------------------------------

fork = cache.fork()
shared = cache.paged_stats()["blocks_shared"]
fork.update_without_fetch(rows(1, 8, 1, 128), rows(1, 8, 1, 128))
print(f"2. {shared} blocks shared; one write copied {cache.paged_stats()['copies']} of them: "
      f"{cache.offset} tokens here, {fork.offset} there")

# --- 3. What a format costs, in bytes and in error -------------------------------------------------------------------

keys, values, query = rows(1, 8, 1000, 128), rows(1, 8, 1000, 128), rows(1, 32, 1, 128)
exact = None
print("3. mode  bytes a token  error of attention")
for mode in ("f32", "off", "q8", "q6", "q4"):
    one = pagedkv.PagedKVCache(kv_quant_config=mode)
    one.update_without_fetch(keys, values)
    out = one.paged_attention(query)
    exact = out if exact is None else exact
    error = np.linalg.norm(out - exact) / np.linalg.norm(exact)
    print(f"   {mode:5} {pagedkv.bytes_per_token(mode, 8, 128):13,}  {error:.4f}")

# --- 4. Many sequences, one pool: what an engine uses -----------------------------------------------------------------

pool = pagedkv.Cache(num_layers=2, num_kv_heads=2, head_dim=64, num_q_heads=8, kv_quant="q8", num_blocks=64)
prompt = list(range(100))  # token ids: what makes blocks findable
for turn in ("first", "again"):
    sequence, reused, reason = pool.start(prompt)
    new = prompt[reused:]
    with pool.reserve([(sequence, new)]) as plan:  # every block of the step, or a CapacityError
        for layer in range(2):
            pagedkv.append(plan, layer, rows(len(new), 2, 64), rows(len(new), 2, 64))
            out = pagedkv.attend(plan, layer, rows(len(new), 8, 64))
    print(f"4. {turn}: {reused} of {len(prompt)} tokens were in the cache ({reason}), {len(new)} computed")
    pool.release(sequence)

# --- 5. The blocks themselves, without a copy -------------------------------------------------------------------------

blocks = np.from_dlpack(pool.tensors(0).k)
print(f"5. layer 0, K: {blocks.dtype} {blocks.shape} [num_blocks, block_size, num_kv_heads, head_dim]")

# --- 6. How long a token takes ----------------------------------------------------------------------------------------

print(f"6. attention of one token over 4,096 (32 query heads, 8 KV heads, {pagedkv.num_threads()} threads):")
for mode in ("off", "q8", "q4"):
    long = pagedkv.PagedKVCache(kv_quant_config=mode)
    long.update_without_fetch(rows(1, 8, 4096, 128), rows(1, 8, 4096, 128))
    times: list[float] = []
    for _ in range(30):
        began = time.perf_counter()
        long.paged_attention(query)
        times.append(time.perf_counter() - began)
    print(f"   {mode:4} {sorted(times)[15] * 1e6:6.0f} us, {long.nbytes / 2**20:5.1f} MiB")
