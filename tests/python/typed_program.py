"""Every documented call of the package, for type checkers: tools/types. Nothing runs it."""

import numpy as np

import pagedkv

k = np.ones((5, 2, 64), np.float32)
cache = pagedkv.Cache(num_layers=1, num_kv_heads=2, head_dim=64, num_q_heads=4, kv_quant="q8", dynamic=True)
mixed = pagedkv.Cache([pagedkv.Group(layers=[0], num_kv_heads=2, head_dim=64, kv_quant=pagedkv.PagedKVQuantConfig("q8:q4"))])
started = cache.start([1, 2, 3, 4, 5], name_space="a")
sequence, reused, reason = started
with cache.reserve([(sequence, [1, 2, 3, 4, 5])]) as plan:
    pagedkv.append(plan, 0, k, k)
    q = np.ones((5, 4, 64), np.float32)
    out = pagedkv.attend(plan, 0, q, scale=0.1, softcap=30, sliding_window=4)
    print(out.shape, plan.n_tokens, plan.seq_lens.tolist(), plan.slot_mapping().tolist(), plan.block_tables(0).shape)
    out, lse = pagedkv.attend(plan, 0, q, return_lse=True)
    out, lse = pagedkv.merge(out, lse, out, lse)
twin = cache.fork(sequence)
cache.truncate(twin, 3)
print(cache.length(twin), cache.blocks_held(twin), cache.capacity, cache.stats()["sequences"], cache.groups[0].layers)
keys, values = cache.read_dense(cache.plan_read([(twin, 1)]), 0, 0)
tensors = cache.tensors(0)
view = np.from_dlpack(tensors.k)
np.asarray(tensors.k)[0] = 0
cache.release(twin)
try:
    cache.reserve([(sequence, 10**9)])
except pagedkv.CapacityError as error:
    print(str(error))
blocks = np.zeros((4, 16, 2, 64), np.float32)
pagedkv.reshape_and_cache(k, k, blocks, blocks, np.arange(5))
out = pagedkv.paged_attention(q[:1], blocks, blocks, np.zeros((1, 1), np.int32), [5], scale=0.1)
codes, scales = pagedkv.quantize_symmetric(k, "q4")
print(pagedkv.dequantize_symmetric(codes, scales, 64, "q4").shape, pagedkv.bytes_per_token("q8", 2, 64))
pagedkv.set_num_threads(pagedkv.num_threads())
article = pagedkv.PagedKVCache(block_size=16, num_blocks=64, kv_quant_config=pagedkv.PagedKVQuantConfig("q8"), dynamic=True)
article.update_without_fetch(k[None], k[None])
dense_keys, dense_values = article.update_and_fetch(k[None], k[None])
print(article.paged_attention(k[None], mask="causal").shape, article.offset, article.paged_stats()["capacity"], dense_keys.shape)
article.trim(1)
copy = article.fork()
keys, values = copy.state


def ask(path: str) -> None:
    with pagedkv.LLM(path, kv_quant="q8", num_blocks=64) as llm:
        answer = llm.generate("Once", max_tokens=3, temperature=0.0, stop=["."], logit_bias={3: 1.0})
        print(answer.text.upper(), answer.usage["cached_tokens"])
        for piece in llm.generate("Once", stream=True):
            print(piece.upper())
        stream = llm.chat([{"role": "user", "content": "Hi"}], stream=True)
        print(stream.finish_reason, llm.chat("Hi").text, llm.tokenize("x")[0] + 1, llm.detokenize([1]).upper())
        for one in llm.generate(["a", "b"], max_tokens=2):
            print(one.text)
        print(llm.stats()["running"], llm.info["n_layers"])
