"""Arrays at the border: strides, types, empty, read-only, freed owners; copies are counted with the reason."""

import array
import gc
import weakref

import numpy as np
import pytest

import pagedkv


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture
def cache():
    return pagedkv.Cache(num_kv_heads=2, head_dim=8, num_q_heads=4, kv_quant="f32", num_blocks=16)


def stored_after(cache, k, v=None):
    """What the cache holds after k was appended, as [n, heads, d]."""
    s = cache.start().sequence
    with cache.reserve([(s, k.shape[0])]) as plan:
        pagedkv.append(plan, 0, k, rows(k.shape[0], 2, 8) if v is None else v)
        return cache.read_dense(plan, 0, 0)[0].transpose(1, 0, 2)


def copies(cache):
    return cache.stats()["arrays"]["copied"]


@pytest.mark.parametrize("make", [
    lambda x: x,
    lambda x: np.ascontiguousarray(x.transpose(1, 0, 2)).transpose(1, 0, 2),  # head-major, as models have it
    lambda x: np.repeat(x, 3, 0)[::3],  # every third token
    lambda x: np.concatenate([x, x], 1)[:, :2],  # a slice of heads
    lambda x: np.concatenate([x, x], 2)[:, :, :8],  # a slice of the last axis
    lambda x: np.ascontiguousarray(x[::-1])[::-1],  # backwards
], ids=["dense", "head-major", "strided tokens", "heads", "dims", "negative"])
def test_any_strides_of_tokens_and_heads_are_read_in_place(cache, make):
    x = make(rows(6, 2, 8))
    np.testing.assert_array_equal(stored_after(cache, x), x)
    assert copies(cache) == {} and cache.stats()["arrays"]["zero_copy"] == 2


@pytest.mark.parametrize("make,why", [
    (lambda x: np.asfortranarray(x), "last dimension not contiguous"),
    (lambda x: np.repeat(x, 2, 2)[:, :, ::2], "last dimension not contiguous"),
    (lambda x: x[:, :, ::-1], "last dimension not contiguous"),
    (lambda x: np.broadcast_to(x[:1], x.shape), "broadcast"),
    (lambda x: x.astype(np.float64), "float64"),
])
def test_what_must_be_copied_is_copied_right_and_counted(cache, make, why):
    x = make(rows(6, 2, 8))
    np.testing.assert_array_equal(stored_after(cache, x), x.astype(np.float32))
    assert copies(cache) == {why: 1}


def test_float16_is_read_in_place(cache):
    x = rows(6, 2, 8).astype(np.float16)
    np.testing.assert_array_equal(stored_after(cache, x), x.astype(np.float32))
    assert copies(cache) == {}


@pytest.mark.parametrize("dtype", [np.int8, np.int64, np.uint16, np.complex64, bool])
def test_elements_that_are_no_floats_are_refused_by_name(cache, dtype):
    s = cache.start().sequence
    plan = cache.reserve([(s, 2)])
    with pytest.raises(TypeError, match="float32, float16, bfloat16"):
        pagedkv.append(plan, 0, np.ones((2, 2, 8), dtype), rows(2, 2, 8))
    with pytest.raises(TypeError, match="float32, float16, bfloat16"):
        pagedkv.attend(plan, 0, np.ones((2, 4, 8), dtype))


@pytest.mark.parametrize("what", [None, 3, "x", [[[1.0]]], object(), b"12345678"])
def test_what_is_no_array_is_refused_by_its_type(cache, what):
    plan = cache.reserve([(cache.start().sequence, 2)])
    with pytest.raises((TypeError, ValueError), match=r"k is"):
        pagedkv.append(plan, 0, what, rows(2, 2, 8))


def test_structured_and_big_endian_arrays_are_refused_not_misread(cache):
    plan = cache.reserve([(cache.start().sequence, 2)])
    for odd in (rows(2, 2, 8).astype(">f4"), np.zeros((2, 2, 8), [("a", "f4")]), np.zeros((2, 2, 8), object)):
        with pytest.raises(TypeError):
            pagedkv.append(plan, 0, odd, rows(2, 2, 8))


@pytest.mark.parametrize("shape", [(2, 2), (2, 2, 8, 1, 1), (3, 2, 8), (2, 1, 8), (2, 2, 7), (2, 2, 0), (1, 2, 1, 8)])
def test_shapes_are_refused_with_found_and_expected(cache, shape):
    plan = cache.reserve([(cache.start().sequence, 2)])
    with pytest.raises(ValueError, match=r"k is \[.*expected \[2, 2, 8\]"):
        pagedkv.append(plan, 0, rows(*shape), rows(2, 2, 8))


def test_a_batch_axis_is_read_row_after_row(cache):
    a, b = cache.start().sequence, cache.start().sequence
    x = rows(2, 2, 3, 8)  # [batch, heads, n, d]
    with cache.reserve([(a, 3), (b, 3)]) as plan:
        pagedkv.append(plan, 0, x, x)
        for row in range(2):
            np.testing.assert_array_equal(cache.read_dense(plan, row, 0)[0], x[row])
        q = rows(2, 4, 3, 8, seed=5)
        out, lse = pagedkv.attend(plan, 0, q, return_lse=True)
        flat = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).reshape(6, 4, 8)
        expected = pagedkv.attend(plan, 0, flat)
        np.testing.assert_array_equal(out.transpose(0, 2, 1, 3).reshape(6, 4, 8), expected)
        assert lse.shape == (6, 4)
    assert "several tokens of several sequences" in copies(cache)
    before = copies(cache)
    with cache.reserve([(a, 1), (b, 1)]) as plan:  # one token each needs no copy
        pagedkv.append(plan, 0, x[:, :, :1], x[:, :, :1])
        pagedkv.attend(plan, 0, q[:, :, :1].copy())
    assert copies(cache) == before


def test_read_only_arrays_are_read_and_never_written(cache):
    x = rows(4, 2, 8)
    x.flags.writeable = False
    np.testing.assert_array_equal(stored_after(cache, x, x), x)
    assert copies(cache) == {}
    s = cache.start().sequence
    plan = cache.reserve([(s, 1)])
    pagedkv.append(plan, 0, x[:1], x[:1])
    out = np.zeros((1, 4, 8), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError, match="writable"):
        pagedkv.attend(plan, 0, rows(1, 4, 8), out=out)
    assert (out == 0).all()
    with pytest.raises(TypeError, match="key_cache is read-only"):
        pagedkv.reshape_and_cache(x, x, np.broadcast_to(x[:1, None], (2, 4, 2, 8)), np.zeros((2, 4, 2, 8), np.float32),
                                  [0, 1, 2, 3])


def test_out_is_filled_in_place_and_returned(cache):
    with cache.reserve([(cache.start().sequence, 3)]) as plan:
        pagedkv.append(plan, 0, rows(3, 2, 8), rows(3, 2, 8))
        q = rows(3, 4, 8)
        expected = pagedkv.attend(plan, 0, q)
        for dtype, tolerance in ((np.float32, 0), (np.float16, 2e-3)):
            out = np.zeros((3, 4, 8), dtype)
            assert pagedkv.attend(plan, 0, q, out=out) is out
            np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance)
        for out, error in ((np.zeros((3, 4, 9), np.float32), ValueError), (np.zeros((3, 4, 8)), TypeError),
                           (np.zeros((8, 4, 3), np.float32).T, ValueError), ([0], TypeError)):
            with pytest.raises(error, match="out"):
                pagedkv.attend(plan, 0, q, out=out)


def test_what_comes_out_has_the_type_that_went_in(cache):
    with cache.reserve([(cache.start().sequence, 3)]) as plan:
        pagedkv.append(plan, 0, rows(3, 2, 8), rows(3, 2, 8))
        q = rows(3, 4, 8)
        expected = pagedkv.attend(plan, 0, q)
        assert pagedkv.attend(plan, 0, q.astype(np.float64)).dtype == np.float32
        half = pagedkv.attend(plan, 0, q.astype(np.float16))
        assert half.dtype == np.float16
        np.testing.assert_allclose(half, expected, atol=3e-3)
        view = pagedkv.attend(plan, 0, np.asfortranarray(q))
        np.testing.assert_array_equal(view, expected)


def test_buffers_without_dlpack_are_arrays_too(cache):
    x = rows(2, 2, 8)
    flat = array.array("f", x.ravel())
    np.testing.assert_array_equal(stored_after(cache, memoryview(flat).cast("B").cast("f", (2, 2, 8))), x)


def test_an_array_may_go_as_soon_as_the_call_is_over(cache):
    s = cache.start().sequence
    plan = cache.reserve([(s, 2)])
    x = rows(2, 2, 8)
    gone = weakref.ref(x)
    expected = x.copy()
    pagedkv.append(plan, 0, x, x)
    del x
    gc.collect()
    assert gone() is None  # nothing holds it
    np.testing.assert_array_equal(cache.read_dense(plan, 0, 0)[0].transpose(1, 0, 2), expected)


def test_results_outlive_everything_they_came_from():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=8, num_blocks=16)
    plan = cache.reserve([(cache.start().sequence, 2)])
    pagedkv.append(plan, 0, rows(2, 2, 8), rows(2, 2, 8))
    out, tables = pagedkv.attend(plan, 0, rows(2, 2, 8)), plan.block_tables()
    kept = out.copy()
    del cache, plan
    gc.collect()
    np.testing.assert_array_equal(out, kept)
    assert tables.tolist() == [[0]]
    out[:] = 1  # its own memory


def test_a_dlpack_owner_that_is_freed_takes_nothing_with_it():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=8, kv_quant="f32", num_blocks=16)
    tensors = cache.tensors(0)
    view = np.asarray(tensors.v)
    view[:] = 7
    del tensors, cache
    gc.collect()
    assert (view == 7).all()


def test_empty_steps_and_empty_arrays(cache):
    assert cache.reserve([]).n_tokens == 0
    plan = cache.reserve([])
    pagedkv.append(plan, 0, np.zeros((0, 2, 8), np.float32), np.zeros((0, 2, 8), np.float32))
    assert pagedkv.attend(plan, 0, np.zeros((0, 4, 8), np.float32)).shape == (0, 4, 8)
    plan.commit()
    s = cache.start().sequence
    for n in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            cache.reserve([(s, n)])
    with pytest.raises(ValueError, match="at least 1"):
        cache.reserve([(s, [])])


@pytest.mark.parametrize("requests", [3, [3], [("x", 1)], [(1, 2, 3)]])
def test_requests_that_are_no_pairs_are_refused(cache, requests):
    with pytest.raises(TypeError, match="pair"):
        cache.reserve(requests)


def test_nan_and_infinity_are_reported_with_their_place_and_change_nothing(cache):
    good, bad = cache.start().sequence, cache.start().sequence
    x = rows(5, 2, 8)
    x[3, 1, 2] = np.nan
    plan = cache.reserve([(good, 2), (bad, 3)])
    pagedkv.append(plan, 0, x, x)
    with pytest.raises(pagedkv.NotFiniteError, match="layer 0, KV head 1, position 1"):
        plan.commit()
    assert cache.length(good) == 2 and cache.length(bad) == 0
    cache.verify()


def test_values_past_the_range_of_float16_saturate_and_are_counted():  # O-NUM-21
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=4, kv_quant="f16", num_blocks=4)
    with cache.reserve([(cache.start().sequence, 1)]) as plan:
        pagedkv.append(plan, 0, np.array([[[1e7, -1e7, 1, 0]]], np.float32), np.ones((1, 1, 4), np.float32))
        assert cache.read_dense(plan, 0, 0)[0][0, 0].tolist() == [65504, -65504, 1, 0]
    assert cache.stats()["saturated_values"] == 2


def test_every_half_is_converted_exactly_and_rounding_is_to_even():
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(1, 1, -1)
    nothing = np.zeros_like(halves, np.float32), np.full((1, 1), -np.inf, np.float32)
    out, _ = pagedkv.merge(halves, np.zeros((1, 1), np.float32), *nothing)  # to float32 and back
    assert out.dtype == np.float16
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(out.view(np.uint16)[finite], halves.view(np.uint16)[finite])
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(100_000) * 10.0 ** rng.integers(-9, 6, 100_000)).astype(np.float32).reshape(1, 1, -1)
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=1000, num_blocks=16, kv_quant="f32")
    with cache.reserve([(cache.start().sequence, 1)]) as plan:  # one key: attention is its value
        for row in x.reshape(100, 1, 1, 1000):
            pagedkv.append(plan, 0, row, row)
            half = np.zeros((1, 1, 1000), np.float16)
            pagedkv.attend(plan, 0, np.zeros((1, 1, 1000), np.float32), out=half)
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(half, row.astype(np.float16))


def test_float64_comes_out_of_attention_as_float32_and_of_dense_copies_as_itself():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    k = np.random.default_rng(0).standard_normal((1, 2, 3, 8))
    keys, _ = cache.update_and_fetch(k, k)
    assert keys.dtype == np.float64 and (keys == k.astype(np.float32)).all()
    assert cache.paged_attention(k).dtype == np.float32
