"""pagedkv.mlx: mlx-lm's protocol, batches."""

import copy
import warnings

import numpy as np
import pytest
from mlx_models import (
    BLOCK, attend, count, logits, make, make_model, models, mx, nothing_stays_patched, patched, rows, say, tokens,
)

import pagedkv
import pagedkv.mlx as paged
from mlx_lm.generate import BatchGenerator, speculative_generate_step
from mlx_lm.models import cache as own
from pagedkv.mlx import PagedPromptCache


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
