"""Arguments by name: a wrong one is told with its name, its value and what is allowed."""

import pickle
import re

import numpy as np
import pytest

import pagedkv

SHAPE = dict(num_kv_heads=2, head_dim=8)


@pytest.mark.parametrize("options, error, text", [
    (dict(num_kv_heads=2.0), TypeError, "num_kv_heads is 2.0, of type float, allowed are integers"),
    (dict(num_kv_heads="2"), TypeError, "num_kv_heads is '2', of type str, allowed are integers"),
    (dict(num_layers=True), TypeError, "num_layers is True, of type bool, allowed are integers"),
    (dict(head_dim_v=[8]), TypeError, r"head_dim_v is \[8\], of type list, allowed are integers"),
    (dict(dynamic=1), TypeError, "dynamic is 1, of type int, allowed are True and False"),
    (dict(dynamic="no"), TypeError, "dynamic is 'no', of type str, allowed are True and False"),
    (dict(prefix_sharing=0), TypeError, "prefix_sharing is 0, of type int, allowed are True and False"),
    (dict(sliding_window=4.0), TypeError, "sliding_window is 4.0, of type float, allowed are integers"),
    (dict(block_size=16.0), TypeError, "block_size is 16.0, of type float, allowed are integers"),
    (dict(block_size=None), TypeError, "block_size is None, allowed are integers"),
    (dict(block_size=2**70), ValueError, "block_size is 1180591620717411303424, allowed are"),
    (dict(kv_quant=8), TypeError, "kv_quant is 8, of type int, allowed are modes such as 'q8'"),
    (dict(arena=1), TypeError, "arena is 1, of type int, allowed are strings"),
    (dict(arena="heap"), ValueError, 'arena is "heap", allowed are block_major, layer_major'),
    (dict(colour="red"), TypeError, "Cache got an unexpected keyword argument 'colour'; there are num_layers, num_kv_"),
])
def test_a_wrong_option_of_a_cache_is_named(options, error, text):
    with pytest.raises(error, match=text):
        pagedkv.Cache(**SHAPE | options)


@pytest.mark.parametrize("options, text", [
    (dict(layers=3), "layers is 3, of type int, allowed are lists"),
    (dict(layers=[0, 1.5]), "layers is 1.5, of type float, allowed are integers"),
    (dict(head_dim=np.float32(8)), "head_dim is .*8.0.*, of type float32, allowed are integers"),
])
def test_a_wrong_option_of_a_group_is_named(options, text):
    with pytest.raises(TypeError, match=text):
        pagedkv.Group(**dict(layers=[0]) | SHAPE | options)
    with pytest.raises(TypeError, match="Group needs layers, num_kv_heads and head_dim"):
        pagedkv.Group(layers=[0])


def test_groups_are_a_list_of_them():
    with pytest.raises(TypeError, match="groups is .*, of type int, allowed are lists of Group"):
        pagedkv.Cache(3)


def test_integers_and_bools_of_numpy_are_such():
    cache = pagedkv.Cache(num_kv_heads=np.int64(2), head_dim=np.uint8(8), dynamic=np.bool_(True), num_blocks=np.int32(7))
    assert cache.dynamic and cache.groups[0].num_kv_heads == 2


@pytest.fixture
def step():
    cache = pagedkv.Cache(**SHAPE, kv_quant="f32", num_blocks=8)
    plan = cache.reserve([(cache.start().sequence, 1)])
    rows = np.ones((1, 2, 8), np.float32)
    pagedkv.append(plan, 0, rows, rows)
    return plan, rows


@pytest.mark.parametrize("options, text", [
    (dict(scale="1"), "scale is '1', of type str, allowed are numbers"),
    (dict(scale=True), "scale is True, of type bool, allowed are numbers"),
    (dict(softcap=None), "softcap is None, allowed are numbers"),
    (dict(sliding_window=4.0), "sliding_window is 4.0, of type float, allowed are integers"),
    (dict(return_lse=1), "return_lse is 1, of type int, allowed are True and False"),
    (dict(window=1), "attend got an unexpected keyword argument 'window'; there are out, scale"),
])
def test_a_wrong_option_of_attend_is_named(step, options, text):
    plan, rows = step
    with pytest.raises(TypeError, match=text):
        pagedkv.attend(plan, 0, rows, **options)


def test_numbers_may_be_of_any_kind(step):
    plan, rows = step
    for scale in (1, 1.0, np.float32(1), np.float64(1), np.int8(1), np.array(1.0)):
        np.testing.assert_array_equal(pagedkv.attend(plan, 0, rows, scale=scale, softcap=0), rows)


@pytest.mark.parametrize("options, text", [
    (dict(scale=[1]), r"scale is \[1\], of type list, allowed are numbers"),
    (dict(head_dim_v=8.0), "head_dim_v is 8.0, of type float, allowed are integers"),
    (dict(query_path=None), "query_path is None, allowed are strings"),
    (dict(block_table=None), "paged_attention got an unexpected keyword argument 'block_table'"),
])
def test_a_wrong_option_of_paged_attention_is_named(options, text):
    blocks = np.zeros((2, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match=text):
        pagedkv.paged_attention(np.ones((1, 2, 8), np.float32), blocks, blocks, np.zeros((1, 1), np.int32), [1], **options)


def test_a_long_value_is_cut_short():
    with pytest.raises(TypeError) as caught:
        pagedkv.Cache(**SHAPE | dict(num_blocks="é" * 1000))
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("function, call", [
    (pagedkv.Cache.__init__, lambda: pagedkv.Cache(wrong=1)),
    (pagedkv.Group.__init__, lambda: pagedkv.Group(wrong=1)),
    (pagedkv.paged_attention, lambda: pagedkv.paged_attention(0, 0, 0, wrong=1)),
    (pagedkv.attend, lambda: pagedkv.attend(pagedkv.Cache(**SHAPE).reserve([]), 0, 0, wrong=1)),
], ids=["Cache", "Group", "paged_attention", "attend"])
def test_the_signature_names_what_there_is(function, call):
    with pytest.raises(TypeError, match="there are") as caught:
        call()
    signature = function.__nb_signature__[0][0]
    by_name = re.findall(r"(\w+):", signature[signature.index("*"):])
    assert by_name == str(caught.value).split("there are ")[1].split(", ")


CALLS = {
    "start's name_space": lambda cache: cache.start([1], name_space=3),
    "start's reuse": lambda cache: cache.start([1], reuse=1),
    "fork's sequence": lambda cache: cache.fork(3),
    "truncate's length": lambda cache: cache.truncate(cache.start().sequence, 1.5),
    "length's sequence": lambda cache: cache.length("a"),
    "release's sequence": lambda cache: cache.release(cache),
    "blocks_held's group": lambda cache: cache.blocks_held(cache.start().sequence, 0.5),
    "grow's tokens": lambda cache: cache.grow_to_capacity("9"),
    "tensors' layer": lambda cache: cache.tensors(0.0),
    "stats' resident": lambda cache: cache.stats(resident=1),
    "plan_read's queries": lambda cache: cache.plan_read([(cache.start().sequence, 1.0)]),
    "read_dense's plan": lambda cache: cache.read_dense(1, 0, 0),
    "read_dense's place": lambda cache: cache.read_dense(cache.plan_read([]), 0.0, 0),
    "image_bytes' group": lambda cache: cache.image_bytes("0"),
    "commit's all_or_none": lambda cache: cache.reserve([]).commit(all_or_none=0),
    "block_tables' group": lambda cache: cache.reserve([]).block_tables(0.0),
    "append's plan": lambda cache: pagedkv.append(1, 0, None, None),
    "append's layer": lambda cache: pagedkv.append(cache.reserve([]), 0.0, None, None),
    "attend's plan": lambda cache: pagedkv.attend("plan", 0, None),
    "attend's layer": lambda cache: pagedkv.attend(cache.reserve([]), "0", None),
    "threads": lambda cache: pagedkv.set_num_threads(1.5),
    "bytes_per_token's heads": lambda cache: pagedkv.bytes_per_token("q8", 1.0, 8),
    "bytes_per_token's mode": lambda cache: pagedkv.bytes_per_token(8, 1, 8),
    "quantize's mode": lambda cache: pagedkv.quantize_symmetric(np.ones((1, 8), np.float32), 8),
    "dequantize's head_dim": lambda cache: pagedkv.dequantize_symmetric(np.ones((1, 8), np.int8), [1], 8.0),
    "PagedKVCache's block_size": lambda cache: pagedkv.PagedKVCache(block_size=16.0),
    "PagedKVCache's dynamic": lambda cache: pagedkv.PagedKVCache(dynamic="no"),
    "PagedKVCache's mode": lambda cache: pagedkv.PagedKVCache(kv_quant_config=8),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_no_call_answers_with_a_bare_signature(call):
    with pytest.raises(TypeError, match=r"^\w+ is .*, of type \w+, allowed are .*"):
        call(pagedkv.Cache(**SHAPE))


NONE = {
    "start's name_space": ("name_space", lambda cache: cache.start([1], name_space=None)),
    "start's reuse": ("reuse", lambda cache: cache.start([1], reuse=None)),
    "start's store": ("store", lambda cache: cache.start([1], store=None)),
    "fork's sequence": ("sequence", lambda cache: cache.fork(None)),
    "truncate's sequence": ("sequence", lambda cache: cache.truncate(None, 1)),
    "truncate's length": ("new_length", lambda cache: cache.truncate(cache.start().sequence, None)),
    "length's sequence": ("sequence", lambda cache: cache.length(None)),
    "release's sequence": ("sequence", lambda cache: cache.release(None)),
    "blocks_held's group": ("group", lambda cache: cache.blocks_held(cache.start().sequence, None)),
    "grow's tokens": ("tokens", lambda cache: cache.grow_to_capacity(None)),
    "tensors' layer": ("layer", lambda cache: cache.tensors(None)),
    "stats' resident": ("resident", lambda cache: cache.stats(None)),
    "reserve's requests": ("requests", lambda cache: cache.reserve(None)),
    "plan_read's requests": ("requests", lambda cache: cache.plan_read(None)),
    "read_dense's plan": ("plan", lambda cache: cache.read_dense(None, 0, 0)),
    "read_dense's place": ("place", lambda cache: cache.read_dense(cache.plan_read([]), None, 0)),
    "read_dense's layer": ("layer", lambda cache: cache.read_dense(cache.plan_read([]), 0, None)),
    "read_dense's first": ("first", lambda cache: cache.read_dense(cache.plan_read([]), 0, 0, None)),
    "query_path's group": ("group", lambda cache: cache.query_path(None)),
    "image_bytes' group": ("group", lambda cache: cache.image_bytes(None)),
    "commit's all_or_none": ("all_or_none", lambda cache: cache.reserve([]).commit(all_or_none=None)),
    "block_tables' group": ("group", lambda cache: cache.reserve([]).block_tables(None)),
    "slot_mapping's group": ("group", lambda cache: cache.reserve([]).slot_mapping(None)),
    "append's plan": ("plan", lambda cache: pagedkv.append(None, 0, None, None)),
    "append's layer": ("layer", lambda cache: pagedkv.append(cache.reserve([]), None, None, None)),
    "attend's plan": ("plan", lambda cache: pagedkv.attend(None, 0, None)),
    "attend's layer": ("layer", lambda cache: pagedkv.attend(cache.reserve([]), None, None)),
    "threads": ("num_threads", lambda cache: pagedkv.set_num_threads(None)),
    "bytes_per_token's mode": ("kv_quant", lambda cache: pagedkv.bytes_per_token(None, 1, 8)),
    "bytes_per_token's heads": ("num_kv_heads", lambda cache: pagedkv.bytes_per_token("q8", None, 8)),
    "bytes_per_token's head_dim": ("head_dim", lambda cache: pagedkv.bytes_per_token("q8", 1, None)),
    "quantize's mode": ("mode", lambda cache: pagedkv.quantize_symmetric(np.ones((1, 8), np.float32), None)),
    "dequantize's head_dim": ("head_dim", lambda cache: pagedkv.dequantize_symmetric(np.ones((1, 8), np.int8), [1], None)),
    "dequantize's mode": ("mode", lambda cache: pagedkv.dequantize_symmetric(np.ones((1, 8), np.int8), [1], 8, None)),
    "Group's layers": ("layers", lambda cache: pagedkv.Group(layers=None, num_kv_heads=1, head_dim=8)),
    "Group's heads": ("num_kv_heads", lambda cache: pagedkv.Group(layers=[0], num_kv_heads=None, head_dim=8)),
    "PagedKVCache's block_size": ("block_size", lambda cache: pagedkv.PagedKVCache(block_size=None)),
    "trim's n": ("n", lambda cache: pagedkv.PagedKVCache().trim(None)),
}


@pytest.mark.parametrize("name, call", NONE.values(), ids=NONE.keys())
def test_a_none_is_named_like_any_other_value(name, call):
    with pytest.raises(TypeError, match=rf"^{name} is None, allowed are .*"):
        call(pagedkv.Cache(**SHAPE))


def test_what_is_cut_off_is_whole():
    for wrong in (1.9, "1", True):
        with pytest.raises(TypeError, match=r"n is .*, of type \w+, allowed are integers"):
            pagedkv.PagedKVCache().trim(wrong)
    assert pagedkv.PagedKVCache().trim(np.int32(3)) == 0


def test_pickle_says_why_not():
    cache = pagedkv.Cache(**SHAPE)
    for thing in (cache, cache.start().sequence, cache.reserve([]), pagedkv.PagedKVCache()):
        with pytest.raises(TypeError, match="not pickled: "):
            pickle.dumps(thing)


def odd_arrays():
    yield "of elements of type object", np.array([[object()]])
    yield "of elements of type <U1", np.array([["a"]])
    yield "of elements of type datetime64", np.array([["2020-01-01"]], "datetime64[D]")
    yield "is a list, expected an array", [[1.0]]
    yield "is a NoneType, expected an array", None
    try:
        import torch
    except ImportError:
        return
    yield "on device meta", torch.ones(1, 8, device="meta")
    yield "of layout torch.sparse_coo, expected a dense tensor", torch.ones(1, 8).to_sparse()
    yield "of layout torch.sparse_csr", torch.ones(1, 8).to_sparse_csr()
    yield "quantized, torch.qint8", torch.quantize_per_tensor(torch.ones(1, 8), 1.0, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_arrays_that_cannot_be_read_say_what_they_are():
    cache = pagedkv.Cache(**SHAPE)
    for text, array in odd_arrays():
        for call in (lambda: pagedkv.quantize_symmetric(array),
                     lambda: pagedkv.append(cache.reserve([(cache.start().sequence, 1)]), 0, array, array)):
            with pytest.raises(TypeError, match=text):
                call()
