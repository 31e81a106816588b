"""What is dropped is given back: memory stays flat over 10^5 rounds."""

import gc
import sys

import numpy as np

import pagedkv

ROUNDS = 100_000
# What a round may leave at most: a tenth of the smallest object that is made in it, so a leak of one a round shows.
ALLOWED = 8 << 20


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def grown(body, rounds=ROUNDS):
    for _ in range(rounds // 20):  # warm: allocators, interned names, thread pools
        body()
    gc.collect()
    before = resident()
    for _ in range(rounds):
        body()
    gc.collect()
    return resident() - before


def test_sequences_plans_and_arrays():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=16, kv_quant="q8", num_blocks=16)
    k = np.ones((5, 2, 16), np.float32)

    def body():
        s = cache.start([1, 2, 3, 4, 5]).sequence
        plan = cache.reserve([(s, 5)])
        pagedkv.append(plan, 0, k, k)
        pagedkv.attend(plan, 0, k, return_lse=True)
        del plan  # abandoned
        cache.release(s)

    assert grown(body) < ALLOWED
    assert cache.stats()["sequences"] == 0


def test_paged_kv_caches_that_never_write():
    assert grown(lambda: pagedkv.PagedKVCache(kv_quant_config="q8").fork()) < ALLOWED


def test_caches_with_pools():
    k = np.ones((1, 1, 3, 8), np.float32)

    def body():
        cache = pagedkv.PagedKVCache(num_blocks=2, kv_quant_config="q4", dynamic=False)
        cache.update_without_fetch(k, k)
        cache.fork().trim(1)

    # Each maps and unmaps 2 MiB: a tenth of the rounds already is a minute on a slow machine.
    assert grown(body, ROUNDS // 10) < ALLOWED


def test_views_and_plain_arrays():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=16, kv_quant="q8", num_blocks=16)
    k = np.ones((2, 2, 16), np.float32)
    pool = np.zeros((4, 4, 2, 16), np.float32)

    def body():
        np.from_dlpack(cache.tensors(0).k)
        pagedkv.reshape_and_cache(k, k, pool, pool, [0, 1])
        pagedkv.paged_attention(k[:1], pool, pool, np.zeros((1, 1), np.int32), np.ones(1, np.int32))

    assert grown(body) < ALLOWED


def test_errors():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=16, num_blocks=4)
    s = cache.start().sequence

    def body():
        for bad in (lambda: cache.reserve([(s, 10**6)]), lambda: cache.reserve([(s, -1)]),
                    lambda: pagedkv.quantize_symmetric(np.ones((2, 3), int)), lambda: cache.plan_read([(s, 5)])):
            try:
                bad()
            except (ValueError, TypeError):
                continue
            raise AssertionError("no error")

    assert grown(body) < ALLOWED


def test_references_are_balanced():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=16, num_blocks=4)
    k = np.ones((1, 2, 16), np.float32)
    before = sys.getrefcount(cache), sys.getrefcount(k)
    for _ in range(100):
        with cache.reserve([(cache.start().sequence, 1)]) as plan:
            pagedkv.append(plan, 0, k, k)
            pagedkv.attend(plan, 0, k)
            cache.tensors(0)
            plan.abandon()
    del plan
    gc.collect()
    assert (sys.getrefcount(cache), sys.getrefcount(k)) == before
