"""pagedkv.mlx in mlx-lm: the text of its own caches, packed reads by counter, batches, windows, trims, forks, files.

Models are tiny and random, their weights large enough that a wrong key changes the text. Nothing is downloaded.
"""

import contextlib
import copy
import itertools
import os
import re
import stat
import struct
import sys
import warnings

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import pagedkv
import pagedkv.mlx as paged
from mlx.utils import tree_map_with_path
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import base, gemma2, gemma3_text, gpt_oss, llama, plamo3, qwen3_next
from mlx_lm.models import cache as own
from oracle import attention
from saved_file import rewrite

# Of this module's name, so that what is fetched here comes as packed rows (see paged.patch_attention).
from pagedkv.mlx import PagedPromptCache, scaled_dot_product_attention

BLOCK = 4  # small, so that short texts cross many blocks
WINDOW = 6
VOCAB = 101
COMMON = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              rms_norm_eps=1e-5, vocab_size=VOCAB)
MIXED = ["full_attention", "sliding_attention"] * 2


def make_model(name, dtype=mx.float32, seed=3):
    module, options = {
        "llama": (llama, dict(num_hidden_layers=3, tie_word_embeddings=False)),
        "sliding_llama": (llama, dict(num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
                                      tie_word_embeddings=False)),
        "gemma3_text": (gemma3_text, dict(num_hidden_layers=6, query_pre_attn_scalar=16, sliding_window=WINDOW,
                                          sliding_window_pattern=3)),
        # Caps its logits itself, so it reads K and V itself.
        "gemma2": (gemma2, dict(num_hidden_layers=2, query_pre_attn_scalar=16)),
        # Its masks are one key wider than its caches.
        "plamo3": (plamo3, dict(num_hidden_layers=3, sliding_window_pattern=3, window_size=WINDOW)),
        # Attention sinks.
        "gpt_oss": (gpt_oss, dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED[::-1],
                                  num_local_experts=4, num_experts_per_tok=2)),
        # Every other layer is recurrent.
        "qwen3_next": (qwen3_next, dict(num_hidden_layers=4, full_attention_interval=2, linear_num_value_heads=4,
                                        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
                                        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
                                        decoder_sparse_step=1, shared_expert_intermediate_size=32, mlp_only_layers=[],
                                        moe_intermediate_size=32, rope_theta=1e4, partial_rotary_factor=0.5,
                                        max_position_embeddings=512)),
    }[name]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(COMMON | options | {"model_type": name}))
    model.update(tree_map_with_path(lambda path, x: 3 * x if "proj" in path else x, model.parameters()))
    if name == "gpt_oss":
        for layer in model.layers:
            layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name, dtype=mx.float32):
        if (name, dtype) not in made:
            made[name, dtype] = make_model(name, dtype)
        return made[name, dtype]

    return get


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    left = paged.attention._patches
    while paged.attention._patches:
        paged.unpatch_attention()
    assert left == 0 and paged.attention._replaced is None


def tokens(n, seed=1):
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


def make(model, kv_quant=None, **options):
    return paged.make_prompt_cache(model, kv_quant, **{"block_size": BLOCK} | options)


def say(model, cache, prompt, n=20, **options):
    """Greedy tokens."""
    steps = generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=n, **options)
    return [token for token, _ in steps]


def logits(model, cache, *chunks):
    out = [model(mx.array([chunk]), cache=cache)[0] for chunk in chunks]
    return np.array(mx.concatenate(out).astype(mx.float32))


def patched(packed):
    return paged.patch_attention() if packed else contextlib.nullcontext()


def count(cache, name):
    """A counter over all layers; kernel calls by the prefix of their path."""
    total = 0
    for layer in cache:
        stats = layer.paged_stats()
        total += (sum(n for path, n in stats.get("kernel_calls", {}).items() if path.startswith("attend"))
                  if name == "attend" else stats.get(name, 0))
    return total


def rows(n, value=None, heads=2, dim=8, seed=0, dtype=mx.float32):
    """[1, heads, n, dim]: random, or value(i) in all of token i."""
    if value is None:
        return mx.array(np.random.default_rng(seed).standard_normal((1, heads, n, dim)), dtype)
    return mx.broadcast_to(mx.array([value(i) for i in range(n)], dtype)[None, None, :, None], (1, heads, n, dim))


def attend(cache, k, v, q):
    """What an attention layer of a patched model does."""
    mask = cache.make_mask(k.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache=cache, scale=q.shape[3] ** -0.5, mask=mask)


# The same call from a module that is not patched.
fetch_dense = eval("lambda cache, keys, values: cache.update_and_fetch(keys, values)", {})


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


# --- mlx-lm's protocol ---------------------------------------------------------------------------------------------


def test_it_has_what_mlx_lm_s_caches_have():
    for mine, theirs in ((PagedPromptCache, own.KVCache), (PagedPromptCache, own.RotatingKVCache),
                         (paged.PagedBatchCache, own.BatchKVCache), (paged.PagedBatchCache, own.BatchRotatingKVCache)):
        public = {name for name in dir(theirs) if not name.startswith("_")} - {"step"}
        if theirs is own.BatchRotatingKVCache:
            public.discard("to_quantized")  # it only refuses, and BatchKVCache has none
        assert public <= set(dir(mine)), (mine, public - set(dir(mine)))
    assert not hasattr(PagedPromptCache(), "bits"), "mlx-lm would take it for its own quantized cache"
    assert bool(PagedPromptCache()), "mlx-lm asks `if cache`"


def test_nbytes_follow_the_formula(models):
    model = models("llama")  # 2 KV heads of 16
    for mode, per_value in (("f32", 4), ("f16", 2), ("q8", 1), ("q4", 0.5)):
        cache = make(model, mode, block_size=16)
        assert all(layer.nbytes == 0 for layer in cache)
        logits(model, cache, tokens(33))
        per_token = 2 * 2 * (16 * per_value + (4 if mode.startswith("q") else 0))
        assert pagedkv.bytes_per_token(mode, 2, 16) == per_token
        image = -(-16 * per_token // 128) * 128  # a block is padded to 128 bytes
        assert {layer.nbytes for layer in cache} == {3 * image}
        assert {layer.paged_stats()["bytes_in_use"] for layer in cache} == {3 * image}


def test_the_pool_grows_or_is_a_capacity_error_that_changes_nothing(models):
    model = models("gemma3_text")
    small = make(model, "f32", num_blocks=2, dynamic=False)
    logits(model, small, tokens(8))
    full = small[2]
    with pytest.raises(pagedkv.CapacityError, match="need 1 tokens"):
        full.update_without_fetch(rows(1, dim=16), rows(1, dim=16))
    with pytest.raises(pagedkv.CapacityError):
        attend(full, rows(1, dim=16), rows(1, dim=16), rows(1, heads=4, dim=16))
    assert full.offset == 8
    grown = make(model, "f32", num_blocks=2)
    logits(model, grown, tokens(800))
    assert grown[2].offset == 800 and grown[2].paged_stats()["growth_bytes_copied"] == 0


@pytest.mark.parametrize("window", (None, 8))
def test_what_is_not_finite_is_refused_and_taken_back(window):
    cache = PagedPromptCache(BLOCK, 4, "q8", sliding_window=window)
    cache.update_without_fetch(rows(10), rows(10, seed=1))
    keys = cache.keys
    with pytest.raises(pagedkv.NotFiniteError, match="position 11"):
        cache.update_without_fetch(rows(2), rows(2, lambda i: float("nan") if i else 0.0))
    assert cache.offset == 10 and mx.array_equal(cache.keys, keys)
    with pytest.raises(ValueError, match="made for"):
        cache.update_without_fetch(rows(2, dim=6), rows(2))
    out = attend(cache, rows(1), rows(1, seed=1), rows(1, heads=4))
    assert cache.offset == 11 and mx.all(mx.isfinite(out))


def test_a_first_write_that_fails_leaves_the_type_open():
    cache = PagedPromptCache(BLOCK, 4)
    with pytest.raises(pagedkv.NotFiniteError):
        cache.update_without_fetch(rows(1, lambda i: float("inf"), dtype=mx.float16), rows(1, dtype=mx.float16))
    assert cache.empty()
    cache.update_without_fetch(rows(1), rows(1))
    assert cache.paged_stats()["mode"] == "f32"


def test_mlx_lm_s_own_quantization_and_its_file_are_refused_with_the_way_out(models, tmp_path):
    model, cache = models("llama"), make(models("llama"))
    with pytest.raises(ValueError, match="kv_quant"):
        say(model, cache, tokens(5), 3, kv_bits=8, quantized_kv_start=0)
    with pytest.raises(ValueError, match="pagedkv.mlx.save"):
        own.save_prompt_cache(str(tmp_path / "theirs.safetensors"), cache)


def test_layers_with_another_state_keep_mlx_lm_s_cache_and_are_named(models):
    model = models("qwen3_next")
    with pytest.warns(RuntimeWarning, match="ArraysCache: layers 0, 2") as said:
        cache = make(model)
    assert len(said) == 1
    assert [type(layer).__name__ for layer in cache] == ["ArraysCache", "PagedPromptCache"] * 2
    prompt = tokens(12)
    expected = say(model, own.make_prompt_cache(model), prompt, 8)
    with paged.patch_attention():
        assert say(model, cache, prompt, 8) == expected
    assert count(cache[1::2], "dense_materializations") == 0
    with pytest.raises(ValueError, match="layer 0 is a ArraysCache"):
        paged.save("never.safetensors", cache)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(models("llama"))


def test_a_ring_that_keeps_its_first_tokens_is_not_paged():
    class Model:
        def make_cache(self):
            return [own.RotatingKVCache(8, keep=4), own.KVCache(), own.ChunkedKVCache(8)]

    with pytest.warns(RuntimeWarning, match="RotatingKVCache: layers 0; ChunkedKVCache: layers 2"):
        cache = make(Model())
    assert [type(layer) for layer in cache] == [own.RotatingKVCache, PagedPromptCache, own.ChunkedKVCache]


def test_settings_that_cannot_be_are_refused(models):
    with pytest.raises(ValueError, match="q7.*q8"):
        make(models("llama"), "q7")
    with pytest.raises(ValueError, match="block_size is 0"):
        make(models("llama"), block_size=0)
    with pytest.raises(ValueError, match="sliding_window is 0"):
        PagedPromptCache(sliding_window=0)


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_a_draft_model_may_guess_also_past_the_window(models, name, packed):
    model, draft = models(name), make_model(name, seed=4)
    prompt = tokens(13)
    expected = say(model, own.make_prompt_cache(model), prompt, 24)
    cache = make(model, keep_behind_window=True) + make(draft, keep_behind_window=True)
    with patched(packed):
        steps = speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=3,
                                                       prompt_cache=cache, max_tokens=24)
        assert [token for token, *_ in steps] == expected
        again = make(model, keep_behind_window=True) + make(model, keep_behind_window=True)
        steps = list(speculative_generate_step(mx.array(prompt), model, model, num_draft_tokens=3,
                                                            prompt_cache=again, max_tokens=24))
    assert [token for token, *_ in steps] == expected and sum(guessed for *_, guessed in steps) > 12


def test_mlx_lm_s_prompt_store_lends_forks(models):  # O-SHARE-13
    model, store, prompt = models("llama"), own.LRUPromptCache(), tokens(16)
    with paged.patch_attention():
        cache = make(model, "q8")
        logits(model, cache, prompt)
        store.insert_cache("model", prompt, cache)
        assert store.nbytes == sum(layer.nbytes for layer in cache)
        before = [layer.keys for layer in cache]
        for tail in (tokens(4, 7), tokens(5, 8)):
            lent, rest = store.fetch_nearest_cache("model", prompt[:10] + tail)
            assert rest == tail and lent[0].offset == 10
            fresh = make(model, "q8")
            logits(model, fresh, prompt[:10])
            assert say(model, lent, rest, 6) == say(model, fresh, tail, 6)
        assert all(mx.array_equal(a, layer.keys) for a, layer in zip(before, cache)) and cache[0].offset == 16


# --- batches -------------------------------------------------------------------------------------------------------


def say_together(model, prompts, caches, n=12, **options):
    """Texts and final caches of mlx-lm's batch generation."""
    generator = BatchGenerator(model, max_tokens=n, **options)
    uids = generator.insert(prompts, caches=caches)
    texts, ended = {uid: [] for uid in uids}, {}
    while len(ended) < len(uids):
        for response in generator.next()[1]:
            texts[response.uid].append(response.token)
            if response.finish_reason:
                ended[response.uid] = response.prompt_cache
    return [texts[uid] for uid in uids], [ended[uid] for uid in uids]


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("options", ({}, {"prefill_step_size": 4}, {"prefill_step_size": 4, "prefill_batch_size": 2}),
                         ids=("one chunk", "chunks", "batches that join"))
@pytest.mark.parametrize("name", ("llama", "sliding_llama", "gemma3_text", "gpt_oss"))
def test_every_prompt_of_a_batch_says_what_it_says_alone(models, name, options, packed):
    model = models(name)
    prompts = [tokens(n, seed=n) for n in (13, 5, 1, 22, 9)]
    alone = [say(model, own.make_prompt_cache(model), prompt, 12) for prompt in prompts]
    with patched(packed):
        texts, caches = say_together(model, prompts, [make(model) for _ in prompts], **options)
        assert texts == alone
        for prompt, cache in zip(prompts, caches):
            assert {type(layer) for layer in cache} == {PagedPromptCache}
            assert {layer.offset for layer in cache} == {len(prompt) + 12}, "padding is not stored"
    assert not packed or sum(count(cache, "dense_materializations") for cache in caches) == 0


def test_a_batch_goes_on_from_branches_of_one_prompt_and_leaves_it(models):
    model, trunk, prompt = models("gemma3_text"), make(models("gemma3_text"), "q8"), tokens(17)
    with paged.patch_attention():
        logits(model, trunk, prompt)
        before, tails = trunk[2].keys, [tokens(n, seed=n) for n in (3, 1, 6)]
        alone = [say(model, copy.deepcopy(trunk), tail, 8) for tail in tails]
        assert say_together(model, tails, [trunk] * 3, 8)[0] == alone
    assert trunk[2].offset == 17 and mx.array_equal(trunk[2].keys, before)


@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_left_padding_is_skipped(models, name, packed):
    model, prompts = models(name), [tokens(n, seed=n) for n in (9, 4, 1)]
    padding = [9 - len(prompt) for prompt in prompts]
    columns = mx.array([[0] * pad + prompt for pad, prompt in zip(padding, prompts)])
    with patched(packed):
        batch = [PagedPromptCache.merge([layer] * 3) for layer in make(model)]
        for layer in batch:
            layer.prepare(left_padding=padding)
        assert batch[0].offset.tolist() == [-pad for pad in padding]
        found = mx.concatenate([model(columns[:, a:b], cache=batch)[:, -1] for a, b in ((0, 7), (7, 9))][1:])
        for row, prompt in enumerate(prompts):
            expected = logits(model, own.make_prompt_cache(model), prompt)[-1]
            np.testing.assert_allclose(np.array(found[row]), expected, atol=2e-5 * np.abs(expected).max())
        assert batch[0].offset.tolist() == [len(prompt) for prompt in prompts]


def test_a_batch_is_filtered_extended_extracted_and_restored():
    def one(n, **options):
        cache = PagedPromptCache(BLOCK, 4, "f32", **options)
        if n:
            cache.update_without_fetch(rows(n, seed=n), rows(n, seed=n + 50))
        return cache

    batch = PagedPromptCache.merge([one(5), one(0), one(9)])
    assert batch.offset.tolist() == [5, 0, 9] and batch.size() == 9 and not batch.empty() and batch.is_trimmable()
    assert batch.nbytes == one(5).nbytes + one(9).nbytes
    batch.extend(PagedPromptCache.merge([one(2)]))
    copied, restored = copy.deepcopy(batch), paged.PagedBatchCache.from_state(batch.state)
    mx.eval([batch.state])
    batch.filter([3, 2])
    assert batch.offset.tolist() == [2, 9]
    assert batch.trim(4) == 2 and batch.offset.tolist() == [0, 7]
    assert mx.array_equal(batch.extract(1).keys, rows(9, seed=9)[:, :, :7])
    for other in (copied, restored):
        assert other.offset.tolist() == [5, 0, 9, 2] and mx.array_equal(other.extract(2).keys, rows(9, seed=9))
    copied.filter(mx.array([1]))
    assert copied.empty() and copied.extract(0).offset == 0


def test_what_cannot_be_one_batch_is_refused():
    one = PagedPromptCache(BLOCK, 4, "f32")
    with pytest.raises(ValueError, match="KVCache in one batch with paged caches"):
        PagedPromptCache.merge([one, own.KVCache()])
    with pytest.raises(ValueError, match=r"windows \[None, 8\]"):
        PagedPromptCache.merge([one, PagedPromptCache(sliding_window=8)])
    wide = PagedPromptCache(BLOCK, 4, "f32")
    wide.update_without_fetch(mx.zeros((2, 2, 3, 8)), mx.zeros((2, 2, 3, 8)))
    with pytest.raises(ValueError, match="2 batch rows"):
        PagedPromptCache.merge([one, wide])
    batch = PagedPromptCache.merge([one, one])
    with pytest.raises(ValueError, match="BatchKVCache cannot join"):
        batch.extend(own.BatchKVCache([0]))
    with pytest.raises(ValueError, match="batch has 2 prompts"):
        batch.update_and_fetch(rows(1), rows(1))
    with pytest.raises(ValueError, match="lengths"):
        batch.prepare(right_padding=[0, 1])
    attend(batch, *(mx.zeros((2, heads, 1, 8)) for heads in (2, 2, 4)))
    with pytest.raises(ValueError, match="before the first tokens"):
        batch.prepare(left_padding=[0, 1])


@pytest.mark.parametrize("window", (None, 8))
def test_a_batch_step_is_stored_whole_or_not_at_all(window):
    prompts = [PagedPromptCache(BLOCK, 2, "f32", dynamic, sliding_window=window) for dynamic in (True, False)]
    batch = PagedPromptCache.merge(prompts)
    k = mx.zeros((2, 2, 8, 8))
    attend(batch, k, k, mx.zeros((2, 4, 8, 8)))
    offsets, n = batch.offset.tolist(), 1 if window is None else 3000
    new = mx.ones((2, 2, n, 8))
    with pytest.raises(pagedkv.CapacityError):
        attend(batch, new, new, mx.zeros((2, 4, n, 8)))
    assert batch.offset.tolist() == offsets == [8, 8]
    assert float(mx.abs(batch.extract(0).keys).max()) == 0


def test_rows_of_one_cache_attend_each_for_itself(models):
    model, prompts = models("gemma3_text"), [tokens(11, seed=seed) for seed in (1, 2, 3)]
    with paged.patch_attention():
        cache = make(model)
        first = model(mx.array([prompt[:10] for prompt in prompts]), cache=cache)
        second = model(mx.array([prompt[10:] for prompt in prompts]), cache=cache)
    for row, prompt in enumerate(prompts):
        expected = logits(model, own.make_prompt_cache(model), prompt)
        found = np.array(mx.concatenate([first[row], second[row]]))
        np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ("f32", "f16", "bf16", "q8", "q6", "q4", "q8:q4", "bf16:q8"))
@pytest.mark.parametrize("name", ("llama", "gemma3_text"))
def test_a_saved_cache_goes_on_with_the_same_bits(models, tmp_path, name, mode):
    model, cache, path = models(name), make(models(name), mode), tmp_path / "prompt.safetensors"
    with paged.patch_attention():
        say(model, cache, tokens(21), 4)
        paged.save(path, cache, {"model": name})
        assert count(cache, "dense_materializations") == (len(cache) if "bf16" in mode else 0)
        loaded, metadata = paged.load(path, model, mode, return_metadata=True)
        assert metadata == {"model": name}
        for a, b in zip(cache, loaded):
            assert a.offset == b.offset == 25 and a.nbytes == b.nbytes and a.sliding_window == b.sliding_window
            stored, again = paged.saved._stored(a), paged.saved._stored(b)
            assert stored.keys() == again.keys()
            for part, tensor in stored.items():
                assert np.array_equal(*tensor.pieces, *again[part].pieces), part
            assert b.keys.dtype == a.keys.dtype and b.paged_stats()["mode"] == mode
        rest = tokens(9, 5)
        assert np.array_equal(logits(model, cache, rest[:8], rest[8:]), logits(model, loaded, rest[:8], rest[8:]))


def test_rows_encode_to_themselves():
    """Why a file's rows may be decoded and stored again (see _loaded): at every size, also below the scale's floor."""
    x = np.random.default_rng(0).standard_normal((60000, 12)).astype(np.float32)
    x *= np.float32(10) ** np.random.default_rng(1).uniform(-8, 8, (60000, 1)).astype(np.float32)
    for mode in ("q8", "q6", "q4"):
        codes, scales = pagedkv.quantize_symmetric(x, mode)
        again = pagedkv.quantize_symmetric(pagedkv.dequantize_symmetric(codes, scales, 12, mode), mode)
        assert np.array_equal(codes, again[0]) and np.array_equal(scales, again[1]), mode


def test_the_file_is_as_small_as_the_rows_and_any_reader_s(models, tmp_path):
    model, cache, path = models("llama"), make(models("llama"), "q4"), tmp_path / "prompt.safetensors"
    logits(model, cache, tokens(200))
    paged.save(path, cache)
    rows_ = 3 * 200 * pagedkv.bytes_per_token("q4", 2, 16)
    assert rows_ <= path.stat().st_size < rows_ + 4096
    arrays, about = mx.load(str(path), return_metadata=True)
    assert about["format"] == "pagedkv.mlx" and arrays["0.keys"].shape == (1, 2, 200, 8)
    assert arrays["2.values.scales"].dtype == mx.float32
    with pytest.raises(Exception):
        own.load_prompt_cache(str(path))


def test_every_setting_survives_or_is_refused(models, tmp_path):  # O-PERS-07
    path = tmp_path / "prompt.safetensors"
    cache = [PagedPromptCache(8, 5, "q8", False, 6), PagedPromptCache(BLOCK, 7, "q4:q8", True, 6, True),
             PagedPromptCache(BLOCK, 64, "f16"), PagedPromptCache()]
    for layer in cache[:3]:
        layer.update_without_fetch(rows(20, dtype=mx.float16), rows(20, seed=1, dtype=mx.float16))
        if layer.is_trimmable():
            layer.trim(3)
            layer.update_without_fetch(rows(3, seed=4, dtype=mx.float16), rows(3, seed=5, dtype=mx.float16))
    paged.save(path, cache)
    loaded = paged.load(path)
    for a, b in zip(cache, loaded, strict=True):
        for name in ("block_size", "num_blocks", "kv_quant_config", "dynamic", "sliding_window", "keep_behind_window",
                     "offset"):
            assert getattr(a, name) == getattr(b, name), name
        if not a.empty():
            assert a.keys.dtype == b.keys.dtype == mx.float16 and mx.array_equal(a.keys, b.keys)
    with pytest.raises(ValueError, match="layer 0 is a KVCache"):
        paged.save(path, [own.KVCache()])
    with pytest.raises(ValueError, match="dict of strings"):
        paged.save(path, cache, {"n": 1})


def test_other_versions_models_and_modes_are_refused_with_both(models, tmp_path):  # O-PERS-07
    model, path = models("gemma3_text"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(9))
    paged.save(path, cache)
    with pytest.raises(ValueError, match="6 layers in the file, 3 in the model"):
        paged.load(path, models("llama"))
    paged.save(path, cache[:4])
    with pytest.raises(ValueError, match="layer 0 has window 6 in the file, window None in the model"):
        paged.load(path, models("sliding_llama"))
    with pytest.raises(ValueError, match="is q8 in the file, q4 was asked"):
        paged.load(path, kv_quant="q4")
    assert len(paged.load(path, kv_quant="q8:q8")) == 4
    for version in ("0", "2"):
        rewrite(path, lambda header: header["__metadata__"].update(version=version))
        with pytest.raises(ValueError, match=f"version {version}, this build reads 1"):
            paged.load(path)
    mx.save_safetensors(str(path), {"0.keys": mx.zeros((1,))})
    with pytest.raises(ValueError, match="not a file of pagedkv.mlx"):
        paged.load(path)
    with pytest.raises(FileNotFoundError):
        paged.load(tmp_path / "nothing")


def test_damaged_files_are_refused(models, tmp_path):  # O-PERS-01
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    whole = path.read_bytes()
    n, = struct.unpack("<Q", whole[:8])
    for place in (0, 3, 8, 9, n // 2, 8 + n, len(whole) // 2, len(whole) - 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x40]) + whole[place + 1:])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            paged.load(path)
    for length in (0, 7, 8, 8 + n // 2, 8 + n, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=re.escape(str(path))):
            paged.load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(ValueError, match="cut short or damaged"):
        paged.load(path)


@pytest.mark.parametrize("change", (
    lambda header: header.pop("0.keys"),
    lambda header: header["0.keys"].update(shape=[1, 2, 21, 16]),
    lambda header: header["0.keys"].update(shape=[1, 2, 20]),
    lambda header: header["0.keys"].update(shape=[1, 2, -20, -16]),
    lambda header: header["0.keys"].update(dtype="U8"),
    lambda header: header["0.keys"].update(data_offsets=[-640, 0]),
    lambda header: header["__metadata__"].update(layers="[{}]"),
    lambda header: header["__metadata__"].update(layers="7"),
    lambda header: header["__metadata__"].update(layers="not json"),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"offset": 20', '"offset": 25')),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"block_size": 4', '"block_size": 0')),
    lambda header: header["__metadata__"].update(
        layers=header["__metadata__"]["layers"].replace('"float32"', '"load"')),
))
def test_files_that_contradict_themselves_are_refused(models, tmp_path, change):
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    rewrite(path, change)
    with pytest.raises(ValueError):
        paged.load(path)


def test_a_save_that_fails_leaves_the_old_file(models, tmp_path, monkeypatch):
    model, path = models("llama"), tmp_path / "prompt.safetensors"
    cache = make(model, "q8")
    logits(model, cache, tokens(20))
    paged.save(path, cache)
    old = path.read_bytes()
    logits(model, cache, tokens(3))

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            paged.save(path, cache)
    assert path.read_bytes() == old and os.listdir(tmp_path) == [path.name]
    paged.save(path, cache)
    assert paged.load(path)[0].offset == 23 and os.listdir(tmp_path) == [path.name]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "a conversation is its owner's"
