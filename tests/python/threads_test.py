"""Threads at one cache: right results or a clear error, never a crash."""

import threading
import time

import numpy as np

import oracle
import pagedkv
import process


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def run(n, body):
    """body(i) on n threads at once; raises what one of them raised."""
    errors = []
    barrier = threading.Barrier(n)

    def guarded(i):
        barrier.wait()
        try:
            body(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if errors:
        raise errors[0]


def test_each_thread_with_its_own_sequence_gets_its_own_answers():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=16, num_q_heads=4, kv_quant="f32", num_blocks=512)

    def body(i):
        s = cache.start().sequence
        k = rows(40, 2, 16, seed=i)
        for begin in range(0, 40, 5):
            with cache.reserve([(s, 5)]) as plan:
                pagedkv.append(plan, 0, k[begin:begin + 5], -k[begin:begin + 5])
                q = rows(5, 4, 16, seed=100 + begin)
                out = pagedkv.attend(plan, 0, q)
            np.testing.assert_allclose(out, oracle.attention(q, k[:begin + 5], -k[:begin + 5])[0], atol=3e-6)
        cache.release(s)

    for _ in range(5):
        run(8, body)
    cache.verify()
    assert cache.stats()["sequences"] == 0


def test_threads_that_change_one_sequence_get_turns_or_an_error():
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=8, kv_quant="q8", num_blocks=64, prefix_sharing=False)
    shared = cache.start().sequence
    outcomes = []

    def body(i):
        rng = np.random.default_rng(i)
        for _ in range(200):
            try:
                match rng.integers(6):
                    case 0 | 1:
                        with cache.reserve([(shared, 3)]) as plan:
                            pagedkv.append(plan, 0, rows(3, 1, 8), rows(3, 1, 8))
                            pagedkv.attend(plan, 0, rows(3, 1, 8))
                    case 2:
                        cache.truncate(shared, int(rng.integers(cache.length(shared) + 1)))
                    case 3:
                        out = pagedkv.attend(cache.plan_read([(shared, 1)]), 0, rows(1, 1, 8))
                        assert np.isfinite(out).all()
                    case 4:
                        cache.release(cache.fork(shared))
                    case 5:
                        cache.stats(), cache.tensors(0), cache.available
                outcomes.append("done")
            except (ValueError, pagedkv.PagedKVError) as error:
                assert str(error)
                outcomes.append(type(error).__name__)

    run(6, body)
    cache.verify()
    assert outcomes.count("done") > 100


def test_one_plan_in_many_hands_ends_once():
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=8, kv_quant="f32", num_blocks=64, prefix_sharing=False)
    sequence = cache.start().sequence
    for round in range(60):
        plan, ended = cache.reserve([(sequence, 4)]), []

        def body(i):
            try:
                for _ in range(5):
                    pagedkv.append(plan, 0, rows(4, 1, 8), rows(4, 1, 8))
                    pagedkv.attend(plan, 0, rows(4, 1, 8))
                    plan.seq_lens, plan.block_tables(), plan.slot_mapping(), plan.n_tokens, plan.open
                    cache.read_dense(plan, 0, 0)
                plan.commit()
                ended.append(i)
            except pagedkv.StaleError:
                pass

        run(4, body)
        assert len(ended) == 1 and cache.length(sequence) == 4 * (round + 1)
    cache.verify()


def test_the_articles_object_counts_every_write_of_every_thread():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32", dynamic=True)

    def body(i):
        for _ in range(50):
            cache.update_without_fetch(rows(1, 1, 2, 8, seed=i), rows(1, 1, 2, 8, seed=i))
            cache.paged_attention(rows(1, 1, 1, 8))

    run(6, body)  # the first write too is a race
    assert cache.offset == 6 * 50 * 2


def test_other_threads_run_while_attention_computes():
    cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, num_q_heads=32, kv_quant="f32", num_blocks=512)
    s = cache.start().sequence
    plan = cache.reserve([(s, 2000)])
    pagedkv.append(plan, 0, rows(2000, 8, 128), rows(2000, 8, 128))
    q = rows(2000, 32, 128)
    ticks, done = 0, threading.Event()

    def compute():
        pagedkv.attend(plan, 0, q)
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    while not done.is_set():
        ticks += 1
        time.sleep(0.001)
    thread.join()
    assert ticks > 3  # with the GIL held it would be one


def test_a_forked_process_computes_with_threads_of_its_own():
    code = """
import os, numpy as np, pagedkv
pagedkv.set_num_threads(4)
cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, num_q_heads=32, kv_quant="f32", num_blocks=512)
s = cache.start().sequence
plan = cache.reserve([(s, 3000)])
k = np.ones((3000, 8, 128), np.float32)
pagedkv.append(plan, 0, k, k)
plan.commit()
q = np.ones((1, 32, 128), np.float32)
attend = lambda: pagedkv.attend(cache.plan_read([(s, 1)]), 0, q)
before = attend()
"""
    out = process.python(code + process.FORK)
    assert out.stdout == "both\n", out.stderr
