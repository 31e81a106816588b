"""Cache, StepPlan, append, attend, merge: the library's face in Python."""

import gc

import numpy as np
import pytest

import oracle
import pagedkv

FORMATS = ["f32", "f16", "bf16", "q8", "q6", "q4"]


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def step(cache, requests, layers=1, kv_heads=2, d=64, seed=0, commit=True):
    """Appends random rows of each layer; returns the plan and the K, V of layer 0."""
    plan = cache.reserve(requests)
    first = None
    for layer in range(layers):
        k, v = (rows(plan.n_tokens, kv_heads, d, seed=seed + 2 * layer + side) for side in (0, 1))
        pagedkv.append(plan, layer, k, v)
        first = first or (k, v)
    if commit:
        plan.commit()
    return plan, first


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("arena", ["block_major", "layer_major"])
def test_a_ragged_step_agrees_with_double(mode, arena):
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=6, kv_quant=mode, num_blocks=128, arena=arena)
    a, b = cache.start().sequence, cache.start().sequence
    _, (ka, va) = step(cache, [(a, 300)], seed=1)
    plan, (k, v) = step(cache, [(a, 1), (b, 20)], seed=5, commit=False)  # a decodes while b prefills
    q = rows(21, 6, 64, seed=9)
    out, lse = pagedkv.attend(plan, 0, q, return_lse=True)
    plan.commit()
    for here, keys, values in ((slice(0, 1), np.concatenate([ka, k[:1]]), np.concatenate([va, v[:1]])),
                               (slice(1, 21), k[1:], v[1:])):
        expected, expected_lse = oracle.attention(q[here], oracle.stored(keys, mode), oracle.stored(values, mode))
        tolerance = oracle.TOLERANCE[mode]
        np.testing.assert_allclose(out[here], expected, rtol=0, atol=tolerance * np.abs(expected).max())
        np.testing.assert_allclose(lse[here], expected_lse, rtol=0, atol=20 * tolerance)
    assert cache.length(a) == 301 and cache.length(b) == 20
    cache.verify()


def test_softcap_sinks_scale_and_window_mean_what_they_mean():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_q_heads=4, kv_quant="f32", num_blocks=32)
    s = cache.start().sequence
    plan, (k, v) = step(cache, [(s, 40)], d=32, commit=False)
    q, sinks = rows(40, 4, 32, seed=3), np.array([0.5, -1, 2, -np.inf], np.float32)
    for options in ({"softcap": 2.0}, {"sinks": sinks}, {"scale": 0.3}, {"sliding_window": 7},
                    {"softcap": 1.0, "sinks": sinks, "scale": 1.5, "sliding_window": 3}):
        named = {("window" if name == "sliding_window" else name): value for name, value in options.items()}
        expected, _ = oracle.attention(q, k, v, **named)
        np.testing.assert_allclose(pagedkv.attend(plan, 0, q, **options), expected, atol=3e-6)
    plan.abandon()
    for options in ({"scale": 0}, {"scale": -1.0}, {"scale": np.nan}, {"sliding_window": 0}, {"sliding_window": -2},
                    {"softcap": -1.0}, {"sinks": sinks[:3]}):
        with cache.reserve([(s, 1)]) as plan:
            pagedkv.append(plan, 0, k[:1], v[:1])
            with pytest.raises(ValueError, match="scale|sliding_window|softcap|sinks"):
                pagedkv.attend(plan, 0, q[:1], **options)


def test_groups_have_their_own_heads_formats_and_windows():
    cache = pagedkv.Cache(groups=[
        pagedkv.Group(layers=[0, 2], num_kv_heads=2, head_dim=32, kv_quant="q8"),
        pagedkv.Group(layers=[1], num_kv_heads=1, head_dim=64, sliding_window=8, kv_quant="f32"),
    ], block_size=4, num_blocks=32, longest_chunk=16)
    assert [g.layers for g in cache.groups] == [[0, 2], [1]] and cache.groups[1].sliding_window == 8
    assert cache.groups[0].bytes_per_token == 2 * pagedkv.bytes_per_token("q8", 2, 32)
    s = cache.start().sequence
    kept = []
    for n in (16, 1, 1, 3):
        plan = cache.reserve([(s, n)])
        for layer, heads, d in ((0, 2, 32), (1, 1, 64), (2, 2, 32)):
            pagedkv.append(plan, layer, rows(n, heads, d), rows(n, heads, d))
        kept.append(rows(n, 1, 64))
        q = rows(n, 4, 64, seed=8)
        so_far = np.concatenate(kept)
        expected, _ = oracle.attention(q, so_far, so_far, window=8)
        np.testing.assert_allclose(pagedkv.attend(plan, 1, q), expected, atol=3e-6)
        plan.commit()
    assert cache.blocks_held(s, 1) <= 3 < cache.blocks_held(s, 0)  # behind the window, blocks are given back
    for layer in (3, -1, 99):
        with pytest.raises(ValueError, match=f"layer {layer} is in no group"):
            cache.tensors(layer)


def test_a_prompt_that_was_there_before_is_taken_from_the_cache():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, kv_quant="q4", block_size=4, num_blocks=32)
    prompt = list(range(100, 111))
    first = cache.start(prompt)
    assert first.reused == 0 and first.reason == "new"
    step(cache, [(first.sequence, prompt)])
    cache.release(first.sequence)
    sequence, reused, _ = cache.start(np.array(prompt))
    assert reused == 10  # the last prompt token is always computed
    other = cache.start(prompt, name_space="somebody else")
    assert other.reused == 0
    assert cache.start(prompt, reuse=False).reason == "off"
    assert cache.stats()["hits"]["tokens"] == 10
    for ids in ([1.5], ["a"], [2**31], np.ones((2, 2), int)):
        with pytest.raises((TypeError, ValueError)):
            cache.start(ids)


def test_a_plan_commits_at_the_end_of_its_block_and_abandons_on_an_exception():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_blocks=8)
    s = cache.start().sequence
    with cache.reserve([(s, 3)]) as plan:
        pagedkv.append(plan, 0, rows(3, 2, 64), rows(3, 2, 64))
    assert cache.length(s) == 3 and not plan.open
    with pytest.raises(ZeroDivisionError):
        with cache.reserve([(s, 3)]):
            1 / 0
    assert cache.length(s) == 3
    plan = cache.reserve([(s, 3)])
    del plan  # dropped: abandoned
    gc.collect()
    plan = cache.reserve([(s, 3)])
    pagedkv.append(plan, 0, rows(3, 2, 64), rows(3, 2, 64))
    plan.commit(accepted=[2])
    assert cache.length(s) == 5
    for call in (plan.commit, lambda: pagedkv.append(plan, 0, rows(3, 2, 64), rows(3, 2, 64)), lambda: plan.seq_lens):
        with pytest.raises(pagedkv.StaleError, match="ended"):
            call()
    plan.abandon()  # nothing left to do
    cache.verify()


@pytest.mark.parametrize("accepted", [[4], [-1], [1, 1], []])
def test_accepted_counts_are_checked_before_anything_changes(accepted):
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_blocks=8)
    s = cache.start().sequence
    plan, _ = step(cache, [(s, 3)], commit=False)
    with pytest.raises(ValueError, match="accepted"):
        plan.commit(accepted)
    assert cache.length(s) == 0
    plan.commit()
    assert cache.length(s) == 3


def test_a_plans_arrays_are_vllms():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, block_size=4, num_blocks=16)
    a, b = cache.start().sequence, cache.start().sequence
    step(cache, [(a, 5)])
    plan, _ = step(cache, [(a, 2), (b, 3)], commit=False)
    assert plan.seq_lens.tolist() == [7, 3] and plan.query_start_loc.tolist() == [0, 2, 5]
    assert plan.positions.tolist() == [5, 6, 0, 1, 2] and plan.seq_lens.dtype == np.int32
    tables, slots = plan.block_tables(), plan.slot_mapping()
    assert tables.shape == (2, 2) and tables[1, 1] == -1 and slots.dtype == np.int64
    expected = [tables[0, p // 4] * 4 + p % 4 for p in (5, 6)] + [tables[1, 0] * 4 + p for p in range(3)]
    assert slots.tolist() == expected
    for group in (-1, 1):
        with pytest.raises(ValueError, match="group"):
            plan.block_tables(group)


def test_a_handle_to_a_released_sequence_reaches_nobody():  # O-LIFE-12
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_blocks=8)
    old = cache.start().sequence
    cache.release(old)
    new = cache.start().sequence
    step(cache, [(new, 3)])
    assert old != new and len({old, new}) == 2
    for call in (lambda: cache.length(old), lambda: cache.fork(old), lambda: cache.truncate(old, 0),
                 lambda: cache.release(old), lambda: cache.reserve([(old, 1)]), lambda: cache.plan_read([(old, 1)]),
                 lambda: cache.blocks_held(old)):
        with pytest.raises(pagedkv.StaleError):
            call()
    assert cache.length(new) == 3
    with pytest.raises(ValueError, match="another cache"):
        pagedkv.Cache(num_kv_heads=2, head_dim=64, num_blocks=8).length(new)


@pytest.mark.parametrize("length", [15, 20])
def test_a_window_of_one_token_is_shortened_or_refused(length):
    cache = pagedkv.Cache(groups=[pagedkv.Group(layers=[0], num_kv_heads=2, head_dim=64),
                                  pagedkv.Group(layers=[1], num_kv_heads=2, head_dim=64, sliding_window=1)],
                          block_size=4, num_blocks=16)
    s = cache.start().sequence
    step(cache, [(s, length)], layers=2)
    with pytest.raises(ValueError, match="length 10 needs the block of positions 8 to 11, the window of 1"):
        cache.truncate(s, 10)
    step(cache, [(s, 2)], layers=2)
    cache.truncate(s, length + 1)
    cache.truncate(s, 8)
    step(cache, [(s, 5)], layers=2)
    assert cache.length(s) == 13


def test_a_read_plan_is_refused_while_its_sequence_is_being_written():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_blocks=8, kv_quant="f32", dynamic=True)
    s = cache.start().sequence
    step(cache, [(s, 5)])
    plan = cache.plan_read([(s, 1)])
    twin = cache.fork(s)
    writing = cache.reserve([(s, 1)])  # copies the block that the plan names
    cache.release(twin)
    with pytest.raises(pagedkv.StaleError, match="has changed"):
        pagedkv.attend(plan, 0, rows(1, 2, 64))
    writing.abandon()


def test_a_read_plan_is_refused_once_its_sequence_has_changed():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=2, num_blocks=8, kv_quant="f32", dynamic=True)
    s, other = cache.start().sequence, cache.start().sequence
    _, (k, v) = step(cache, [(s, 5)])
    step(cache, [(other, 2)])
    q = rows(1, 2, 64)
    plan = cache.plan_read([(s, 1)])
    expected, _ = oracle.attention(q, k, v)
    np.testing.assert_allclose(pagedkv.attend(plan, 0, q), expected, atol=3e-6)
    step(cache, [(other, 2)])  # somebody else's step
    np.testing.assert_allclose(pagedkv.attend(plan, 0, q), expected, atol=3e-6)
    with pytest.raises(ValueError, match="only reads"):
        plan.commit()
    cache.truncate(s, 2)
    for call in (lambda: pagedkv.attend(plan, 0, q), lambda: cache.read_dense(plan, 0, 0)):
        with pytest.raises(pagedkv.StaleError, match="has changed"):
            call()
    with pytest.raises(ValueError, match="3"):
        cache.plan_read([(s, 3)])


def test_read_dense_sees_rows_of_an_open_step_and_fills_what_it_is_given():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, head_dim_v=16, kv_quant="q8", block_size=4, num_blocks=16)
    s = cache.start().sequence
    plan = cache.reserve([(s, 7)])
    k, v = rows(7, 2, 32), rows(7, 2, 16)
    pagedkv.append(plan, 0, k, v)
    keys, values = cache.read_dense(plan, 0, 0, first=2)
    np.testing.assert_array_equal(keys, oracle.stored(k, "q8")[2:].transpose(1, 0, 2))
    np.testing.assert_array_equal(values, oracle.stored(v, "q8")[2:].transpose(1, 0, 2))
    into = np.zeros((2, 9, 32), np.float32)
    cache.read_dense(plan, 0, 0, out_k=into[:, :7])
    np.testing.assert_array_equal(into[:, 2:7], keys)
    assert (into[:, 7:] == 0).all()
    for place, first in ((1, 0), (-1, 0), (0, 8), (0, -1)):
        with pytest.raises(ValueError):
            cache.read_dense(plan, place, 0, first)
    with pytest.raises((TypeError, ValueError)):
        cache.read_dense(plan, 0, 0, out_k=np.zeros((2, 7, 32)))
    stats = cache.stats()
    assert stats["dense_materializations"] == 2 and stats["dequantized_rows"] == 2 * 2 * (5 + 7)


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("arena", ["block_major", "layer_major"])
def test_block_tensors_are_views_that_survive_growth_and_the_cache(mode, arena):
    cache = pagedkv.Cache(num_layers=2, num_kv_heads=2, head_dim=64, kv_quant=mode, num_blocks=4, dynamic=True, arena=arena)
    s = cache.start().sequence
    plan, (k, _) = step(cache, [(s, 20)], layers=2, commit=False)
    table = plan.block_tables()[0]
    plan.commit()
    tensors = cache.tensors(0)
    if mode == "bf16":
        with pytest.raises(Exception):  # numpy has no such type; torch reads it (torch_test.py)
            np.from_dlpack(tensors.k)
        return
    view = np.from_dlpack(tensors.k)
    assert view.shape[1:3] == (16, 2) and view.base is not None
    same = np.asarray(tensors.k)  # numpy before 2.2 makes what comes by DLPack read-only
    assert same.flags.writeable and (same.ctypes.data, same.strides, same.dtype) == (view.ctypes.data, view.strides, view.dtype)
    if arena == "layer_major":  # what kernels without strides expect
        assert view.strides[1:] == np.empty(view.shape, view.dtype).strides[1:]
    if mode in oracle.QMAX:
        codes, scales = oracle.quantize(k, mode)
        np.testing.assert_array_equal(view[table[0]], codes[:16])
        np.testing.assert_array_equal(np.from_dlpack(tensors.k_scales)[table[0]], scales[:16])
    else:
        np.testing.assert_array_equal(view[table[0]].astype(np.float32), oracle.stored(k, mode)[:16])
        assert tensors.k_scales is None
    before = view[table[0]].copy()
    cache.grow_to_capacity(100_000)
    step(cache, [(s, 50)], layers=2)
    assert np.from_dlpack(cache.tensors(0).k).ctypes.data == view.ctypes.data
    np.testing.assert_array_equal(view[table[0]], before)
    cache.release(s)
    del tensors, cache, plan, s
    gc.collect()
    np.testing.assert_array_equal(view[table[0]], before)  # the view keeps the pool


def test_a_view_stays_readable_when_the_pool_gives_memory_back():
    cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, kv_quant="f32", num_blocks=16, dynamic=True, prefix_sharing=False)
    s = cache.start().sequence
    for _ in range(4):
        step(cache, [(s, 512)], kv_heads=8, d=128)
    view = np.from_dlpack(cache.tensors(0).k)
    cache.release(s)
    assert np.isfinite(view.sum())  # no part of it is gone


def test_growth_copies_nothing_and_is_counted():
    cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, kv_quant="f32", num_blocks=16, dynamic=True)
    s = cache.start().sequence
    _, (k, _) = step(cache, [(s, 1000)], kv_heads=8, d=128)
    stats = cache.stats()
    assert stats["growth_events"] >= 1 and stats["growth_bytes_copied"] == 0
    plan = cache.plan_read([(s, 1)])
    np.testing.assert_array_equal(cache.read_dense(plan, 0, 0)[0], k.transpose(1, 0, 2))


def test_out_of_room_names_need_and_have_and_changes_nothing():  # O-MEM-01
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=4, block_size=4, num_blocks=64, dynamic=False)
    s = cache.start().sequence
    n = 0
    with pytest.raises(pagedkv.CapacityError, match="need .* tokens .* have .* tokens"):
        while n < 10**6:
            with cache.reserve([(s, 1)]) as plan:
                pagedkv.append(plan, 0, rows(1, 1, 4), rows(1, 1, 4))
            n += 1
    assert n == cache.length(s) == cache.capacity == cache.committed_capacity and cache.available == 0
    cache.release(s)
    cache.clear_cached()
    assert cache.stats()["blocks_free"] * 4 == cache.capacity


@pytest.mark.parametrize("options,error", [
    ({"num_kv_heads": 2}, "head_dim"), ({"num_kv_heads": 0, "head_dim": 4}, "num_kv_heads"),
    ({"num_kv_heads": 2, "head_dim": 4, "num_q_heads": 3}, "3.*2"), ({"num_kv_heads": 2, "head_dim": 6, "kv_quant": "q6"}, "6"),
    ({"num_kv_heads": 2, "head_dim": 4, "num_blocks": 0}, "num_blocks is 0"),
    ({"num_kv_heads": 2, "head_dim": 4, "num_blocks": 2**31}, "num_blocks"),
    ({"num_kv_heads": 2, "head_dim": 4, "block_size": 0}, "block_size"),
    ({"num_kv_heads": 2, "head_dim": 4, "arena": "diagonal"}, "block_major, layer_major"),
    ({"num_kv_heads": 2, "head_dim": 4, "isa": "mmx"}, "mmx"),
    ({"num_kv_heads": 2, "head_dim": 4, "query_path": "f8"}, "f8"),
    ({"num_kv_heads": 2, "head_dim": 4, "num_layers": 0}, "num_layers is 0"),
    ({"num_kv_heads": 2, "head_dim": 4, "kv_quant": "q5"}, "q8, q6, q4"),
    ({"num_kv_heads": 2, "head_dim": 4, "groups": []}, "either groups"),
])
def test_options_that_can_never_work_are_refused_by_name(options, error):  # O-NUM-13
    with pytest.raises(ValueError, match=error):
        pagedkv.Cache(**options)


def test_merge_joins_partial_results_and_empty_ones():  # O-NUM-02
    k, v, q = rows(50, 2, 16), rows(50, 2, 16, seed=1), rows(1, 4, 16, seed=2)
    whole, whole_lse = oracle.attention(q, k, v)
    parts = [oracle.attention(q, k[begin:end], v[begin:end]) for begin, end in ((0, 20), (20, 50))]
    out, lse = pagedkv.merge(*(x.astype(np.float32) for part in parts for x in part))
    np.testing.assert_allclose(out, whole, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-5)
    assert pagedkv.merge_state is pagedkv.merge
    empty, none = np.zeros((1, 1, 4), np.float32), np.full((1, 1), -np.inf, np.float32)
    three, half = np.full((1, 1, 4), 3, np.float32), np.full((1, 1), 0.5, np.float32)
    for a, b in (((three, half), (empty, none)), ((empty, none), (three, half))):
        out, lse = pagedkv.merge(*a, *b)
        assert (out == 3).all() and (lse == 0.5).all()
    out, lse = pagedkv.merge(empty, none, empty, none)
    assert (out == 0).all() and (lse == -np.inf).all()
    with pytest.raises(ValueError, match="out_b"):
        pagedkv.merge(three, half, three[:, :, :2], half)


def test_rows_without_a_visible_key_are_impossible_in_a_cache_and_extreme_logits_are_not():  # O-NUM-04, O-NUM-05
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=4, kv_quant="f32", num_blocks=8)
    s = cache.start().sequence
    with cache.reserve([(s, 3)]) as plan:
        v = np.arange(1, 4, dtype=np.float32)[:, None, None] * np.ones((3, 1, 4), np.float32)
        pagedkv.append(plan, 0, np.full((3, 1, 4), -300, np.float32), v)
        out, lse = pagedkv.attend(plan, 0, np.full((3, 1, 4), 300, np.float32), return_lse=True)
    assert abs(out[2, 0, 0] - 2) < 1e-5 and abs(lse[2, 0] + 179998.90) < 0.05


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 256])
@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7])
def test_any_block_size_and_any_ratio_of_heads(block_size, ratio):  # O-NUM-10, O-NUM-12, O-NUM-14
    cache = pagedkv.Cache(num_kv_heads=4, head_dim=8, num_q_heads=4 * ratio, kv_quant="f32", block_size=block_size,
                          num_blocks=128)
    s = cache.start().sequence
    with cache.reserve([(s, 97)]) as plan:
        v = (np.arange(1, 5, dtype=np.float32)[None, :, None] * np.ones((97, 4, 8))).astype(np.float32)
        pagedkv.append(plan, 0, rows(97, 4, 8), v)
        out = pagedkv.attend(plan, 0, rows(97, 4 * ratio, 8))
    expected = np.arange(4 * ratio) // ratio + 1
    np.testing.assert_allclose(out, np.broadcast_to(expected[None, :, None], out.shape), rtol=1e-5)


@pytest.mark.parametrize("isa", ["scalar", ""])
def test_bits_do_not_depend_on_threads(isa):
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=8, kv_quant="q8", num_blocks=512, isa=isa)
    s = cache.start().sequence
    step(cache, [(s, 5000)])
    q, plan = rows(1, 8, 64), cache.plan_read([(s, 1)])
    threads = pagedkv.num_threads()
    try:
        results = []
        for n in (1, 2, 3, 7):
            pagedkv.set_num_threads(n)
            assert pagedkv.num_threads() == n
            results.append(pagedkv.attend(plan, 0, q))
        assert all((r == results[0]).all() for r in results)
        for n in (0, -1, 5000):
            with pytest.raises(ValueError, match=str(n)):
                pagedkv.set_num_threads(n)
    finally:
        pagedkv.set_num_threads(threads)


def test_numbers_of_blocks_past_32_bits_of_elements_reach_their_own_rows():  # O-NUM-07
    # 16 x 32 x 128 elements a block: 2^31 elements end at block 32,768. Only the touched pages take memory.
    cache = pagedkv.Cache(num_kv_heads=32, head_dim=128, kv_quant="off", num_blocks=32_770, prefix_sharing=False,
                          kv_memory=16 << 30)
    keys = cache.tensors(0).k
    view = np.asarray(keys)
    for block in (0, 32_767, 32_768, 32_769):
        view[block, 3, 5, 7] = block % 1000 + 1
    assert [view[block, 3, 5, 7] for block in (0, 32_767, 32_768, 32_769)] == [1, 768, 769, 770]
    q = np.zeros((1, 32, 128), np.float32)
    values = np.asarray(cache.tensors(0).v)
    for block in (32_767, 32_768, 32_769):
        values[block, 0] = block % 100
        out = pagedkv.paged_attention(q, view, values, np.array([[block]], np.int32),
                                      np.array([1], np.int32))
        assert (out == block % 100).all()


def test_a_full_window_names_what_makes_room():
    cache = pagedkv.Cache(num_kv_heads=1, head_dim=8, kv_quant="f32", sliding_window=64, prefix_sharing=False,
                          longest_chunk=64)
    first = cache.start().sequence
    rows = np.ones((64, 1, 8), np.float32)
    for _ in range(3):
        with cache.reserve([(first, 64)]) as plan:
            pagedkv.append(plan, 0, rows, rows)
    with pytest.raises(pagedkv.CapacityError, match="max_sequences 1, forks included, and longest_chunk 64: raise them"):
        for _ in range(200):
            with cache.reserve([(cache.fork(first), 1)]) as plan:
                pagedkv.append(plan, 0, rows[:1], rows[:1])


def test_resident_bytes_are_asked_for_or_left_out():
    cache = pagedkv.PagedKVCache()
    cache.update_without_fetch(np.ones((1, 1, 3, 8), np.float32), np.ones((1, 1, 3, 8), np.float32))
    assert "bytes_resident" not in cache.paged_stats()
    assert cache.paged_stats(resident=True)["bytes_resident"] > 0


def test_a_step_whose_layer_got_no_rows_is_not_committed():
    cache = pagedkv.Cache(num_layers=2, num_kv_heads=1, head_dim=8, kv_quant="f32", num_blocks=8)
    old = cache.start().sequence
    step(cache, [(old, list(range(16)))], layers=2, kv_heads=1, d=8)
    cache.release(old)
    new = cache.start().sequence
    plan = cache.reserve([(new, list(range(100, 116)))])
    pagedkv.append(plan, 0, rows(16, 1, 8), rows(16, 1, 8))
    with pytest.raises(ValueError, match="layer 1 got no rows in this step: append them, or abandon the step"):
        plan.commit()
    assert plan.open
    plan.commit([0])  # nothing is kept, nothing is missing
    with pytest.raises(ValueError, match="layer 0 got no rows"):
        with cache.reserve([(new, 3)]) as plan:
            pass
    assert not plan.open and cache.length(new) == 0
    assert cache.start(list(range(100, 116)) + [1]).reused == 0
    cache.verify()


def test_who_asks_for_slots_writes_them():
    cache = pagedkv.Cache(num_layers=1, num_kv_heads=1, head_dim=8, kv_quant="f32", num_blocks=8)
    s, k = cache.start().sequence, rows(5, 1, 8)
    tensors = cache.tensors(0)
    with cache.reserve([(s, 5)]) as plan:
        pagedkv.reshape_and_cache(k, k, np.asarray(tensors.k), np.asarray(tensors.v), plan.slot_mapping())
    np.testing.assert_array_equal(cache.read_dense(cache.plan_read([(s, 1)]), 0, 0)[0][0], k[:, 0])


def test_a_handle_of_a_dead_cache_is_of_no_other():
    def make():
        return pagedkv.Cache(num_kv_heads=1, head_dim=8, num_blocks=2)

    for _ in range(20):
        cache = make()
        sequence = cache.start().sequence
        del cache
        other = make()  # often at the same address
        other.start()
        with pytest.raises(ValueError, match="of another cache"):
            other.length(sequence)
