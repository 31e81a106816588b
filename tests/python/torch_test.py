"""Tensors at the border, torch's threads, and the operators under torch.compile."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import oracle  # noqa: E402
import pagedkv  # noqa: E402
import pagedkv.torch  # noqa: E402
import process  # noqa: E402


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(2)


def a_step(cache, n=20, heads=2, d=32, dtype=torch.float32):
    plan = cache.reserve([(cache.start().sequence, n)])
    k, v = torch.randn(n, heads, d, dtype=dtype), torch.randn(n, heads, d, dtype=dtype)
    pagedkv.append(plan, 0, k, v)
    return plan, k, v


def test_tensors_go_in_and_come_out_without_a_copy():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_q_heads=4, kv_quant="f32", num_blocks=16)
    plan, k, v = a_step(cache)
    q = torch.randn(20, 4, 32)
    out = pagedkv.attend(plan, 0, q)
    assert isinstance(out, torch.Tensor) and out.dtype == torch.float32
    np.testing.assert_allclose(out.numpy(), oracle.attention(q.numpy(), k.numpy(), v.numpy())[0], atol=3e-6)
    given = torch.empty(20, 4, 32)
    assert pagedkv.attend(plan, 0, q, out=given) is given and torch.equal(given, out)
    assert cache.stats()["arrays"] == {"zero_copy": 5, "copied": {}}


def test_bfloat16_keys_and_values_are_read_and_viewed_without_a_copy():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, kv_quant="bf16", num_blocks=16)
    plan, k, _ = a_step(cache, dtype=torch.bfloat16)
    view = torch.from_dlpack(cache.tensors(0).k)
    assert view.dtype == torch.bfloat16 and torch.equal(view[plan.block_tables()[0, 0]], k[:16])
    assert cache.stats()["arrays"]["copied"] == {}
    out = pagedkv.attend(plan, 0, torch.randn(20, 2, 32, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16


def test_views_of_the_pool_are_written_through():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_q_heads=2, kv_quant="f32", num_blocks=16)
    plan, _, _ = a_step(cache)
    torch.from_dlpack(cache.tensors(0).v).fill_(3)
    assert torch.allclose(pagedkv.attend(plan, 0, torch.randn(20, 2, 32)), torch.tensor(3.0))


def test_a_batch_comes_back_in_its_own_axes():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    k, q = torch.randn(2, 2, 9, 16), torch.randn(2, 4, 3, 16)
    keys, _ = cache.update_and_fetch(k, k)
    assert torch.equal(keys, k) and cache.paged_attention(q).shape == q.shape
    halves = pagedkv.PagedKVCache()
    keys, _ = halves.update_and_fetch(k.to(torch.bfloat16), k.to(torch.bfloat16))
    assert keys.dtype == torch.bfloat16


def test_a_mask_tensor_is_answered_too():
    cache = pagedkv.PagedKVCache(kv_quant_config="f32")
    cache.update_without_fetch(torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16))
    q = torch.randn(1, 4, 9, 16)
    with pytest.warns(RuntimeWarning, match="dense"):
        out = cache.paged_attention(q, mask=torch.ones(9, 9).tril().bool())
    assert torch.allclose(out, cache.paged_attention(q), atol=1e-6)


def test_what_requires_gradients_is_refused_with_the_way_out():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_q_heads=2, num_blocks=16)
    plan, _, _ = a_step(cache)
    with pytest.raises(RuntimeError, match="no backward.*detach"):
        pagedkv.attend(plan, 0, torch.randn(20, 2, 32, requires_grad=True))


def test_tensors_elsewhere_are_refused_by_their_place():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_blocks=16)
    plan, _, _ = a_step(cache)
    with pytest.raises(TypeError, match="q is a Tensor"):
        pagedkv.attend(plan, 0, torch.empty(20, 2, 32, device="meta"))


def test_tensors_whose_memory_is_not_their_values_are_refused_and_subclasses_are_read():
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=32, num_blocks=16)
    plan, _, _ = a_step(cache)
    q = torch.randn(20, 2, 32)
    for wrong, error, text in ((torch._neg_view(q), ValueError, "resolve_neg"),
                               (q.to_sparse(), TypeError, "q is a Tensor"),
                               (torch.complex(q, q).conj(), TypeError, "complex64"),
                               (torch.float32, TypeError, "q is a dtype")):
        with pytest.raises(error, match=text):
            pagedkv.attend(plan, 0, wrong)
    subclass = type("Subclass", (torch.Tensor,), {})
    assert torch.equal(torch.as_tensor(pagedkv.attend(plan, 0, q.as_subclass(subclass))), pagedkv.attend(plan, 0, q))


# --- the operators -----------------------------------------------------------------------------------------------------


def a_pool(mode="f32", d=32):
    dtype, width = {"f32": (torch.float32, d), "bf16": (torch.bfloat16, d), "q8": (torch.int8, d),
                    "q4": (torch.uint8, d // 2)}[mode]
    caches = [torch.zeros(16, 4, 2, width, dtype=dtype) for _ in range(2)]
    scales = [torch.ones(16, 4, 2, 1) for _ in range(2)] if mode in ("q8", "q4") else [None, None]
    return caches, scales


@pytest.mark.parametrize("mode", ["f32", "bf16", "q8", "q4"])
def test_operators_pass_torchs_own_checks(mode):
    (k_cache, v_cache), (k_scales, v_scales) = a_pool(mode)
    key, value, slots = torch.randn(6, 2, 32), torch.randn(6, 2, 32), torch.arange(6)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(pagedkv.torch.reshape_and_cache, (key, value, k_cache, v_cache, slots, k_scales, v_scales),
                          test_utils=tests)
    pagedkv.torch.reshape_and_cache(key, value, k_cache, v_cache, slots, k_scales, v_scales)
    tables, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
    args = (torch.randn(1, 4, 32), k_cache, v_cache, tables, lengths, None, 0.2, k_scales, v_scales)
    for operator in (torch.ops.pagedkv.paged_attention.default, torch.ops.pagedkv.paged_attention_lse.default):
        torch.library.opcheck(operator, args, test_utils=tests)
    if mode in ("q8", "q4"):
        torch.library.opcheck(pagedkv.torch.quantize_symmetric, (key, mode), test_utils=tests)
        codes, scales = pagedkv.torch.quantize_symmetric(key, mode)
        torch.library.opcheck(pagedkv.torch.dequantize_symmetric, (codes, scales, 32, mode), test_utils=tests)
    states = torch.randn(5, 2, 8), torch.randn(5, 2), torch.randn(5, 2, 8), torch.randn(5, 2)
    torch.library.opcheck(pagedkv.torch.merge, states, test_utils=tests)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_layer_compiles_into_one_graph(backend):
    (k_cache, v_cache), (k_scales, v_scales) = a_pool("q8")

    def layer(x, slots, tables, lengths):
        q, k, v = x, x[:, :2] * 2, x[:, 2:] + 1
        torch.ops.pagedkv.reshape_and_cache(k, v, k_cache, v_cache, slots, k_scales, v_scales)
        return torch.ops.pagedkv.paged_attention(q, k_cache, v_cache, tables, lengths, key_scales=k_scales,
                                                 value_scales=v_scales).relu()

    x, tables = torch.randn(1, 4, 32), torch.tensor([[3]], dtype=torch.int32)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for position in range(3):
        args = x + position, torch.tensor([12 + position]), tables, torch.tensor([position + 1], dtype=torch.int32)
        torch.testing.assert_close(compiled(*args), layer(*args))


LENGTHS, QUERIES = (9, 1, 17), (1, 1, 5)
FORMS = {
    "block_tables": dict(block_tables=torch.tensor([[2, 0, 5, -1, -1], [7, -1, -1, -1, -1], [1, 3, 4, 6, 8]], dtype=torch.int32),
                         seq_lens=torch.tensor(LENGTHS, dtype=torch.int32)),
    "indptr": dict(kv_indptr=torch.tensor([0, 3, 4, 9], dtype=torch.int32),
                   kv_indices=torch.tensor([2, 0, 5, 7, 1, 3, 4, 6, 8], dtype=torch.int32),
                   kv_last_page_len=torch.tensor([1, 1, 1], dtype=torch.int32)),
}


def a_filled_pool(mode, d_v):
    """Block tensors with rows of LENGTHS where FORMS says, their scales, and the rows."""
    (k_cache, _), (k_scales, v_scales) = a_pool(mode)
    v_cache = a_pool(mode, d_v)[0][1]
    blocks, rows = FORMS["indptr"]["kv_indices"], []
    for n, first in zip(LENGTHS, FORMS["indptr"]["kv_indptr"].tolist()):
        k, v = torch.randn(n, 2, 32), torch.randn(n, 2, d_v)
        slots = torch.tensor([int(blocks[first + p // 4]) * 4 + p % 4 for p in range(n)])
        pagedkv.torch.reshape_and_cache(k, v, k_cache, v_cache, slots, k_scales, v_scales)
        rows.append((k, v))
    return k_cache, v_cache, dict(key_scales=k_scales, value_scales=v_scales), rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode, d_v", [("f32", 32), ("f32", 16), ("bf16", 48), ("q8", 16), ("q4", 64)])
def test_attention_in_every_form_agrees_with_double(mode, d_v, form):
    k_cache, v_cache, scales, rows = a_filled_pool(mode, d_v)
    q = torch.randn(sum(QUERIES), 4, 32)
    starts = [0, 1, 2, 7]
    options = FORMS[form] | scales | dict(cu_seqlens_q=torch.tensor(starts, dtype=torch.int32), head_dim_v=d_v, scale=0.3,
                                          softcap=5.0, sliding_window=11)
    out, lse = pagedkv.torch.paged_attention(q, k_cache, v_cache, return_lse=True, **options)
    assert torch.equal(pagedkv.torch.paged_attention(q, k_cache, v_cache, **options), out)
    for (k, v), a, b in zip(rows, starts, starts[1:]):
        expected, expected_lse = oracle.attention(q[a:b].numpy(), oracle.stored(k.numpy(), mode),
                                                  oracle.stored(v.numpy(), mode), scale=0.3, window=11, softcap=5.0)
        tolerance = oracle.TOLERANCE[mode]
        np.testing.assert_allclose(out[a:b], expected, rtol=0, atol=tolerance * np.abs(expected).max())
        np.testing.assert_allclose(lse[a:b], expected_lse, rtol=0, atol=20 * tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles_into_one_graph(form):
    k_cache, v_cache, scales, _ = a_filled_pool("q8", 16)
    options = FORMS[form] | scales | dict(head_dim_v=16)

    def halves(q):
        out, lse = pagedkv.torch.paged_attention(q * 2, k_cache, v_cache, return_lse=True, **options)
        return pagedkv.torch.merge(out, lse, out, lse)[0] + pagedkv.torch.paged_attention(q, k_cache, v_cache, **options)

    q = torch.randn(3, 4, 32)
    torch.library.opcheck(torch.ops.pagedkv.paged_attention_lse.default, (q, k_cache, v_cache), options,
                          test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
    torch.testing.assert_close(torch.compile(halves, backend="aot_eager", fullgraph=True)(q), halves(q))


def test_half_a_form_is_refused_by_the_operators_as_by_the_function():
    k_cache, v_cache, _, _ = a_filled_pool("f32", 32)
    q = torch.randn(3, 4, 32)
    for given, text in ((FORMS["indptr"] | FORMS["block_tables"], "either block_tables"), ({}, "either block_tables|missing"),
                        (dict(kv_indptr=FORMS["indptr"]["kv_indptr"]), "go together"),
                        (FORMS["indptr"] | dict(head_dim_v=16), "value_cache|values is")):
        with pytest.raises(ValueError, match=text):
            pagedkv.torch.paged_attention(q, k_cache, v_cache, **given)


def test_a_backward_says_that_there_is_none():
    (k_cache, v_cache), _ = a_pool()
    q = torch.randn(1, 4, 32, requires_grad=True)
    out = pagedkv.torch.paged_attention(q, k_cache, v_cache, torch.zeros(1, 1, dtype=torch.int32),
                                        torch.ones(1, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="pagedkv::paged_attention has no backward"):
        out.sum().backward()
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="pagedkv::quantize_symmetric has no backward"):
        pagedkv.torch.quantize_symmetric(x)[1].sum().backward()


def test_attention_runs_on_torchs_own_team_and_after_a_fork_on_new_threads():
    code = """
import os, torch, pagedkv
torch.set_num_threads(3)
assert pagedkv.num_threads() == 3
torch.ones(1 << 22).add(1)  # starts the team
cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, num_q_heads=32, kv_quant="q8", num_blocks=512)
s = cache.start().sequence
plan = cache.reserve([(s, 3000)])
k = torch.randn(3000, 8, 128)
started = os.listdir("/proc/self/task")
pagedkv.append(plan, 0, k, k)
plan.commit()
q = torch.randn(1, 32, 128)
attend = lambda: pagedkv.attend(cache.plan_read([(s, 1)]), 0, q).numpy()
before = attend()  # on the team
assert os.listdir("/proc/self/task") == started
pagedkv.set_num_threads(5)  # more than the team has
assert (attend() == before).all()
assert len(os.listdir("/proc/self/task")) == len(started) + 4
pagedkv.set_num_threads(3)
"""
    out = process.python(code + process.FORK)
    assert out.stdout == "both\n", out.stderr
