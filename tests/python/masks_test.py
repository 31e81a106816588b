"""PagedKVCache.paged_attention with a mask array: what torch would make of it, or a refusal by name."""

import numpy as np
import pytest

import pagedkv

pytestmark = pytest.mark.filterwarnings("ignore:paged_attention got a mask array:RuntimeWarning")


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


K, V, Q = rows(2, 2, 6, 8), rows(2, 2, 6, 8, seed=1), rows(2, 4, 3, 8, seed=2)


@pytest.fixture
def cache():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    cache.update_without_fetch(K, V)
    return cache


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["bool", "float32", "float64", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 6), (1, 6), (2, 1, 3, 6), (2, 4, 3, 6), (4, 1, 6)])
def test_it_means_what_it_means_to_torch(cache, shape, kind, dtype):
    torch = pytest.importorskip("torch")
    seen = torch.from_numpy(np.random.default_rng(3).random(shape) < 0.7)
    seen[..., 0] = True  # torch makes NaN of a row that sees nothing
    mask = seen if kind == "bool" else (seen * -3.0).to(getattr(torch, kind))
    q = torch.from_numpy(Q).to(getattr(torch, dtype))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), torch.from_numpy(K), torch.from_numpy(V), mask if kind == "bool" else mask.float(), enable_gqa=True)
    found = cache.paged_attention(q, mask=mask)
    assert found.dtype == q.dtype
    np.testing.assert_allclose(found.float(), expected, atol=1e-5 if dtype == "float32" else 0.02)


def test_bfloat16_of_mlx_is_taken(cache):
    mx = pytest.importorskip("mlx.core")
    found = cache.paged_attention(mx.array(Q).astype(mx.bfloat16), mask=mx.zeros((3, 6), mx.bfloat16))
    expected = cache.paged_attention(Q, mask=np.ones((3, 6), bool))
    assert found.dtype == mx.bfloat16
    np.testing.assert_allclose(np.array(found.astype(mx.float32)), expected, atol=0.02)


@pytest.mark.parametrize("mask, error, text", [
    (np.ones((3, 6), np.int64), TypeError, "mask has elements of type int64, allowed are bool .* and floats"),
    (np.ones((3, 6), np.uint8), TypeError, "mask has elements of type uint8"),
    (np.ones((3, 7), bool), ValueError, r"mask is \[3, 7\], expected what broadcasts to \[2, 4, 3, 6\]"),
    (np.ones((2, 6), bool), ValueError, r"mask is \[2, 6\]"),
    (np.ones((3, 1, 3, 6), bool), ValueError, r"mask is \[3, 1, 3, 6\]"),
    (np.ones((1, 1, 1, 3, 6), bool), ValueError, "mask is"),
    ([[True]], TypeError, "mask is .*, of type list"),
    (5, TypeError, "mask is 5, of type int"),
])
def test_another_mask_is_refused_by_name(cache, mask, error, text):
    with pytest.raises(error, match=text):
        cache.paged_attention(Q, mask=mask)
    assert not cache.paged_stats()["fallbacks"]


@pytest.mark.parametrize("mask", [None, np.ones((1, 6), bool)], ids=["packed", "masked"])
@pytest.mark.parametrize("q, options, error, text", [
    (Q[:1], {}, ValueError, r"q is \[1, 4, 3, 8\], expected \[2, num_q_heads, n, 8\]"),
    (Q[..., :4], {}, ValueError, "q is"),
    (Q[0], {}, ValueError, "q is"),
    (rows(2, 3, 3, 8), {}, ValueError, "3"),
    (rows(2, 4, 7, 8), {}, ValueError, "7"),
    (Q.astype(np.int32), {}, TypeError, "q has elements of type int32"),
    (Q, dict(scale="1"), TypeError, "scale is '1'"),
    (Q, dict(scale=float("nan")), ValueError, "scale is nan"),
    (Q, dict(scale=0), ValueError, "scale is 0"),
    (Q, dict(softcap=-1.0), ValueError, "softcap.* -1"),
    (Q, dict(sliding_window=2.0), TypeError, "sliding_window is 2.0"),
    (Q, dict(sliding_window=0), ValueError, "sliding_window is 0"),
])
def test_what_is_wrong_without_a_mask_is_wrong_with_one(cache, mask, q, options, error, text):
    with pytest.raises(error, match=text):
        cache.paged_attention(q, mask=mask, **options)
