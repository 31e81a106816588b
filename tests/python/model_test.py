"""Random operations on caches against a plain list of rows."""

import numpy as np
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

import oracle
import pagedkv

HEADS, DIM = 2, 8


def rows_of(ids):
    """K rows that depend on the token and its place alone, so that sharing a prefix is right exactly when tokens agree."""
    out = np.empty((len(ids), HEADS, DIM), np.float32)
    for place, token in enumerate(ids):
        out[place] = np.random.default_rng((place, token)).standard_normal((HEADS, DIM), np.float32)
    return out


class CacheAgainstAList(RuleBasedStateMachine):
    """A Cache beside {sequence: token ids}. Every rule is an operation; invariants look at all of it."""

    sequences = Bundle("sequences")

    @initialize(mode=st.sampled_from(["f32", "q8", "q4"]), block_size=st.sampled_from([1, 3, 4]),
                num_blocks=st.integers(8, 40), arena=st.sampled_from(["block_major", "layer_major"]))
    def create(self, mode, block_size, num_blocks, arena):
        self.mode = mode
        self.cache = pagedkv.Cache(num_kv_heads=HEADS, head_dim=DIM, num_q_heads=4, kv_quant=mode,
                                   block_size=block_size, num_blocks=num_blocks, arena=arena, kv_memory=64 << 20)
        self.model = {}

    @rule(target=sequences, ids=st.lists(st.integers(0, 2), max_size=30))
    def start(self, ids):
        started = self.cache.start(ids)
        assert started.reused < max(1, len(ids))
        self.model[started.sequence] = ids[:started.reused]
        if started.reused < len(ids):
            self.grow({started.sequence: ids[started.reused:]})
        return started.sequence

    @rule(chosen=st.lists(sequences, min_size=1, max_size=3, unique=True), data=st.data())
    def append(self, chosen, data):
        chosen = [s for s in chosen if s in self.model]
        self.grow({s: data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=12)) for s in chosen},
                  accepted=data.draw(st.none() | st.just("some")), draw=data.draw)

    def grow(self, new, accepted=None, draw=None):
        if not new:
            return
        try:
            plan = self.cache.reserve([(s, ids) for s, ids in new.items()])
        except pagedkv.CapacityError:
            return
        k = np.concatenate([rows_of(self.model[s] + ids)[len(self.model[s]):] for s, ids in new.items()])
        pagedkv.append(plan, 0, k, -k)
        counts = None
        if accepted:
            counts = [draw(st.integers(0, len(ids))) for ids in new.values()]
        plan.commit(counts)
        for i, (s, ids) in enumerate(new.items()):
            self.model[s] = self.model[s] + (ids if counts is None else ids[:counts[i]])

    @rule(s=sequences, ids=st.lists(st.integers(0, 2), min_size=1, max_size=12))
    def abandon(self, s, ids):
        if s not in self.model:
            return
        try:
            plan = self.cache.reserve([(s, ids)])
        except pagedkv.CapacityError:
            return
        k = rows_of(ids) * 1e3  # must never be seen
        pagedkv.append(plan, 0, k, k)
        plan.abandon()

    @rule(target=sequences, s=sequences)
    def fork(self, s):
        if s not in self.model:
            return s
        child = self.cache.fork(s)
        self.model[child] = list(self.model[s])
        return child

    @rule(s=sequences, data=st.data())
    def truncate(self, s, data):
        if s not in self.model:
            return
        n = data.draw(st.integers(0, len(self.model[s])))
        self.cache.truncate(s, n)
        self.model[s] = self.model[s][:n]
        with pytest.raises(ValueError):
            self.cache.truncate(s, n + 1)

    @rule(s=consumes(sequences))
    def release(self, s):
        if self.model.pop(s, None) is not None:
            self.cache.release(s)
        with pytest.raises(pagedkv.StaleError):
            self.cache.length(s)

    @rule()
    def clear_cached(self):
        self.cache.clear_cached()
        assert self.cache.stats()["blocks_cached"] == 0

    @invariant()
    def content_and_attention_are_the_lists(self):
        if not hasattr(self, "model"):
            return
        self.cache.verify()
        stats = self.cache.stats()
        assert stats["blocks_total"] == sum(stats[f"blocks_{state}"] for state in ("free", "open", "full", "shared", "cached"))
        assert 0 <= stats["block_utilization"] <= 1 and stats["tokens"] == sum(map(len, self.model.values()))
        for s, ids in self.model.items():
            assert self.cache.length(s) == len(ids)
            if not ids:
                continue
            plan = self.cache.plan_read([(s, 1)])
            k = oracle.stored(rows_of(ids), self.mode)
            keys, values = self.cache.read_dense(plan, 0, 0)
            np.testing.assert_array_equal(keys.transpose(1, 0, 2), k)
            np.testing.assert_array_equal(values, -keys)
            q = rows_of([7, 7])[:1].repeat(2, 1)
            expected, _ = oracle.attention(q, k, -k)
            np.testing.assert_allclose(pagedkv.attend(plan, 0, q), expected, rtol=0,
                                       atol=oracle.TOLERANCE[self.mode] * 4)


CacheAgainstAList.TestCase.settings = settings(max_examples=200, stateful_step_count=30)
test_a_cache_behaves_as_a_list_of_rows = CacheAgainstAList.TestCase


class PagedKVCacheAgainstAList(RuleBasedStateMachine):
    """The article's object beside a plain array."""

    caches = Bundle("caches")

    @initialize(target=caches, mode=st.sampled_from(["f32", "off", "q8", "q6", "q4"]), block_size=st.sampled_from([1, 5, 16]),
                dynamic=st.booleans(), batch=st.integers(1, 3))
    def create(self, mode, block_size, dynamic, batch):
        self.mode, self.batch = mode, batch
        self.next = 0
        cache = pagedkv.PagedKVCache(block_size=block_size, num_blocks=12, kv_quant_config=mode, dynamic=dynamic)
        self.model = {id(cache): (cache, np.zeros((batch, HEADS, 0, DIM), np.float32))}
        return cache

    def fresh(self, n):
        self.next += 1
        return np.random.default_rng(self.next).standard_normal((self.batch, HEADS, n, DIM), np.float32)

    @rule(cache=caches, n=st.integers(0, 30))
    def update(self, cache, n):
        rows, (_, held) = self.fresh(n), self.model[id(cache)]
        try:
            cache.update_without_fetch(rows, -rows)
        except pagedkv.CapacityError:
            assert not cache.dynamic
            return
        self.model[id(cache)] = (cache, np.concatenate([held, oracle.stored(rows, self.mode)], 2))

    @rule(cache=caches, n=st.integers(-2, 40))
    def trim(self, cache, n):
        _, held = self.model[id(cache)]
        removed = cache.trim(n)
        assert removed == max(0, min(n, held.shape[2]))
        self.model[id(cache)] = (cache, held[:, :, :held.shape[2] - removed])

    @rule(target=caches, cache=caches)
    def fork(self, cache):
        child = cache.fork()
        self.model[id(child)] = (child, self.model[id(cache)][1])
        return child

    @rule(cache=caches)
    def through_state(self, cache):
        cache.state = cache.state  # decoded and stored again: the same values

    @invariant()
    def content_is_the_array(self):
        for cache, held in getattr(self, "model", {}).values():
            assert cache.offset == held.shape[2] == cache.size() and cache.empty() == (held.shape[2] == 0)
            assert cache.capacity >= cache.offset
            if cache.keys is not None:
                np.testing.assert_allclose(cache.keys, held, rtol=3e-7)
                np.testing.assert_allclose(cache.values, -held, rtol=3e-7)


PagedKVCacheAgainstAList.TestCase.settings = settings(max_examples=200, stateful_step_count=25)
test_a_paged_kv_cache_behaves_as_an_array = PagedKVCacheAgainstAList.TestCase
