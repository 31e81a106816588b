"""The article's snippets, with nothing but the import lines changed, and what its text promises."""

import sys
import types

import numpy as np
import pytest

import oracle
import pagedkv
from pagedkv.compat import mtplx


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def an_entry(tokens=40, preallocated=64):
    return types.SimpleNamespace(keys=rows(1, 4, preallocated, 64), values=rows(1, 4, preallocated, 64, seed=1),
                                 offset=tokens)


# --- the snippets ------------------------------------------------------------------------------------------------


def test_initializing_a_paged_kv_cache():
    from pagedkv.compat.mtplx import VllmMetalPagedKVCache

    # Initialize with 1024 blocks of size 16

    kv_cache = VllmMetalPagedKVCache(block_size=16, num_blocks=1024)

    assert kv_cache.capacity == 16384 and kv_cache.offset == 0


def test_loading_from_checkpoints_with_quantization():
    entry = an_entry()
    from pagedkv.compat.mtplx import VllmMetalPagedKVCache
    from pagedkv.compat.mtplx import PagedKVQuantConfig

    # Load existing cache entry with 4-bit quantization

    kv_cache = VllmMetalPagedKVCache.from_cache(
        entry,  # Object with .keys, .values, and .offset attributes

        block_size=16,
        num_blocks=1024,
        kv_quant_config=PagedKVQuantConfig(mode="q4")
    )

    assert kv_cache.offset == 40
    np.testing.assert_array_equal(kv_cache.keys, oracle.stored(entry.keys[:, :, :40], "q4"))
    np.testing.assert_array_equal(kv_cache.values, oracle.stored(entry.values[:, :, :40], "q4"))


def test_monitoring_capacity_and_dynamic_growth(monkeypatch, capsys):
    monkeypatch.setenv("MTPLX_DYNAMIC_PAGED_KV", "1")
    from pagedkv.compat.mtplx import VllmMetalPagedKVCache

    kv_cache = VllmMetalPagedKVCache(block_size=16, num_blocks=1024)
    kv_cache.update_without_fetch(rows(1, 2, 100, 32), rows(1, 2, 100, 32))

    # Query current utilization

    print("Capacity (tokens):", kv_cache.capacity)
    print("Tokens currently stored:", kv_cache.offset)

    # Manually trigger growth (requires MTPLX_DYNAMIC_PAGED_KV=1)

    required_tokens = 20000
    if kv_cache.offset < required_tokens:
        kv_cache._grow_to_capacity(required_tokens)

    assert capsys.readouterr().out == "Capacity (tokens): 16384\nTokens currently stored: 100\n"
    assert kv_cache.capacity >= 20000
    assert kv_cache.paged_stats()["growth_bytes_copied"] == 0
    np.testing.assert_array_equal(kv_cache.keys, oracle.stored(rows(1, 2, 100, 32), "off"))


def test_configuring_quantization_via_environment(monkeypatch):
    # Enable 4-bit quantization for all new cache instances
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q4")

    assert mtplx.VllmMetalPagedKVCache().kv_quant_config.mode == "q4"
    assert mtplx.paged_kv_quant_mode_from_env() == "q4"


# --- the environment ----------------------------------------------------------------------------------------------


def test_our_variable_comes_first_then_the_articles_in_their_order(monkeypatch):
    monkeypatch.setenv("MTPLX_PAGED_KV_QUANT", "q4")
    assert pagedkv.paged_kv_quant_mode_from_env() == "q4"
    monkeypatch.setenv("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "q8")
    assert pagedkv.paged_kv_quant_mode_from_env() == "q8"
    monkeypatch.setenv("PAGEDKV_QUANT", "off")
    assert pagedkv.paged_kv_quant_mode_from_env() == "off"
    monkeypatch.setenv("PAGEDKV_QUANT", "")  # set but empty counts as unset
    assert pagedkv.paged_kv_quant_mode_from_env() == "q8"


def test_a_word_that_is_no_mode_lists_the_modes(monkeypatch):
    monkeypatch.setenv("PAGEDKV_QUANT", "q5")
    for call in (pagedkv.paged_kv_quant_mode_from_env, pagedkv.PagedKVCache,
                 lambda: pagedkv.PagedKVQuantConfig(mode="fp8")):
        with pytest.raises(ValueError, match="q8, q6, q4"):
            call()


def test_a_dynamic_flag_that_is_none_is_an_error(monkeypatch):
    monkeypatch.setenv("PAGEDKV_DYNAMIC", "maybe")
    with pytest.raises(ValueError, match="PAGEDKV_DYNAMIC"):
        pagedkv.PagedKVCache()


def test_an_argument_beats_the_environment(monkeypatch):
    monkeypatch.setenv("PAGEDKV_QUANT", "q4")
    monkeypatch.setenv("PAGEDKV_DYNAMIC", "1")
    cache = pagedkv.PagedKVCache(kv_quant_config="q8", dynamic=False)
    assert cache.kv_quant_config.mode == "q8" and not cache.dynamic


# --- the config -----------------------------------------------------------------------------------------------------


def test_the_config_is_frozen_and_keeps_the_modes_own_name():
    config = pagedkv.PagedKVQuantConfig(mode="INT8")
    assert config.mode == "q8" and config.enabled and config == pagedkv.PagedKVQuantConfig("8bit")
    assert pagedkv.PagedKVQuantConfig("None").mode == "off" and not pagedkv.PagedKVQuantConfig().enabled
    assert pagedkv.PagedKVQuantConfig("q8:q4").mode == "q8:q4"
    with pytest.raises(AttributeError):
        config.mode = "q4"


def test_a_spelling_that_means_something_else_elsewhere_is_said():
    with pytest.warns(UserWarning, match="row-scaled q8"):
        assert pagedkv.PagedKVQuantConfig("q8_0").mode == "q8"


# --- capacity ---------------------------------------------------------------------------------------------------------


def test_a_full_cache_names_need_and_have_and_keeps_everything():
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=1, kv_quant_config="f32")
    cache.update_without_fetch(rows(1, 1, 3, 8), rows(1, 1, 3, 8))
    capacity = cache.capacity  # what is really committed: whole extents
    assert capacity >= 4
    with pytest.raises(pagedkv.CapacityError, match=r"need .* have .*dynamic growth is off") as caught:
        cache.update_without_fetch(rows(1, 1, capacity, 8), rows(1, 1, capacity, 8))
    assert isinstance(caught.value, ValueError)
    assert cache.offset == 3
    np.testing.assert_array_equal(cache.keys, rows(1, 1, 3, 8))


def test_growth_by_hand_needs_dynamic():
    cache = pagedkv.PagedKVCache(block_size=16, num_blocks=4)
    with pytest.raises(pagedkv.CapacityError, match=r"need 65 tokens \(5 blocks\), have 64 tokens \(4 blocks\)"):
        cache._grow_to_capacity(65)
    cache._grow_to_capacity(64)  # is there


def test_a_batch_is_measured_in_whole_blocks_of_each_row():
    cache = pagedkv.PagedKVCache(block_size=16, num_blocks=1, dynamic=True)
    cache.update_without_fetch(rows(3, 1, 1, 8), rows(3, 1, 1, 8))
    assert cache.capacity % 16 == 0
    for wanted in (cache.capacity + 1, cache.capacity + 16 * 1000 + 1):  # one token past a block, in each of three rows
        cache._grow_to_capacity(wanted)
        assert cache.capacity >= wanted and cache.capacity % 16 == 0
        grown = cache.paged_stats()["growth_events"]
        n = cache.capacity - cache.offset
        cache.update_without_fetch(rows(3, 1, n, 8), rows(3, 1, n, 8))
        assert cache.offset == cache.capacity and cache.paged_stats()["growth_events"] == grown, "it was all there"


def test_capacities_that_no_number_holds_are_refused():
    cache = pagedkv.PagedKVCache(block_size=16, num_blocks=1, dynamic=True)
    cache.update_without_fetch(rows(1, 1, 1, 8), rows(1, 1, 1, 8))
    for wanted in (2**63 - 1, 2**62, 2**64):
        with pytest.raises((pagedkv.CapacityError, ValueError, OverflowError, TypeError)):
            cache._grow_to_capacity(wanted)
    assert cache.offset == 1


def test_what_cannot_be_met_fails_at_the_first_write_and_leaves_the_cache_empty():
    cache = pagedkv.PagedKVCache(block_size=256, num_blocks=2**31 - 1)
    with pytest.raises(pagedkv.CapacityError):
        cache.update_without_fetch(rows(1, 8, 1, 128), rows(1, 8, 1, 128))
    assert cache.empty() and cache.capacity == 256 * (2**31 - 1) and cache.nbytes == 0


@pytest.mark.parametrize("sizes", [{"block_size": 0}, {"block_size": 257}, {"num_blocks": 0}, {"num_blocks": 2**31}])
def test_sizes_that_can_never_work_fail_at_creation(sizes):
    with pytest.raises(ValueError, match=f"{list(sizes.values())[0]}, allowed are 1 to"):
        pagedkv.PagedKVCache(**sizes)


# --- what it stores ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["off", "f32", "bf16", "q8", "q6", "q4", "q8:q4"])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_fetched_is_what_the_format_stores(mode, batch):
    cache = pagedkv.PagedKVCache(block_size=8, num_blocks=32, kv_quant_config=mode)
    k, v = rows(batch, 2, 21, 32), rows(batch, 2, 21, 32, seed=1)
    for begin, end in ((0, 9), (9, 10), (10, 21)):
        keys, values = cache.update_and_fetch(k[:, :, begin:end], v[:, :, begin:end])
    k_mode, _, v_mode = mode.partition(":")
    np.testing.assert_array_equal(keys, oracle.stored(k, k_mode))
    np.testing.assert_array_equal(values, oracle.stored(v, v_mode or k_mode))


@pytest.mark.parametrize("mode", ["off", "f32", "bf16", "q8", "q6", "q4"])
@pytest.mark.parametrize("batch,n", [(1, 1), (1, 7), (3, 1), (3, 5)])
def test_attention_over_packed_blocks_agrees_with_double(mode, batch, n):
    cache = pagedkv.PagedKVCache(block_size=16, num_blocks=64, kv_quant_config=mode)
    k, v, q = rows(batch, 2, 300, 64), rows(batch, 2, 300, 64, seed=1), rows(batch, 6, n, 64, seed=2)
    cache.update_without_fetch(k, v)
    for window in (-1, 50):
        out = cache.paged_attention(q, sliding_window=window)
        assert out.shape == q.shape and out.dtype == np.float32
        for row in range(batch):
            expected, _ = oracle.attention(q[row].transpose(1, 0, 2), *(
                oracle.stored(x[row], mode).transpose(1, 0, 2) for x in (k, v)), window=max(window, 0))
            np.testing.assert_allclose(out[row].transpose(1, 0, 2), expected, rtol=0,
                                       atol=oracle.TOLERANCE[mode] * np.abs(expected).max())
    stats = cache.paged_stats()
    assert stats["dense_materializations"] == 0 and stats["dequantized_rows"] == 0
    assert any(path.startswith("attend.") for path in stats["kernel_calls"])


def test_a_mask_array_is_answered_by_dense_attention_with_a_warning_and_a_count():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    cache.update_without_fetch(rows(2, 2, 12, 16), rows(2, 2, 12, 16, seed=1))
    q = rows(2, 4, 3, 16, seed=2)
    causal = np.tril(np.ones((3, 12), bool), 9)
    expected = cache.paged_attention(q, mask="causal")
    with pytest.warns(RuntimeWarning, match="dense attention"):
        np.testing.assert_allclose(cache.paged_attention(q, mask=causal), expected, atol=1e-6)
    additive = np.where(causal, 0, -np.inf).astype(np.float32)
    np.testing.assert_allclose(cache.paged_attention(q, mask=additive), expected, atol=1e-6)
    assert cache.paged_attention(q, mask=np.zeros((3, 12), bool)).max() == 0  # rows that see nothing
    assert cache.paged_stats()["fallbacks"]["paged_attention"]
    assert cache.paged_stats()["dense_materializations"] == 3 * 2
    with pytest.raises(ValueError, match="'prefix'"):
        cache.paged_attention(q, mask="prefix")


def test_bytes_follow_the_formula():
    # docs/formats.md: 2 * (packed + 4) bytes per token and KV head; images are padded to 128.
    for mode, packed in (("q8", 128 + 4), ("q6", 96 + 4), ("q4", 64 + 4), ("f16", 256), ("f32", 512)):
        assert pagedkv.bytes_per_token(mode, 8, 128) == 8 * 2 * packed
        cache = pagedkv.PagedKVCache(block_size=16, num_blocks=8, kv_quant_config=mode)
        cache.update_without_fetch(rows(1, 8, 32, 128), rows(1, 8, 32, 128))
        assert cache.nbytes == 32 * 8 * 2 * packed


# --- its protocol -----------------------------------------------------------------------------------------------------


def test_trim_removes_from_the_end_and_says_how_many():  # O-LIFE-01
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=8, kv_quant_config="f32")
    assert cache.trim(5) == 0 and cache.is_trimmable()
    k = rows(2, 1, 10, 8)
    cache.update_without_fetch(k, k)
    assert [cache.trim(n) for n in (0, -3, 3)] == [0, 0, 3] and cache.size() == 7
    np.testing.assert_array_equal(cache.keys, k[:, :, :7])
    assert cache.trim(100) == 7 and cache.empty() and cache.nbytes == 0
    cache.update_without_fetch(k[:, :, :2], k[:, :, :2])
    assert cache.offset == 2


@pytest.mark.parametrize("mode", ["q8", "q4"])
def test_a_trimmed_quantized_cache_equals_a_fresh_one(mode):  # O-LIFE-02, O-LIFE-03
    a, b = rows(1, 2, 10, 16), rows(1, 2, 5, 16, seed=9) * 1e3
    cache, fresh = (pagedkv.PagedKVCache(block_size=4, num_blocks=8, kv_quant_config=mode) for _ in range(2))
    cache.update_without_fetch(a * 1e4, a)
    cache.trim(5)
    cache.update_without_fetch(b, b)
    fresh.update_without_fetch(a[:, :, :5] * 1e4, a[:, :, :5])
    fresh.update_without_fetch(b, b)
    np.testing.assert_array_equal(cache.keys, fresh.keys)
    q = rows(1, 4, 1, 16)
    np.testing.assert_array_equal(cache.paged_attention(q), fresh.paged_attention(q))


def test_a_fork_shares_blocks_and_neither_sees_what_the_other_writes():  # O-LIFE-07, O-LIFE-08
    k = rows(1, 1, 6, 8)
    parent = pagedkv.PagedKVCache(block_size=4, num_blocks=8, kv_quant_config="f32")
    parent.update_without_fetch(k, k)
    child = parent.fork()
    assert parent.paged_stats()["blocks_shared"] == 2
    parent.update_without_fetch(np.full((1, 1, 1, 8), 100, np.float32), k[:, :, :1])
    child.update_without_fetch(np.full((1, 1, 1, 8), 200, np.float32), k[:, :, :1])
    assert parent.keys[0, 0, 6, 0] == 100 and child.keys[0, 0, 6, 0] == 200
    assert parent.paged_stats()["copies"] == 1
    np.testing.assert_array_equal(parent.keys[:, :, :6], k)
    before = parent.keys
    child.trim(7), child.update_without_fetch(k, k), child.trim(2)
    del child
    np.testing.assert_array_equal(parent.keys, before)
    assert parent.paged_stats()["blocks_open"] == 2 and parent.paged_stats()["sequences"] == 1


def test_a_deep_copy_is_independent():
    import copy

    cache = pagedkv.PagedKVCache(kv_quant_config="q4")
    cache.update_without_fetch(rows(1, 1, 5, 8), rows(1, 1, 5, 8))
    other = copy.deepcopy([cache])[0]
    other.trim(5)
    assert cache.offset == 5 and other.offset == 0


@pytest.mark.parametrize("mode", ["q4", "q8"])
def test_ten_generations_of_copies_keep_every_bit(mode):  # O-LIFE-09
    cache = pagedkv.PagedKVCache(block_size=4, num_blocks=16, kv_quant_config=mode)
    cache.update_without_fetch(rows(1, 1, 3, 8), rows(1, 1, 3, 8))
    first = cache.keys
    for generation in range(10):
        cache = cache.fork()
        cache.update_without_fetch(rows(1, 1, 1, 8, seed=generation), rows(1, 1, 1, 8))
        np.testing.assert_array_equal(cache.keys[:, :, :3], first)
        cache.trim(1)


def test_state_and_meta_state_make_an_equal_cache():
    cache = pagedkv.PagedKVCache(block_size=8, num_blocks=16, kv_quant_config="f32", dynamic=True)
    cache.update_without_fetch(rows(2, 2, 9, 16), rows(2, 2, 9, 16, seed=1))
    other = pagedkv.PagedKVCache()
    other.meta_state = cache.meta_state
    other.state = cache.state
    assert other.meta_state == cache.meta_state
    np.testing.assert_array_equal(other.values, cache.values)
    other.state = (rows(1, 1, 2, 8), rows(1, 1, 2, 8))  # another shape replaces it whole
    assert other.offset == 2
    with pytest.raises(pagedkv.NotFiniteError):
        other.state = (rows(1, 1, 2, 8) * np.nan, rows(1, 1, 2, 8))
    assert other.offset == 2
    assert pagedkv.PagedKVCache().state == (None, None)


def test_make_mask_speaks_mlx_lms_words():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    cache.update_without_fetch(rows(1, 1, 6, 8), rows(1, 1, 6, 8))
    assert cache.make_mask(1) is None and cache.make_mask(3) == "causal"
    np.testing.assert_array_equal(cache.make_mask(2, return_array=True), np.tril(np.ones((2, 8), bool), 6))
    windowed = cache.make_mask(1, window_size=4)  # the own position counts
    np.testing.assert_array_equal(windowed[0], [0, 0, 0, 1, 1, 1, 1])
    assert cache.make_mask(1, window_size=7) is None


def test_an_entry_that_contradicts_itself_is_refused():
    entry = an_entry(tokens=65)
    with pytest.raises(ValueError, match="offset is 65, keys hold 64"):
        pagedkv.PagedKVCache.from_cache(entry)
    with pytest.raises(ValueError, match="offset is -1"):
        pagedkv.PagedKVCache.from_cache(types.SimpleNamespace(keys=None, values=None, offset=-1))
    assert pagedkv.PagedKVCache.from_cache(types.SimpleNamespace(keys=None, values=None, offset=0)).empty()


def test_a_row_that_is_not_finite_changes_no_row_of_the_batch():
    cache = pagedkv.PagedKVCache(kv_quant_config="q8")
    cache.update_without_fetch(rows(3, 1, 4, 8), rows(3, 1, 4, 8))
    bad = rows(3, 1, 2, 8)
    bad[1, 0, 1, 3] = np.inf
    before = cache.keys
    with pytest.raises(pagedkv.NotFiniteError, match="layer 0, KV head 0, position 5"):
        cache.update_without_fetch(rows(3, 1, 2, 8), bad)
    assert cache.offset == 4
    np.testing.assert_array_equal(cache.keys, before)
    first = pagedkv.PagedKVCache()
    with pytest.raises(pagedkv.NotFiniteError):
        first.update_without_fetch(bad, bad)
    assert first.empty()


@pytest.mark.parametrize("keys,values,error", [
    (rows(2, 4, 8), rows(2, 4, 8), "batch, num_kv_heads, n, head_dim"),
    (rows(1, 2, 4, 8), rows(1, 2, 5, 8), "differ"),
    (rows(1, 2, 4, 8), rows(1, 3, 4, 8), "differ"),
    (rows(2, 2, 4, 8), rows(2, 2, 4, 8), "made for batch 1"),
    (rows(1, 2, 4, 9), rows(1, 2, 4, 8), "head_dim 8:8"),
])
def test_shapes_that_do_not_fit_are_refused_with_both_shapes(keys, values, error):
    cache = pagedkv.PagedKVCache()
    cache.update_without_fetch(rows(1, 2, 3, 8), rows(1, 2, 3, 8))
    with pytest.raises(ValueError, match=error):
        cache.update_without_fetch(keys, values)
    assert cache.offset == 3


def test_no_tokens_are_no_change():
    cache = pagedkv.PagedKVCache()
    cache.update_without_fetch(rows(1, 2, 0, 8), rows(1, 2, 0, 8))
    assert cache.empty() and cache.keys is None


def test_the_module_needs_none_of_the_frameworks():
    assert "mtplx" not in sys.modules
