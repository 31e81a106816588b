"""PagedCache: forwards that fail, columns that are taken back, rows that move."""

import copy

import pytest
from hf_models import (
    WINDOW,
    dynamic, expect_refused, forward, left_padded, llama, logits, mistral, models, paged, pytestmark, say, tokens,
    torch,
)

import pagedkv
import pagedkv.hf as hf


# --- when a forward fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
def test_a_prefill_with_nan_is_refused_and_leaves_what_was(llama, attn):
    with torch.no_grad():
        llama.model.embed_tokens.weight[5] = float("nan")
    ids = tokens(2, 20) % 90 + 6
    expected = logits(llama, attn, paged(llama), ids)
    bad = ids[:, 10:].clone()
    bad[1, 3] = 5

    cache = paged(llama)
    logits(llama, attn, cache, ids[:, :10])
    with pytest.raises(pagedkv.NotFiniteError):
        logits(llama, attn, cache, bad)

    assert cache.get_seq_length() == 10
    cache.verify()
    assert torch.allclose(logits(llama, attn, cache, ids[:, 10:]), expected[:, 10:], atol=1e-3)


def test_nan_past_the_window_leaves_what_was(mistral):
    with torch.no_grad():
        mistral.model.embed_tokens.weight[5] = float("nan")
    ids = tokens(2, 12) % 90 + 6
    bad = ids.clone()
    bad[0, 3] = 5
    cache, untouched = paged(mistral), paged(mistral)
    for one in (cache, untouched):
        forward(mistral, ids, one)
    with pytest.raises(pagedkv.NotFiniteError):
        forward(mistral, bad, cache)
    assert cache.get_seq_length() == 12
    cache.verify()
    assert torch.equal(forward(mistral, ids, cache).logits, forward(mistral, ids, untouched).logits)


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
def test_a_forward_that_is_cut_short_leaves_no_trace(llama, attn):
    ids = tokens(2, 20)
    expected = logits(llama, attn, paged(llama), ids)
    cache = paged(llama)
    logits(llama, attn, cache, ids[:, :10])

    def interrupt(*args):
        raise KeyboardInterrupt

    hook = llama.model.layers[1].mlp.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(llama, attn, cache, tokens(2, 7, seed=9))
    hook.remove()
    assert cache.get_seq_length() == 10

    with pytest.warns(RuntimeWarning, match=r"7 columns was cut short: layers \[2\]"):
        found = logits(llama, attn, cache, ids[:, 10:])
    assert torch.allclose(found, expected[:, 10:], atol=1e-3)
    cache.verify()


def test_no_room_is_an_error_and_leaves_what_was(llama):
    cache = paged(llama, num_blocks=6, dynamic=False)
    expect_refused(llama, "need", tokens(3, 20), cache, error=pagedkv.CapacityError)
    ids = tokens(2, 12)
    forward(llama, ids[:, :10], cache)
    expect_refused(llama, "need", tokens(2, 5), cache, error=pagedkv.CapacityError)
    forward(llama, ids[:, 10:], cache)
    assert cache.get_seq_length() == 12
    cache.verify()


def test_a_cache_grows_unless_it_may_not(llama, monkeypatch):
    cache = paged(llama, num_blocks=2)
    ids = tokens(2, 40)
    assert torch.allclose(logits(llama, hf.NAME, cache, ids), logits(llama, "sdpa", dynamic(llama), ids), atol=1e-3)
    monkeypatch.setenv("PAGEDKV_DYNAMIC", "0")
    expect_refused(llama, "need", ids, paged(llama, num_blocks=2), error=pagedkv.CapacityError)


def test_rows_that_fork_behind_a_window_find_room(mistral):
    cache = paged(mistral)
    forward(mistral, tokens(1, 3 * WINDOW), cache)
    cache.batch_repeat_interleave(8)
    for i in range(40):
        forward(mistral, tokens(8, 1, seed=i), cache)
    cache.verify()


def test_without_growth_a_window_says_what_makes_room(mistral):
    cache = paged(mistral, dynamic=False)
    forward(mistral, tokens(1, 3 * WINDOW), cache)
    cache.batch_repeat_interleave(300)
    with pytest.raises(pagedkv.CapacityError, match="max_sequences 1, forks included, and longest_chunk 512: raise"):
        for i in range(40):
            forward(mistral, tokens(300, 1, seed=i), cache)


def test_max_cache_len_is_the_longest_row(llama):
    cache = paged(llama, max_cache_len=12)
    assert cache.get_max_length() == 12
    forward(llama, tokens(1, 12), cache)
    expect_refused(llama, "pass the context of 12 tokens", tokens(1, 1), cache)


def test_resident_bytes_are_asked_for_or_left_out(llama):
    cache = paged(llama)
    forward(llama, tokens(1, 12), cache)
    assert "bytes_resident" not in cache.stats() and cache.stats(resident=True)["bytes_resident"] > 0


@pytest.mark.parametrize("options, text", [
    (dict(dynamic="no"), "dynamic is 'no', of type str, allowed are True and False"),
    (dict(block_size=16.0), "block_size is 16.0, of type float, allowed are integers"),
    (dict(kv_quant=8), "kv_quant is 8, of type int, allowed are modes"),
    (dict(max_cache_len="8"), "max_context is '8', of type str, allowed are integers"),
])
def test_an_option_of_a_wrong_type_is_refused_at_once(llama, options, text):
    with pytest.raises(TypeError, match=text):
        paged(llama, **options)


# --- taking back, moving rows --------------------------------------------------------------------------------------


def test_crop_takes_back_what_it_says_or_nothing(llama):
    # O-LIFE-01, in the words of transformers: a negative number of columns.
    def of_three():
        cache = paged(llama)
        forward(llama, tokens(2, 3), cache)
        return cache

    cache = of_three()
    cache.crop(-3)
    assert cache.get_seq_length() == 0 and cache.stats()["bytes_in_use"] == 0
    forward(llama, tokens(2, 1), cache)
    assert cache.get_seq_length() == 1
    for wrong in (-5, 7):
        cache = of_three()
        with pytest.raises(ValueError):
            cache.crop(wrong)
        assert cache.get_seq_length() == 3
    cache = of_three()
    cache.crop(0)
    assert cache.get_seq_length() == 3
    cache.verify()


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("mode", ["f32", "q8", "q4"])
def test_what_was_taken_back_is_gone(models, mode, attn):
    # O-LIFE-02
    model, old, new = models("llama"), tokens(2, 10), tokens(2, 5, seed=2)
    expected = logits(model, attn, paged(model, kv_quant=mode), old[:, :5], new)[:, 5:]

    cache = paged(model, kv_quant=mode)
    logits(model, attn, cache, old[:, :5], old[:, 5:])
    cache.crop(-5)
    assert torch.equal(logits(model, attn, cache, new), expected)

    cache = paged(model, kv_quant=mode)
    logits(model, attn, cache, old[:, :5])
    fork = copy.deepcopy(cache)
    logits(model, attn, cache, old[:, 5:])
    assert torch.equal(logits(model, attn, fork, new), expected)


def test_crop_behind_a_window_is_refused_and_nothing_changes(mistral):
    cache, ids = paged(mistral), tokens(2, 40)
    for i in range(0, 40, 10):
        forward(mistral, ids[:, i:i + 10], cache)
    before = cache.layers[0].keys
    with pytest.raises(ValueError):
        cache.crop(-25)
    assert cache.get_seq_length() == 40 and torch.equal(cache.layers[0].keys, before)
    cache.verify()


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
def test_padded_rows_are_cropped_into_their_padding_and_back(llama, attn):
    ids, mask = left_padded(8, 2)
    expected = logits(llama, attn, paged(llama), ids, mask=mask)
    for recording in (False, True):
        cache = paged(llama)
        if recording:
            cache.activate_past_recording()
        logits(llama, attn, cache, ids, mask=mask)
        cache.crop(-4)
        assert cache.get_seq_length() == 4
        found = logits(llama, attn, cache, ids[:, 4:], mask=mask)
        assert torch.allclose(found[0], expected[0, 4:], atol=1e-3)
        assert torch.allclose(found[1, 2:], expected[1, 6:], atol=1e-3)
        cache.verify()


def test_a_fork_shares_until_it_writes(llama):
    # O-LIFE-07
    ids = tokens(1, 6)
    cache = paged(llama)
    forward(llama, ids, cache)
    fork = cache.fork()
    assert cache.stats()["blocks_shared"] == 2
    a = forward(llama, torch.tensor([[41]]), cache).logits
    b = forward(llama, torch.tensor([[42]]), fork).logits
    assert cache.stats()["copies"] == 1 and cache.stats()["blocks_shared"] == 1
    for token, found in ((41, a), (42, b)):
        fresh = forward(llama, torch.cat([ids, torch.tensor([[token]])], 1), paged(llama)).logits
        assert torch.allclose(found[:, -1], fresh[:, -1], atol=1e-3)


def test_nothing_that_happens_to_a_copy_happens_to_the_original(llama):
    # O-LIFE-08
    cache = paged(llama, kv_quant="q8")
    forward(llama, tokens(2, 10), cache)
    before, in_use = [layer.keys for layer in cache.layers], cache.stats()["bytes_in_use"]

    def unchanged():
        cache.verify()
        return cache.get_seq_length() == 10 and all(torch.equal(a.keys, b) for a, b in zip(cache.layers, before))

    child = copy.copy(cache)
    child.crop(-3)
    assert unchanged()
    forward(llama, tokens(2, 5, seed=3), child)
    assert unchanged() and cache.stats()["bytes_in_use"] > in_use
    child.crop(-10)
    assert unchanged() and child.get_seq_length() == 2
    forward(llama, tokens(2, 9, seed=4), child)
    del child
    assert unchanged() and cache.stats()["bytes_in_use"] == in_use


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_rows_move_with_their_texts(models, name, attn):
    model, (ids, mask) = models(name), left_padded(12, 7, 10)
    steps = tokens(5, 6, seed=8)

    def run(cache, attn):
        logits(model, attn, cache, ids, mask=mask)
        cache.reorder_cache(torch.tensor([2, 0, 2]))
        rows = mask[[2, 0, 2]]
        out = []

        def go_on(n_rows, n):
            nonlocal rows
            rows = torch.cat([rows, torch.ones(len(rows), n, dtype=torch.long)], 1)
            out.append(logits(model, attn, cache, steps[:n_rows, :n], mask=rows).reshape(-1))

        go_on(3, 3)
        cache.batch_repeat_interleave(2)
        rows = rows.repeat_interleave(2, 0)
        cache.batch_select_indices(torch.tensor([5, 1, 2, 0, 1]))
        rows = rows[[5, 1, 2, 0, 1]]
        go_on(5, 6)
        cache.batch_select_indices(torch.tensor([True, False, False, True, False]))
        rows = rows[[0, 3]]
        go_on(2, 1)
        return torch.cat(out)

    cache = paged(model)
    assert torch.allclose(run(cache, attn), run(dynamic(model), "sdpa"), atol=2e-3)
    assert cache.batch_size == 2
    cache.verify()
    assert cache.core.stats()["tokens"] < 2 * 23, "rows that were dropped are still there"


def test_beams_that_stay_are_not_touched_by_those_that_go(llama):
    cache = paged(llama)
    forward(llama, tokens(4, 10), cache)
    kept = cache.layers[1].values[2].clone()
    cache.reorder_cache(torch.tensor([2, 2, 1, 0]))
    assert torch.equal(cache.layers[1].values[0], kept)
    forward(llama, tokens(4, 3, seed=3), cache)
    assert torch.equal(cache.layers[1].values[:2, :, :10], kept[None].expand(2, -1, -1, -1))
    cache.verify()


def test_a_reset_cache_serves_another_batch(llama):
    cache = paged(llama)
    say(llama, hf.NAME, tokens(3, 5), cache)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.stats()["bytes_in_use"] == 0
    ids = tokens(1, 9)
    assert torch.equal(say(llama, hf.NAME, ids, cache), say(llama, "sdpa", ids, dynamic(llama)))


def test_an_empty_cache_takes_any_batch_whatever_came_before(mistral):
    cache = paged(mistral, dynamic=False)
    for ids in (tokens(1, 3), tokens(3, 600), tokens(2, 700)):
        expected = logits(mistral, "sdpa", dynamic(mistral), ids)
        assert torch.allclose(logits(mistral, hf.NAME, cache, ids), expected, atol=1e-3)
        cache.activate_past_recording()
        cache.crop(0)
        cache.reset()
    forward(mistral, tokens(2, 5), cache)
    cache.crop(-5)
    forward(mistral, tokens(4, 2), cache)
    assert cache.batch_size == 4
    cache.verify()
