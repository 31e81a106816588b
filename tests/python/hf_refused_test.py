"""PagedCache: what is refused, and by which name."""

import copy
import types

import pytest
from hf_models import (
    dynamic, expect_refused, forward, left_padded, llama, logits, make_model, one_layer, paged, pytestmark, tokens,
    torch, transformers,
)

import pagedkv.hf as hf


def test_padding_at_the_right_and_holes_are_refused(llama):
    expect_refused(llama, "row 1 .* hides column 5", attention_mask=torch.tensor([[1] * 6, [1] * 5 + [0]]))
    expect_refused(llama, "row 0 .* hides column 2", attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1], [1] * 6]))


def test_a_mask_that_is_not_2d_or_of_another_width_is_refused(llama):
    expect_refused(llama, "custom attention mask", attention_mask=torch.ones(2, 1, 6, 6, dtype=torch.bool))
    expect_refused(llama, "custom attention mask", attention_mask=torch.ones(2, 1, 1, 6, dtype=torch.bool))
    cache = paged(llama)
    forward(llama, tokens(2, 6), cache)
    expect_refused(llama, "has 6 columns, expected 6 in the cache and 6 new", cache=cache,
                   attention_mask=torch.tensor([[1] * 6, [0] + [1] * 5]))


def test_padding_must_be_named_in_every_step(llama):
    ids, mask = left_padded(6, 3)
    cache = paged(llama)
    forward(llama, ids, cache, attention_mask=mask)
    expect_refused(llama, "row 1: the attention mask is not given, .* hid 3", tokens(2, 1), cache)
    other = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
    other[1, 3] = 0
    expect_refused(llama, "row 1: the attention mask hides 4", tokens(2, 1), cache, attention_mask=other)


def test_layers_must_agree_about_padding():
    config = one_layer(8)
    config.num_hidden_layers = 2
    cache = hf.PagedCache(config)
    cache._config._attn_implementation = hf.NAME
    x = torch.ones(1, 1, 3, 4)

    def layer(index, *shown):
        rows, _ = cache.update(x, x, index)
        mask = hf.padding_mask(1, 3, 3, attention_mask=torch.tensor([shown]).bool())
        return hf.attention(types.SimpleNamespace(layer_idx=index, is_causal=True), x, rows, rows, mask)

    layer(0, 0, 1, 1)
    with pytest.raises(ValueError, match="layer 1 has another padding mask"):
        layer(1, 0, 0, 1)
    assert cache.get_seq_length() == 0
    layer(0, 0, 1, 1), layer(1, 0, 1, 1)
    assert cache.get_seq_length() == 3 and cache.stats()["tokens"] == 2


def test_padding_that_a_stock_attention_stored_is_refused_by_ours(llama):
    ids, mask = left_padded(6, 3)
    cache = paged(llama)
    logits(llama, "sdpa", cache, ids, mask=mask)
    expect_refused(llama, "row 1: the attention mask hides 3", tokens(2, 1), cache,
                   attention_mask=torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1))


def test_attention_in_both_directions_is_refused(llama):
    llama.config.is_causal = False
    expect_refused(llama, "not plainly causal")
    cache = hf.PagedCache(one_layer(8))
    cache._config._attn_implementation = hf.NAME
    x = torch.ones(1, 1, 3, 4)
    rows, _ = cache.update(x, x, 0)
    layer = types.SimpleNamespace(layer_idx=0, is_causal=False)
    with pytest.raises(ValueError, match="both directions"):
        hf.attention(layer, x, rows, rows, None)


def test_overlays_on_the_mask_are_refused():
    mask = transformers.masking_utils
    for function in (mask.chunked_causal_mask_function(4, torch.zeros(2)), mask.bidirectional_mask_function,
                     mask.or_masks(mask.causal_mask_function, mask.bidirectional_mask_function),
                     mask.and_masks(mask.causal_mask_function)):
        with pytest.raises(ValueError, match="not plainly causal"):
            hf.padding_mask(2, 3, 3, mask_function=function)
    for function in (mask.causal_mask_function, mask.sliding_window_causal_mask_function(4)):
        assert hf.padding_mask(2, 3, 3, mask_function=function) is None


def test_dropout_is_refused():
    model = make_model("llama", attention_dropout=0.1).train()
    expect_refused(model, "dropout is 0.1")


def test_attention_weights_are_refused(llama):
    expect_refused(llama, "output_attentions", output_attentions=True)


def test_gradients_are_refused(llama):
    for attn in ("sdpa", hf.NAME):
        llama.set_attn_implementation(attn)
        with pytest.raises(RuntimeError, match="no backward"):
            llama(tokens(1, 3), cache=paged(llama))


def test_a_cache_of_fixed_length_is_refused(llama):
    cache = transformers.StaticCache(config=llama.config, max_cache_len=32)
    with pytest.raises(ValueError, match="StaticCache"):
        forward(llama, tokens(1, 3), cache)


@pytest.mark.parametrize("call", [
    lambda rows: rows.repeat(2), lambda rows: rows.transpose(1, 2), lambda rows: rows.size(0), lambda rows: rows[0],
    lambda rows: rows.reshape(-1), lambda rows: rows @ rows, lambda rows: torch.cat([rows, rows]), lambda rows: rows.float(),
])
def test_packed_rows_are_no_tensor_and_say_so(llama, call):
    llama.set_attn_implementation(hf.NAME)
    rows, _ = paged(llama).update(torch.zeros(1, 2, 3, 16), torch.zeros(1, 2, 3, 16), 0)
    with pytest.raises(TypeError, match="packed keys or values|unsupported operand"):
        call(rows)
    assert not hasattr(rows, "no_such_thing")


def test_packed_keys_cannot_be_computed_with_by_accident(llama):
    # The config that the cache sees says pagedkv, the model's own another attention.
    other = copy.deepcopy(llama.config)
    llama.set_attn_implementation("sdpa")
    other._attn_implementation = hf.NAME
    with pytest.raises(TypeError, match="attn_implementation"), torch.no_grad():
        llama(tokens(1, 3), cache=hf.PagedCache(other))


def test_models_whose_state_is_something_else_are_refused():
    with pytest.raises(ValueError, match="encoder-decoder"):
        hf.PagedCache(transformers.T5Config())
    with pytest.raises(ValueError, match="layer 0 of qwen3_next is of type linear_attention"):
        hf.PagedCache(transformers.Qwen3NextConfig(num_hidden_layers=4))


def test_a_wrong_argument_is_named(llama):
    with pytest.raises(ValueError, match="q8"):
        hf.PagedCache(llama.config, kv_quant="q5")
    with pytest.raises(ValueError, match="num_block.*num_blocks"):
        hf.PagedCache(llama.config, num_block=3)
    cache = paged(llama)
    forward(llama, tokens(2, 3), cache)
    expect_refused(llama, "batch of 3 rows, the cache holds 2", tokens(3, 1), cache)
    with pytest.raises(NotImplementedError, match="change together"):
        cache.layers[0].crop(-1)
    with pytest.raises(ValueError, match=r"\(3, 16\)"):
        cache.update(torch.zeros(2, 3, 1, 16), torch.zeros(2, 3, 1, 16), 0)
