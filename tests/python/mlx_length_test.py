"""pagedkv.mlx: windows, trims, forks, state."""

import copy
import itertools

import numpy as np
import pytest
from mlx_models import (
    BLOCK, WINDOW, attend, count, fetch_dense, logits, make, models, mx, nothing_stays_patched, patched, rows, say,
    tokens,
)

import pagedkv.mlx as paged
from mlx_lm.models import cache as own
from oracle import attention
from pagedkv.mlx import PagedPromptCache, scaled_dot_product_attention


# --- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", (False, True))
@pytest.mark.parametrize("chunks", ([10], [9, 1], [3, 3, 3, 1], [1] * 10))
def test_a_window_counts_the_query_itself_for_every_chunking(chunks, keep):  # O-NUM-18
    cache = PagedPromptCache(BLOCK, 4, "f32", sliding_window=4, keep_behind_window=keep)
    start = 0
    for n in chunks:
        v = rows(n, lambda i: float(start + i))
        out = attend(cache, rows(n, lambda i: 0.0), v, rows(n, lambda i: 1.0, heads=4))
        start += n
    assert mx.allclose(out[..., -1, :], mx.array(7.5), atol=1e-6), out[0, 0, -1]


@pytest.mark.parametrize("mode", ("f16", "q8"))
def test_the_window_is_right_at_the_step_that_fills_it(mode):  # O-LIFE-15
    cache = PagedPromptCache(BLOCK, 4, mode, sliding_window=8)
    means = {}
    for first, n in ((0, 6), *((i, 1) for i in range(6, 12))):
        v = rows(n, lambda i: 10 + 0.1 * (first + i))
        out = attend(cache, rows(n, lambda i: 0.0), v, rows(n, lambda i: 1.0, heads=4))
        means[cache.offset] = out[0, 0, -1, 0].item()
    assert means[9] == pytest.approx(10.45, abs=1e-2) and means[10] == pytest.approx(10.55, abs=1e-2)


@pytest.mark.parametrize("query_heads", (2, 4, 6))
@pytest.mark.parametrize("with_sinks", (False, True))
def test_windowed_chunks_agree_with_the_definition(query_heads, with_sinks):
    cache, length = PagedPromptCache(BLOCK, 4, "f32", sliding_window=5), 0
    sinks = np.linspace(-1, 2, query_heads).astype(np.float32) if with_sinks else None
    k, v = (np.random.default_rng(s).standard_normal((40, 2, 8)).astype(np.float32) for s in (1, 2))
    q = np.random.default_rng(3).standard_normal((40, query_heads, 8)).astype(np.float32)
    for n in (11, 1, 1, 17, 2, 8):
        part = [mx.array(x[length:length + n].swapaxes(0, 1)[None]) for x in (k, v, q)]
        mask = cache.make_mask(n)
        keys, values = cache.update_and_fetch(*part[:2])
        out = scaled_dot_product_attention(part[2], keys, values, cache=cache, scale=0.3, mask=mask,
                                           sinks=None if sinks is None else mx.array(sinks))
        length += n
        expected, _ = attention(q[length - n:length], k[:length], v[:length], 0.3, 5, sinks=sinks)
        np.testing.assert_allclose(np.array(out[0]).swapaxes(0, 1), expected, atol=2e-6)
    assert cache.paged_stats()["dense_materializations"] == 0


def test_masks_and_dense_rows_are_those_of_rotating_kv_cache():
    """mlx-lm's rows lie in a ring, ours in order: each query's keys are compared as a set."""
    for window in (None, 4, 6):
        cache, ring = PagedPromptCache(BLOCK, 8, "f32", sliding_window=6), own.RotatingKVCache(6)
        step = itertools.count()
        for n in (3, 1, 1, 1, 1, 5, 1, 9, 1, 1, 2):
            for return_array in (False, True):
                ours, theirs = (c.make_mask(n, window_size=window, return_array=return_array) for c in (cache, ring))
            k = mx.broadcast_to(mx.array([float(next(step)) for _ in range(n)])[None, None, :, None], (1, 1, n, 4))
            (keys, _), (ring_keys, _) = fetch_dense(cache, k, k), ring.update_and_fetch(k, k)
            seen = []
            for rows_, mask in ((keys, ours), (ring_keys, theirs)):
                names = np.array(rows_[0, 0, :, 0])
                mask = np.ones((n, len(names)), bool) if mask is None else np.array(mask).reshape(-1, len(names))
                seen.append([sorted(names[row]) for row in mask])
            assert seen[0] == seen[1], (window, n, cache.offset)


def test_blocks_behind_the_window_are_given_back(models):
    model = models("gemma3_text")
    for packed in (False, True):
        cache, kept = make(model, "q8"), make(model, "q8", keep_behind_window=True)
        with patched(packed):
            for one in (cache, kept):
                say(model, one, tokens(90), 10, prefill_step_size=32)
        windowed, full = cache[0], cache[2]
        assert windowed.nbytes <= full.nbytes * (WINDOW + 2 * BLOCK) // 100
        assert kept[0].nbytes == full.nbytes == kept[2].nbytes
        assert windowed.offset == full.offset == 100 and windowed.size() == WINDOW
        assert windowed.keys.shape == (1, 2, WINDOW, 16)


# --- length: trims, forks, state -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("f32", "q8", "q4"))
@pytest.mark.parametrize("how", ("trim", "fork", "state"))
def test_a_trimmed_cache_goes_on_like_a_fresh_one(models, mode, how):  # O-LIFE-02, O-LIFE-03
    model, prompt = models("llama"), tokens(19)
    cache, fresh = make(model, mode), make(model, mode)
    with paged.patch_attention():
        logits(model, cache, prompt[:5] + tokens(5, 9))
        if how == "fork":
            cache = [layer.fork() for layer in cache]
        elif how == "state":
            cache = [PagedPromptCache.from_state(layer.state) for layer in cache]
        assert own.can_trim_prompt_cache(cache) and own.trim_prompt_cache(cache, 5) == 5
        logits(model, fresh, prompt[:5])
        assert np.array_equal(logits(model, cache, prompt[5:]), logits(model, fresh, prompt[5:]))
    for a, b in zip(cache, fresh):
        assert a.offset == b.offset and a.nbytes == b.nbytes
        assert mx.array_equal(a.keys, b.keys) and mx.array_equal(a.values, b.values)


@pytest.mark.parametrize("window", (None, 8))
def test_trim_to_nothing_and_beyond(window):  # O-LIFE-01
    cache = PagedPromptCache(BLOCK, 4, "f32", sliding_window=window)
    assert cache.trim(3) == 0 and cache.empty()
    cache.update_without_fetch(rows(3), rows(3))
    assert cache.trim(0) == 0 and cache.trim(-2) == 0 and cache.offset == 3
    assert cache.trim(5) == 3 and cache.offset == 0 and cache.empty() and cache.nbytes == 0
    cache.update_without_fetch(rows(2, seed=4), rows(2, seed=5))
    assert mx.array_equal(cache.keys, rows(2, seed=4)) and cache.offset == 2


def test_old_tokens_are_never_seen_after_a_trim():  # O-LIFE-03
    poison = PagedPromptCache(BLOCK, 4, "f32")
    poison.update_without_fetch(rows(9), rows(9, lambda i: 1e4 if i in (5, 6, 7, 8) else 1.0))
    assert poison.trim(4) == 4
    out = attend(poison, rows(1), rows(1, lambda i: 1.0), rows(1, heads=4))
    assert mx.allclose(out, mx.array(1.0)) and poison.nbytes == 2 * BLOCK * 2 * 2 * 8 * 4
    assert float(poison.values.max()) == 1.0 and poison.trim(2) == 2 and poison.nbytes == BLOCK * 2 * 2 * 8 * 4


def test_a_window_that_has_dropped_rows_refuses_to_trim_and_stays():  # O-LIFE-04
    cache, fresh = (PagedPromptCache(BLOCK, 8, "f32", sliding_window=8) for _ in range(2))
    cache.update_without_fetch(rows(20), rows(20, seed=1))
    assert not cache.is_trimmable() and own.trim_prompt_cache([cache], 3) == 0
    before = cache.keys
    with pytest.raises(ValueError, match="window of 8 holds them from"):
        cache.trim(12)
    assert cache.offset == 20 and mx.array_equal(cache.keys, before)
    # What is still there for it may be trimmed by hand.
    assert cache.trim(1) == 1
    fresh.update_without_fetch(rows(20)[:, :, :19], rows(20, seed=1)[:, :, :19])
    new = rows(1, seed=7), rows(1, seed=8), rows(1, seed=9, heads=4)
    assert mx.array_equal(attend(cache, *new), attend(fresh, *new))
    kept = PagedPromptCache(BLOCK, 8, "f32", sliding_window=8, keep_behind_window=True)
    kept.update_without_fetch(rows(20), rows(20, seed=1))
    assert kept.is_trimmable() and kept.trim(12) == 12 and kept.offset == 8


def test_trimmability_ends_where_mlx_lm_s_does():
    cache, ring = PagedPromptCache(BLOCK, 8, "f32", sliding_window=6), own.RotatingKVCache(6)
    for _ in range(9):
        for one in (cache, ring):
            one.update_and_fetch(rows(1), rows(1))
        assert cache.is_trimmable() == ring.is_trimmable() and cache.size() == ring.size()
        assert cache.offset == ring.offset


@pytest.mark.parametrize("how", (copy.deepcopy, copy.copy, PagedPromptCache.fork))
@pytest.mark.parametrize("window", (None, 8))
def test_a_copy_is_independent_and_shares_blocks(how, window):  # O-LIFE-08, O-SHARE-13
    parent = PagedPromptCache(BLOCK, 8, "q8", sliding_window=window)
    parent.update_without_fetch(rows(10), rows(10, seed=1))
    keys, values, nbytes = parent.keys, parent.values, parent.nbytes
    child = how(parent)
    assert parent.paged_stats()["bytes_in_use"] == nbytes, "nothing was copied"

    def unchanged():
        return (parent.offset == 10 and parent.nbytes == nbytes and mx.array_equal(parent.keys, keys)
                and mx.array_equal(parent.values, values))

    if window is None:
        assert child.trim(3) == 3 and unchanged()
    child.update_without_fetch(rows(5, seed=4), rows(5, seed=5))
    assert unchanged()
    attend(child, rows(1, seed=6), rows(1, seed=7), rows(1, heads=4))
    assert unchanged()
    if window is None:
        child.trim(2)
    del child
    assert unchanged() and parent.paged_stats()["bytes_in_use"] == nbytes


def test_branches_of_one_prompt_say_what_each_says_alone(models):
    model, prompt = models("gemma3_text"), tokens(21)
    with paged.patch_attention():
        trunk = make(model, "q8")
        logits(model, trunk, prompt)
        alone = count(trunk[2:3], "bytes_in_use")
        branches = [copy.deepcopy(trunk) for _ in range(4)]
        texts = [say(model, branch, [first], 8) for first, branch in enumerate(branches, start=5)]
        for first, text in enumerate(texts, start=5):
            fresh = make(model, "q8")
            logits(model, fresh, prompt)
            assert say(model, fresh, [first], 8) == text
        assert count(trunk[2:3], "bytes_in_use") < 4 * alone
    assert trunk[0].offset == 21


@pytest.mark.parametrize("window", (None, 8))
def test_state_is_a_snapshot_that_costs_nothing_to_evaluate(window):
    cache = PagedPromptCache(BLOCK, 8, "q8", sliding_window=window)
    assert PagedPromptCache.from_state(cache.state).empty()
    cache.update_without_fetch(rows(12), rows(12, seed=1))
    state, keys = cache.state, cache.keys
    mx.eval([state])
    assert cache.paged_stats()["dense_materializations"] == 1, "of .keys above"
    cache.update_without_fetch(rows(1), rows(1))
    cache.trim(1)
    for restored in (PagedPromptCache.from_state(state), PagedPromptCache()):
        restored.state = state
        assert restored.offset == 12 and mx.array_equal(restored.keys, keys)
        assert restored.sliding_window == window and restored.paged_stats()["mode"] == "q8"
    assert state[0].shape == keys.shape and mx.array_equal(state[0].array(), keys)
    with pytest.raises(ValueError, match="12"):
        PagedPromptCache.from_state((*state[:2], 11, *state[3:]))
    # Also from arrays, as a program might keep it.
    dense = PagedPromptCache.from_state((state[0].array(), state[1].array(), *state[2:]))
    assert dense.offset == 12 and mx.array_equal(dense.keys, keys) and dense.nbytes == cache.nbytes


@pytest.mark.parametrize("name", ("llama", "sliding_llama"))
@pytest.mark.parametrize("n", (4, 17))
def test_mlx_lm_s_own_cache_can_be_taken_over(models, name, n):
    model, prompt = models(name), tokens(20)
    plain = own.make_prompt_cache(model)
    logits(model, plain, prompt[:n - 2], prompt[n - 2:n - 1], prompt[n - 1:n])
    cache = [PagedPromptCache.from_cache(layer, BLOCK) for layer in plain]
    assert [layer.offset for layer in cache] == [n] * len(cache)
    assert [layer.sliding_window for layer in cache] == [getattr(layer, "max_size", None) for layer in plain]
    with paged.patch_attention():
        found = logits(model, cache, prompt[n:n + 2], prompt[n + 2:n + 3])
    expected = logits(model, plain, prompt[n:n + 2], prompt[n + 2:n + 3])
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


def test_caches_that_cannot_be_taken_over_are_refused():
    ring = own.RotatingKVCache(8, keep=4)
    ring.update_and_fetch(rows(5), rows(5))
    with pytest.raises(ValueError, match="keeps its first 4 tokens"):
        PagedPromptCache.from_cache(ring)
    entry = own.KVCache()
    entry.update_and_fetch(rows(5), rows(5))
    entry.keys, entry.values = entry.keys[:, :, :3], entry.values[:, :, :3]
    with pytest.raises(ValueError, match="offset is 5, there are 3 rows"):
        PagedPromptCache.from_cache(entry)
