"""pagedkv.mlx in mlx-lm: the text of its own caches, packed reads by counter, the patch."""

import itertools
import sys

import numpy as np
import pytest
from mlx_models import BLOCK, attend, count, logits, make, models, mx, nothing_stays_patched, patched, rows, say, tokens

import pagedkv.mlx as paged
from mlx_lm.models import base, cache as own, gpt_oss, llama
from pagedkv.mlx import PagedPromptCache, scaled_dot_product_attention


# --- the text ------------------------------------------------------------------------------------------------------

ALL = ("llama", "sliding_llama", "gemma3_text", "gemma2", "plamo3", "gpt_oss")


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("step", (512, 5), ids=("one chunk", "chunks of 5"))
@pytest.mark.parametrize("name", ("llama", "sliding_llama", "gemma3_text", "gpt_oss"))
def test_the_greedy_text_is_that_of_mlx_lm_s_own_cache(models, name, step, packed):
    model, prompt = models(name), tokens(23)
    expected = say(model, own.make_prompt_cache(model), prompt, prefill_step_size=step)
    assert len(set(expected)) > 8, "a text that repeats itself proves nothing"
    cache = make(model)
    with patched(packed):
        assert say(model, cache, prompt, prefill_step_size=step) == expected
    assert {layer.offset for layer in cache} == {23 + 20}


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("name", ALL)
def test_logits_are_equal_in_float32(models, name, packed):
    model, prompt = models(name), tokens(30)
    chunks = [prompt[:11], prompt[11:16], *([token] for token in prompt[16:])]
    expected = logits(model, own.make_prompt_cache(model), *chunks)
    with patched(packed):
        found = logits(model, make(model), *chunks)
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("dtype, mode", ((mx.float32, "f32"), (mx.float16, "f16"), (mx.bfloat16, "bf16")))
def test_rows_are_stored_in_the_model_s_own_type(models, monkeypatch, dtype, mode):
    model, prompt = models("gemma3_text", dtype), tokens(17)
    expected = own.make_prompt_cache(model)
    model(mx.array([prompt]), cache=expected)
    for kv_quant in (None, "off"):
        cache = make(model, kv_quant)
        model(mx.array([prompt]), cache=cache)
        assert {layer.paged_stats()["mode"] for layer in cache} == {mode}
        full = 2  # a layer without window
        assert cache[full].keys.dtype == dtype and mx.array_equal(cache[full].keys, expected[full].keys[:, :, :17])
    monkeypatch.setenv("PAGEDKV_QUANT", "q8")
    assert make(model)[0].kv_quant_config.mode == "q8" and make(model, "f16")[0].kv_quant_config.mode == "f16"
    monkeypatch.setenv("PAGEDKV_QUANT", "q9")
    with pytest.raises(ValueError, match="q9.*q8"):
        make(model)


@pytest.mark.parametrize("dtype", (mx.float16, mx.bfloat16))
def test_half_types_go_through_packed_attention_and_come_back(models, dtype):
    model, prompt = models("llama", dtype), tokens(17)
    expected = logits(model, own.make_prompt_cache(model), prompt[:16], prompt[16:])
    with paged.patch_attention():
        cache = make(model)
        assert model(mx.array([prompt]), cache=cache).dtype == dtype
        found = logits(model, make(model), prompt[:16], prompt[16:])
    np.testing.assert_allclose(found, expected, atol=(2e-2 if dtype == mx.float16 else 0.15) * np.abs(expected).max())
    copied = cache[0].paged_stats()["arrays"]["copied"]
    assert not any("keys" in why or "rows" in why for why in copied), copied


@pytest.mark.parametrize("mode, loss", (("q8", 0.05), ("q6", 0.2), ("q4", 0.7), ("q8:q4", 0.5)))
@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_quantized_logits_are_close_to_float32(models, name, mode, loss):
    model, prompt = models(name), tokens(40)
    chunks = [prompt[:30], *([token] for token in prompt[30:])]
    expected = logits(model, own.make_prompt_cache(model), *chunks)
    with paged.patch_attention():
        found = logits(model, make(model, mode), *chunks)
    off = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert 0 < off < loss, "these weights make attention sharp: a model's loss is in docs/benchmarks.md"


def test_a_quantized_cache_says_the_same_packed_and_dense(models):
    model, prompt = models("sliding_llama"), tokens(23)
    dense, packed = make(model, "q8"), make(model, "q8")
    expected = logits(model, dense, prompt[:20], prompt[20:21], prompt[21:22])
    with paged.patch_attention():
        found = logits(model, packed, prompt[:20], prompt[20:21], prompt[21:22])
    np.testing.assert_allclose(found, expected, atol=0.05 * np.abs(expected).max())
    for a, b in zip(dense, packed):
        assert a.paged_stats()["mode"] == b.paged_stats()["mode"] == "q8"


# --- the attention and its patch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("f32", "q8", "q4"))
@pytest.mark.parametrize("name", ("llama", "sliding_llama", "gemma3_text", "gpt_oss"))
def test_patched_models_never_make_keys_dense(models, name, mode):
    model, cache = models(name), make(models(name), mode)
    with paged.patch_attention():
        say(model, cache, tokens(23), 10, prefill_step_size=8)
    assert count(cache, "dense_materializations") == 0
    # 22 tokens in chunks of 8, then 11 steps; a windowed chunk takes a turn for each query head of a group.
    assert count(cache, "attend") >= len(cache) * (3 + 11)


def test_unpatched_models_read_dense_once_per_layer_and_step(models):
    model, cache = models("gemma3_text"), make(models("gemma3_text"))
    say(model, cache, tokens(23), 10, prefill_step_size=8)
    assert count(cache, "attend") == 0
    assert count(cache, "dense_materializations") == len(cache) * (3 + 11)


def test_a_model_that_reads_keys_itself_gets_them_dense_while_patched(models):
    model, cache = models("gemma2"), make(models("gemma2"))
    with paged.patch_attention():
        say(model, cache, tokens(9), 5)
    assert count(cache, "attend") == 0 and count(cache, "dense_materializations") == len(cache) * (1 + 6)


def test_a_mask_wider_than_the_cache_is_answered_dense(models):
    model, cache = models("plamo3"), make(models("plamo3"))
    with paged.patch_attention():
        say(model, cache, tokens(9), 5)
    assert count(cache, "dense_materializations") == 2, "the prefill of two windowed layers"


def test_the_patch_covers_loaded_modules_and_those_to_come_and_is_undone():
    before = llama.scaled_dot_product_attention
    with paged.patch_attention():
        assert llama.scaled_dot_product_attention is gpt_oss.scaled_dot_product_attention
        assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention
        assert llama.scaled_dot_product_attention is scaled_dot_product_attention
        sys.modules.pop("mlx_lm.models.starcoder2", None)
        from mlx_lm.models import starcoder2
        assert starcoder2.scaled_dot_product_attention is scaled_dot_product_attention
    assert llama.scaled_dot_product_attention is base.scaled_dot_product_attention is before
    assert starcoder2.scaled_dot_product_attention is before


def test_patches_nest_and_end_with_the_outermost():
    before = llama.scaled_dot_product_attention
    paged.patch_attention()
    with paged.patch_attention():
        pass
    assert llama.scaled_dot_product_attention is scaled_dot_product_attention
    paged.unpatch_attention()
    assert llama.scaled_dot_product_attention is before
    paged.unpatch_attention()
    assert llama.scaled_dot_product_attention is before
    with pytest.raises(KeyError), paged.patch_attention():
        raise KeyError
    assert llama.scaled_dot_product_attention is before


def test_mlx_lm_s_own_caches_pass_through_the_patch_unchanged(models):
    model, prompt = models("gemma3_text"), tokens(23)
    expected = logits(model, own.make_prompt_cache(model), prompt[:12], prompt[12:])
    with paged.patch_attention():
        assert np.array_equal(logits(model, own.make_prompt_cache(model), prompt[:12], prompt[12:]), expected)
        assert np.array_equal(logits(model, [None] * len(model.layers), prompt), logits(model, None, prompt))


def test_patched_and_unpatched_steps_may_take_turns(models):
    model, prompt = models("gemma3_text"), tokens(24)
    chunks = [prompt[:9], prompt[9:10], prompt[10:19], *([token] for token in prompt[19:])]
    expected = logits(model, own.make_prompt_cache(model), *chunks)
    cache, found = make(model), []
    for packed, chunk in zip(itertools.cycle((True, False)), chunks):
        with patched(packed):
            found.append(logits(model, cache, chunk))
    np.testing.assert_allclose(np.concatenate(found), expected, atol=2e-5 * np.abs(expected).max())


def test_a_mask_of_the_caller_s_own_is_obeyed_dense_and_counted():
    cache, q = PagedPromptCache(BLOCK, 4, "f32"), rows(3, heads=4, seed=3)
    k, v = rows(3, seed=1), rows(3, seed=2)
    mask = mx.array([[True, False, False], [False, True, False], [False, False, True]])
    keys, values = cache.update_and_fetch(k, v)
    out = scaled_dot_product_attention(q, keys, values, cache=cache, scale=1.0, mask=mask)
    assert mx.allclose(out, mx.repeat(v, 2, axis=1), atol=1e-6), "each sees itself alone"
    assert cache.paged_stats()["dense_materializations"] == 1
    # No mask at all over several positions is not causal either.
    out = scaled_dot_product_attention(q, *cache.keys_and_values(), cache=cache, scale=1.0, mask=None)
    assert mx.allclose(out, mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=None), atol=1e-6)


def test_a_mask_is_known_only_while_it_fits_the_cache():
    cache, other = (PagedPromptCache(BLOCK, 4, "f32") for _ in range(2))
    q = rows(3, heads=2, seed=3)
    stale = cache.make_mask(3, return_array=True)  # of positions 0 to 2
    attend(other, rows(5), rows(5), rows(5))
    keys, values = other.update_and_fetch(rows(3), rows(3))
    with pytest.raises(ValueError):  # 3 columns for 8 keys: mlx's own refusal, not a silent causal answer
        mx.eval(scaled_dot_product_attention(q, keys, values, cache=other, scale=1.0, mask=stale))


def test_fetched_rows_know_shape_and_type_and_refuse_what_would_be_wrong():
    cache = PagedPromptCache(BLOCK, 4, "f32")
    k, v = rows(5, dim=8), rows(5, dim=6, seed=1)
    keys, values = cache.update_and_fetch(k, v)
    assert (keys.shape, values.shape) == ((1, 2, 5, 8), (1, 2, 5, 6))
    assert keys.dtype == values.dtype == mx.float32 and keys.ndim == 4
    assert cache.paged_stats()["dense_materializations"] == 0
    with pytest.raises(TypeError):
        mx.concatenate([keys, keys])
    assert mx.array_equal(keys[..., -1:, :], k[..., -1:, :]) and mx.array_equal(values.swapaxes(2, 3), v.swapaxes(2, 3))
    assert mx.array_equal(mx.array(keys), k)
    assert cache.paged_stats()["dense_materializations"] == 1, "decoded once for all of these"
    keys, _ = cache.update_and_fetch(rows(1), rows(1, dim=6))
    cache.trim(1)
    with pytest.raises(RuntimeError, match="before the cache changed"):
        keys.array()
