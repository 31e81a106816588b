"""vLLM's and FlashInfer's forms over block tensors of the caller's own."""

import numpy as np
import pytest

import oracle
import pagedkv


def rows(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


class Pool:
    """Block tensors as an engine has them, and a table for each sequence; blocks are scattered on purpose."""

    def __init__(self, mode="f32", num_blocks=64, block_size=16, heads=2, d=64, seed=0):
        dtype, width = {"f32": (np.float32, d), "f16": (np.float16, d), "q8": (np.int8, d),
                        "q6": (np.uint8, d * 3 // 4), "q4": (np.uint8, (d + 1) // 2)}[mode]
        # What nobody wrote is poison: reading it would show.
        fill = np.nan if dtype in (np.float32, np.float16) else 85
        self.k, self.v = (np.full((num_blocks, block_size, heads, width), fill, dtype) for _ in range(2))
        self.scales = {}
        if mode in oracle.QMAX:
            self.scales = {name: np.full((num_blocks, block_size, heads, 1), np.nan, np.float32)
                           for name in ("key_scales", "value_scales")}
        self.mode, self.block_size, self.heads, self.d = mode, block_size, heads, d
        self.free = list(np.random.default_rng(seed).permutation(num_blocks))
        self.tables, self.rows_k, self.rows_v = [], [], []

    def add(self, length, seed=0):
        table = [int(self.free.pop()) for _ in range(-(-length // self.block_size))]
        slots = np.array([table[p // self.block_size] * self.block_size + p % self.block_size for p in range(length)],
                         np.int64)
        k, v = rows(length, self.heads, self.d, seed=seed), rows(length, self.heads, self.d, seed=seed + 1)
        pagedkv.reshape_and_cache(k, v, self.k, self.v, slots, **self.scales)
        self.tables.append(table), self.rows_k.append(k), self.rows_v.append(v)

    def vllm(self):
        widest = max(map(len, self.tables))
        tables = np.full((len(self.tables), widest), 10**6, np.int32)  # unused places are ignored
        for row, table in zip(tables, self.tables):
            row[:len(table)] = table
        return {"block_tables": tables, "seq_lens": np.array([len(k) for k in self.rows_k], np.int32)}

    def flashinfer(self):
        lengths = [len(k) for k in self.rows_k]
        return {"kv_indptr": np.cumsum([0] + [len(t) for t in self.tables]).astype(np.int32),
                "kv_indices": np.array([b for t in self.tables for b in t], np.int32),
                "kv_last_page_len": np.array([(n - 1) % self.block_size + 1 if n else 0 for n in lengths], np.int32)}

    def expected(self, q, counts, **options):
        starts = np.cumsum([0] + counts)
        parts = [oracle.attention(q[a:b], oracle.stored(k, self.mode), oracle.stored(v, self.mode), **options)
                 for a, b, k, v in zip(starts, starts[1:], self.rows_k, self.rows_v)]
        return tuple(np.concatenate(part) for part in zip(*parts))


@pytest.mark.parametrize("mode", ["f32", "f16", "q8", "q6", "q4"])
@pytest.mark.parametrize("form", ["vllm", "flashinfer"])
def test_both_table_forms_agree_with_double(mode, form):
    pool = Pool(mode)
    for i, length in enumerate((1, 16, 300, 33)):
        pool.add(length, seed=10 * i)
    counts = [1, 3, 1, 20]
    q = rows(sum(counts), 6, 64, seed=99)
    starts = np.cumsum([0] + counts).astype(np.int32)
    out, lse = pagedkv.paged_attention(q, pool.k, pool.v, **getattr(pool, form)(), cu_seqlens_q=starts, return_lse=True,
                                       **pool.scales)
    expected, expected_lse = pool.expected(q, counts)
    tolerance = oracle.TOLERANCE[mode]
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * np.abs(expected).max())
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=20 * tolerance)


def test_positional_arguments_are_vllms():
    pool = Pool()
    pool.add(40)
    q = rows(1, 2, 64)
    tables = pool.vllm()
    out = pagedkv.paged_attention(q, pool.k, pool.v, tables["block_tables"], tables["seq_lens"],
                                  np.array([0, 1], np.int32), scale=0.2)
    np.testing.assert_allclose(out, pool.expected(q, [1], scale=0.2)[0], atol=3e-6)


@pytest.mark.parametrize("mode", ["f32", "q8", "q4"])
def test_bits_are_those_of_a_cache_with_the_same_rows(mode):
    pool = Pool(mode)
    pool.add(700)
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=8, kv_quant=mode, num_blocks=64)
    q = rows(1, 8, 64, seed=5)
    s = cache.start().sequence
    with cache.reserve([(s, 700)]) as plan:
        pagedkv.append(plan, 0, pool.rows_k[0], pool.rows_v[0])
    expected = pagedkv.attend(cache.plan_read([(s, 1)]), 0, q)
    np.testing.assert_array_equal(
        pagedkv.paged_attention(q, pool.k, pool.v, **pool.vllm(), **pool.scales), expected)


def test_a_caches_own_tensors_can_be_read_by_tables():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=4, kv_quant="q8", num_blocks=64)
    with cache.reserve([(cache.start().sequence, 100)]) as plan:
        pagedkv.append(plan, 0, rows(100, 2, 64), rows(100, 2, 64, seed=1))
        q = rows(100, 4, 64, seed=2)
        expected, tensors = pagedkv.attend(plan, 0, q), cache.tensors(0)
        out = pagedkv.paged_attention(q, tensors.k, tensors.v, plan.block_tables(), plan.seq_lens,
                                      plan.query_start_loc, key_scales=tensors.k_scales, value_scales=tensors.v_scales)
    np.testing.assert_array_equal(np.from_dlpack(out), expected)


def test_slots_of_minus_one_are_skipped_and_strided_tensors_are_written_where_they_lie():
    whole = np.zeros((2, 4, 8, 3, 16), np.float32)  # keys and values in one array, as some engines have them
    k = rows(3, 3, 16)
    pagedkv.reshape_and_cache(k, 2 * k, whole[0], whole[1], [9, -1, 30])
    np.testing.assert_array_equal(whole[0, 1, 1], k[0])
    np.testing.assert_array_equal(whole[1, 3, 6], 2 * k[2])
    assert np.count_nonzero(whole) == 4 * 3 * 16
    heads_first = np.zeros((4, 3, 8, 16), np.float32).transpose(0, 2, 1, 3)
    pagedkv.reshape_and_cache(k, k, heads_first, whole[1], [0, 1, 2])
    np.testing.assert_array_equal(heads_first[0, :3], k)


@pytest.mark.parametrize("slots", [[0, 1, 1024], [0, -2, 1], [2**40, 0, 1]])
def test_a_slot_that_is_not_there_is_refused_before_anything_is_written(slots):  # O-MEM-11
    pool = Pool()
    with pytest.raises(ValueError, match="slot .* have 1024"):
        pagedkv.reshape_and_cache(rows(3, 2, 64), rows(3, 2, 64), pool.k, pool.v, slots)
    assert np.isnan(pool.k).all()


@pytest.mark.parametrize("bad", [-1, 64, 99, 2**31 - 1])
def test_a_block_that_is_not_there_is_refused_with_its_place(bad):  # O-MEM-11
    pool = Pool()
    pool.add(40)
    tables = pool.vllm()
    tables["block_tables"][0, 1] = bad
    with pytest.raises(ValueError, match=rf"block_tables\[0, 1\] is {bad}, the arrays have 64"):
        pagedkv.paged_attention(rows(1, 2, 64), pool.k, pool.v, **tables)


@pytest.mark.parametrize("change,error", [
    ({"seq_lens": np.array([49], np.int32)}, "49 tokens: 4 blocks, its table row has 3"),
    ({"seq_lens": np.array([-1], np.int32)}, "-1 tokens"),
    ({"seq_lens": None}, "missing"), ({"block_tables": None}, "missing"),
    ({"seq_lens": np.array([40, 40], np.int32)}, "block_tables is"),
    ({"cu_seqlens_q": [0, 2]}, "cu_seqlens_q runs from 0 to 2"), ({"cu_seqlens_q": [1, 1]}, "cu_seqlens_q"),
    ({"cu_seqlens_q": [0, 0, 1]}, "cu_seqlens_q is"), ({"kv_indptr": [0, 1]}, "either block_tables"),
    ({"key_scales": np.ones((64, 16, 2, 1), np.float32)}, "rows have none"),
    ({"sinks": np.ones(3, np.float32)}, "sinks"), ({"query_path": "f8"}, "f8"),
])
def test_tables_that_contradict_themselves_are_refused(change, error):
    pool = Pool()
    pool.add(40)
    with pytest.raises(ValueError, match=error):
        pagedkv.paged_attention(rows(1, 2, 64), pool.k, pool.v, **{**pool.vllm(), **change})


@pytest.mark.parametrize("change", [
    {"kv_indptr": [0, 4]}, {"kv_indptr": [2, 1]}, {"kv_indptr": [-1, 3]}, {"kv_last_page_len": [0]},
    {"kv_last_page_len": [17]}, {"kv_indices": None},
])
def test_flat_tables_that_contradict_themselves_are_refused(change):
    pool = Pool()
    pool.add(40)
    with pytest.raises(ValueError, match="kv_"):
        pagedkv.paged_attention(rows(1, 2, 64), pool.k, pool.v, **{**pool.flashinfer(), **change})


def test_tensors_that_contradict_each_other_are_refused():
    pool, q8 = Pool(), Pool("q8")
    pool.add(40), q8.add(40)
    q = rows(1, 2, 64)
    for k, v, extra, error, match in (
        (pool.k[..., :32], pool.v, {}, ValueError, "keys is"), (pool.k, pool.v[:32], {}, ValueError, "values is"),
        (pool.k, pool.v[:, :, :1], {}, ValueError, "values is"), (np.zeros(pool.k.shape, np.int16), pool.v, {}, TypeError, "int8"),
        (pool.k[0], pool.v, {}, ValueError, "key_cache"), (q8.k, q8.v, {}, ValueError, "key_scales are needed"),
        (q8.k, q8.v, {"key_scales": q8.scales["key_scales"], "value_scales": np.ones((64, 16, 1, 1), np.float32)},
         ValueError, "value scales"),
        (pool.k[..., ::2], pool.v, {}, ValueError, "keys"), (None, pool.v, {}, TypeError, "key_cache"),
    ):
        with pytest.raises(error, match=match):
            pagedkv.paged_attention(q, k, v, **pool.vllm(), **extra)
    with pytest.raises(ValueError, match="3 query heads are no multiple of 2"):
        pagedkv.paged_attention(rows(1, 3, 64), pool.k, pool.v, **pool.vllm())


def test_rows_without_keys_give_zero_and_minus_infinity():  # O-NUM-01, O-NUM-03
    k = np.zeros((3, 4, 1, 4), np.float32)
    v = np.zeros_like(k)
    k[0, :1], v[0, :1] = 1, 1
    v[1, :4, 0] = np.arange(1, 5)[:, None]
    out, lse = pagedkv.paged_attention(np.zeros((3, 1, 4), np.float32), k, v, np.array([[1], [0], [0]], np.int32),
                                  np.array([4, 0, 1], np.int32), return_lse=True)
    assert out[:, 0, 0].tolist() == [2.5, 0, 1] and lse[1] == -np.inf


def test_queries_are_among_the_keys():
    k = np.zeros((1, 4, 1, 4), np.float32)
    with pytest.raises(ValueError, match="sequence 0 has 3 queries and 2 keys, which include the queries' own"):
        pagedkv.paged_attention(np.ones((3, 1, 4), np.float32), k, k, np.zeros((1, 1), np.int32), [2], [0, 3])


def test_a_window_needs_no_blocks_behind_it():
    pool = Pool()
    pool.add(100)
    q, tables = rows(1, 2, 64), pool.vllm()
    expected = pool.expected(q, [1], window=20)[0]
    np.testing.assert_allclose(pagedkv.paged_attention(q, pool.k, pool.v, **tables, sliding_window=20), expected, atol=3e-6)
    tables["block_tables"][0, :4] = -1  # given back
    np.testing.assert_allclose(pagedkv.paged_attention(q, pool.k, pool.v, **tables, sliding_window=20), expected, atol=3e-6)
    with pytest.raises(ValueError, match="is -1"):
        pagedkv.paged_attention(q, pool.k, pool.v, **tables)


def test_rows_that_are_not_finite_are_named():
    pool = Pool()
    k = rows(3, 2, 64)
    k[2, 1, 0] = np.inf
    with pytest.raises(pagedkv.NotFiniteError, match="KV head 1, token 2"):
        pagedkv.reshape_and_cache(k, rows(3, 2, 64), pool.k, pool.v, [0, 1, 2])


def test_no_sequences_give_no_rows():
    pool = Pool()
    out = pagedkv.paged_attention(rows(0, 2, 64), pool.k, pool.v, np.zeros((0, 1), np.int32), np.zeros(0, np.int32))
    assert out.shape == (0, 2, 64)
    pagedkv.reshape_and_cache(rows(0, 2, 64), rows(0, 2, 64), pool.k, pool.v, np.zeros(0, np.int64))


def test_rows_past_the_slots_are_padding():
    k, v = np.zeros((2, 4, 2, 8), np.float32), np.zeros((2, 4, 2, 8), np.float32)
    new = rows(5, 2, 8)
    new[3:] = np.nan
    pagedkv.reshape_and_cache(new, new, k, v, [4, 5, 6])
    np.testing.assert_array_equal(k[1, :3], new[:3])
    assert not k[1, 3].any() and not k[0].any()
    with pytest.raises(ValueError, match="key has 2 rows, slot_mapping 3 slots"):
        pagedkv.reshape_and_cache(new[:2], new[:2], k, v, [4, 5, 6])
