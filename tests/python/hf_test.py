"""PagedCache in transformers: the same text as DynamicCache, packed reads, refusals, rows that move, files.

Models are tiny and random; their weights are large, so that a wrong key changes the text. Text is compared in f32.
"""

import contextlib
import copy
import json
import os
import pathlib
import pickle
import struct
import subprocess
import sys
import tracemalloc
import types

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import pagedkv
import pagedkv.hf as hf
from pagedkv import _safetensors
from saved_file import rewrite
from transformers import DynamicCache

torch.set_num_threads(2)
# generate() calls its argument `cache` from 5.24 on, and says so whenever it is called past_key_values.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

STOCK = ("eager", "sdpa")
BLOCK = 4  # small, so that short texts cross many blocks
WINDOW = 8

COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, initializer_range=0.3, max_position_embeddings=512, tie_word_embeddings=False,
              eos_token_id=None, bos_token_id=None, pad_token_id=0)
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def make_model(name, seed=0, **changes):
    torch.manual_seed(seed)
    one = {
        "llama": ("Llama", "LlamaConfig", dict(num_hidden_layers=3)),
        "mistral": ("Mistral", "MistralConfig", dict(num_hidden_layers=3, sliding_window=WINDOW)),
        "gemma2": ("Gemma2", "Gemma2Config", dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED,
                                                  query_pre_attn_scalar=16, attn_logit_softcapping=5.0)),
        "gemma3": ("Gemma3", "Gemma3TextConfig", dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED,
                                                      query_pre_attn_scalar=16)),
        # Two of its layers read the keys of two others; full layers have wider heads.
        "gemma4": ("Gemma4", "Gemma4TextConfig", dict(num_hidden_layers=6, sliding_window=WINDOW, global_head_dim=32,
                                                      num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                                                      vocab_size_per_layer_input=97,
                                                      layer_types=["sliding_attention", "full_attention"] * 3)),
        # Attention sinks.
        "gpt_oss": ("GptOss", "GptOssConfig", dict(num_hidden_layers=2, sliding_window=WINDOW, num_local_experts=2,
                                                   num_experts_per_tok=1, rope_parameters=None,
                                                   layer_types=["sliding_attention", "full_attention"])),
    }[name]
    config = getattr(transformers, one[1])(**COMMON | one[2] | changes)
    return getattr(transformers, one[0] + "ForCausalLM")(config).eval()


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get


@pytest.fixture
def llama():
    return make_model("llama")


@pytest.fixture
def mistral():
    return make_model("mistral")


def tokens(n_rows, n, seed=1):
    return torch.randint(1, 97, (n_rows, n), generator=torch.Generator().manual_seed(seed))


def dynamic(model):
    return DynamicCache(config=model.config)


def paged(model, **options):
    return hf.PagedCache(model.config, **{"block_size": BLOCK} | options)


def say(model, attn, ids, cache, n=20, **options):
    """Greedy text, prompt included."""
    model.set_attn_implementation(attn)
    # Without a mask generate() would take every token 0 for padding, also one that the model has said.
    options = {"attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, cache=cache, do_sample=False, max_new_tokens=n, **options)


def logits(model, attn, cache, *chunks, mask=None):
    """Feeds chunk after chunk; the logits of all columns."""
    model.set_attn_implementation(attn)
    out = []
    with torch.no_grad():
        for ids in chunks:
            seen = cache.get_seq_length() + ids.shape[1]
            out.append(model(ids, cache=cache, attention_mask=None if mask is None else mask[:, :seen]).logits)
    return torch.cat(out, 1)


def left_padded(*lengths):
    """Prompts of these lengths in one batch, and its mask."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, -n:], mask[row, -n:] = tokens(1, n, seed=10 + row), 1
    return ids, mask


# --- the same text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("attn", STOCK + (hf.NAME,))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gemma4", "gpt_oss"])
def test_the_greedy_text_is_that_of_dynamic_cache(models, name, attn):
    if attn == "sdpa" and name in ("gemma2", "gpt_oss"):
        pytest.skip("the model has no sdpa attention")
    model, ids = models(name), tokens(1, 13)
    expected = say(model, "eager", ids, dynamic(model))
    cache = paged(model)

    assert torch.equal(say(model, attn, ids, cache), expected)

    assert len(set(expected[0, 13:].tolist())) > 5, "a text of one word proves nothing"
    assert cache.get_seq_length() == 32
    cache.verify()


def test_layers_that_share_keys_store_them_once(models):
    cache = paged(models("gemma4"))
    say(models("gemma4"), hf.NAME, tokens(1, 13), cache)
    calls = {kernel.split(".")[0]: n for kernel, n in cache.stats()["kernel_calls"].items()}
    assert calls["append"] == 4 * 20 and calls["attend"] == 6 * 20


def test_generate_takes_it_as_past_key_values(llama):
    ids = tokens(1, 5)
    expected = say(llama, "eager", ids, dynamic(llama))
    llama.set_attn_implementation(hf.NAME)
    assert torch.equal(llama.generate(ids, past_key_values=paged(llama), do_sample=False, max_new_tokens=20), expected)


@pytest.mark.parametrize("attn", STOCK + (hf.NAME,))
@pytest.mark.parametrize("name", ["llama", "gemma3", "gemma4"])
@pytest.mark.parametrize("options", [{}, {"prefill_chunk_size": 5}], ids=["at_once", "in_chunks"])
def test_every_row_of_a_left_padded_batch_says_what_it_says_alone(models, name, attn, options):
    # In chunks of 5 the shortest row brings nothing but padding at first.
    model, (ids, mask) = models(name), left_padded(13, 4, 9)

    cache = paged(model)
    together = say(model, attn, ids, cache, attention_mask=mask, **options)

    for row, n in enumerate((13, 4, 9)):
        alone = say(model, "eager", ids[row:row + 1, -n:], dynamic(model))
        assert together[row, -20:].tolist() == alone[0, -20:].tolist()
    cache.verify()
    if attn == hf.NAME:  # padding takes no room
        assert cache.core.stats()["tokens"] == sum((13, 4, 9)) + 3 * 19


def test_queries_of_padding_read_zeros(llama):
    ids, mask = left_padded(6, 2)
    seen = []
    llama.set_attn_implementation(hf.NAME)
    llama.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    logits(llama, hf.NAME, paged(llama), ids, mask=mask)
    assert not seen[0][1, :4].any() and seen[0][1, 4:].all(-1).all() and seen[0][0].all(-1).all()


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_beams_find_the_same_texts(models, name, attn):
    model, (ids, mask) = models(name), left_padded(9, 5)
    options = dict(num_beams=3, num_return_sequences=2, attention_mask=mask)
    expected = say(model, "sdpa", ids, dynamic(model), **options)
    cache = paged(model)

    assert torch.equal(say(model, attn, ids, cache, **options), expected)

    cache.verify()
    cache.reset()
    assert cache.stats()["bytes_in_use"] == 0, "a beam that died keeps blocks"


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_a_conversation_goes_on_with_the_same_cache(models, name, attn):
    model, ids = models(name), tokens(2, 7)

    def talk(attn, cache):
        text = ids
        for turn in range(3):
            text = say(model, attn, text, cache, n=6)
            text = torch.cat([text, tokens(2, 5, seed=turn)], 1)
        return text

    assert torch.equal(talk(attn, paged(model)), talk("sdpa", dynamic(model)))


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_guessed_tokens_are_taken_back_also_behind_the_window(models, name, attn):
    # A text that repeats itself, so that guesses are made, some of them right.
    model, ids = models(name), tokens(1, 6).repeat(1, 4)
    expected = say(model, "sdpa", ids, dynamic(model), n=30)
    cropped = []

    class Watched(hf.PagedCache):
        def crop(self, tokens_to_remove):
            cropped.append(-tokens_to_remove)
            super().crop(tokens_to_remove)

    cache = Watched(model.config, block_size=BLOCK)
    assert torch.equal(say(model, attn, ids, cache, n=30, prompt_lookup_num_tokens=4), expected)

    assert max(cropped) > 0, "no guess was wrong: nothing was taken back"
    cache.verify()


def test_an_assistant_model_may_guess(models):
    model, ids = models("llama"), tokens(1, 8)
    expected = say(model, "sdpa", ids, dynamic(model))
    assistant = make_model("llama", seed=3, num_hidden_layers=1)
    assert torch.equal(say(model, hf.NAME, ids, paged(model), assistant_model=assistant), expected)


def test_attention_implementations_may_take_turns(models):
    model, ids = models("gemma3"), tokens(2, 30)
    expected = logits(model, "eager", dynamic(model), ids)
    cache = paged(model)
    parts = [logits(model, attn, cache, ids[:, 5 * i:5 * i + 5])
             for i, attn in enumerate(("sdpa", hf.NAME, hf.NAME, "eager", hf.NAME, "sdpa"))]
    assert torch.allclose(torch.cat(parts, 1), expected, atol=1e-3)


def test_a_stock_attention_may_go_on_after_skipped_padding(models):
    model, (ids, mask) = models("gemma3"), left_padded(13, 4)
    more = torch.cat([mask, torch.ones(2, 20, dtype=torch.long)], 1)
    next_ids = tokens(2, 20, seed=4)
    expected = logits(model, "sdpa", dynamic(model), ids, next_ids, mask=more)
    cache = paged(model)
    found = torch.cat([logits(model, hf.NAME, cache, ids, mask=more),
                       logits(model, "sdpa", cache, *next_ids.split(6, 1), mask=more)], 1)
    assert torch.allclose(found[:, 13:], expected[:, 13:], atol=1e-3)


def test_latents_are_stored_for_stock_attentions_and_refused_for_ours():
    torch.manual_seed(0)
    config = transformers.DeepseekV3Config(
        vocab_size=97, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=24, q_lora_rank=None, qk_rope_head_dim=8,
        qk_nope_head_dim=16, v_head_dim=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        first_k_dense_replace=1, initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=0)
    model, ids = transformers.DeepseekV3ForCausalLM(config).eval(), tokens(1, 9)
    expected = say(model, "sdpa", ids, dynamic(model))
    assert torch.equal(say(model, "sdpa", ids, paged(model)), expected)
    with pytest.raises(ValueError, match="stores latents"):
        say(model, hf.NAME, ids, paged(model))


# --- how blocks are read -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["f32", "q8", "q4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_our_attention_never_makes_keys_dense(models, name, mode):
    cache = paged(models(name), kv_quant=mode)
    say(models(name), hf.NAME, tokens(2, 20), cache)
    stats = cache.stats()
    assert stats["dense_materializations"] == 0
    assert sum(n for kernel, n in stats["kernel_calls"].items() if kernel.startswith("attend")) > 0


def test_stock_attentions_read_dense_once_per_row_layer_and_step(llama):
    cache = paged(llama, kv_quant="q8")
    say(llama, "sdpa", tokens(2, 20), cache, n=5)
    stats = cache.stats()
    assert stats["dense_materializations"] == 2 * 3 * 5
    assert not any(kernel.startswith("attend") for kernel in stats["kernel_calls"])


@pytest.mark.parametrize("recording", [False, True])
def test_stock_attentions_get_the_very_tensors_of_dynamic_cache(recording):
    # O-LIFE-15: the step at which the length reaches the window, and all around it.
    model = make_model("gemma3")
    ours, theirs = paged(model), dynamic(model)
    if recording:
        ours.activate_past_recording(), theirs.activate_past_recording()
    torch.manual_seed(5)
    for n in (6, 1, 1, 1, 1, 3, 9, 2, 1, 17, 1):
        for layer in range(4):
            assert ours.get_mask_sizes(n, layer) == theirs.get_mask_sizes(n, layer)
        for layer in range(4):
            k, v = torch.randn(2, 3, 2, n, 16)
            for a, b in zip(ours.update(k, v, layer), theirs.update(k, v, layer)):
                assert torch.equal(a, b)
        if recording:
            ours.crop(0), theirs.crop(0)
        assert ours.get_seq_length() == theirs.get_seq_length()
    for a, b in zip(ours.layers, theirs.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) and a.is_sliding == b.is_sliding


def attend_uniformly(cache, values):
    """One layer, one row: queries of 0 over these values, so that attention is the mean of what it sees."""
    cache._config._attn_implementation = hf.NAME
    v = torch.tensor(values)[None, None, :, None].expand(1, 1, -1, 4)
    rows, _ = cache.update(torch.zeros_like(v), v, 0)
    layer = types.SimpleNamespace(layer_idx=0, is_causal=True)
    return hf.attention(layer, torch.zeros_like(v), rows, rows, None)[0][0, :, 0, 0].tolist()


def one_layer(window):
    return transformers.MistralConfig(num_hidden_layers=1, hidden_size=4, num_attention_heads=1, num_key_value_heads=1,
                                      head_dim=4, sliding_window=window)


@pytest.mark.parametrize("chunk", [1, 3, 9, 10])
def test_a_window_counts_the_query_itself_for_every_chunking(chunk):
    # O-NUM-18: 7.0 would be one key too many, 4.5 no window.
    cache, values = hf.PagedCache(one_layer(4), block_size=BLOCK), [float(i) for i in range(10)]
    means = []
    for i in range(0, 10, chunk):
        means += attend_uniformly(cache, values[i:i + chunk])
    assert means[9] == pytest.approx(7.5) and means[2] == pytest.approx(1.0)


def test_the_window_is_right_at_the_step_that_fills_it():
    # O-LIFE-15
    cache, values = hf.PagedCache(one_layer(8), kv_quant="f16", block_size=BLOCK), [10 + 0.1 * i for i in range(12)]
    means = attend_uniformly(cache, values[:6])
    for value in values[6:]:
        means += attend_uniformly(cache, [value])
    assert means[8] == pytest.approx(10.45, abs=1e-2) and means[9] == pytest.approx(10.55, abs=1e-2)


# --- quantized -----------------------------------------------------------------------------------------------------


class RoundTripped(DynamicCache):
    """DynamicCache over rows that have been quantized and decoded: what a quantized mode is allowed to lose."""

    def __init__(self, config, mode):
        super().__init__(config=config)
        self.mode = mode

    def update(self, k, v, layer, *args, **kwargs):
        def there_and_back(x):
            codes, scales = pagedkv.quantize_symmetric(x.contiguous(), self.mode)
            return pagedkv.dequantize_symmetric(codes, scales, x.shape[-1], self.mode)
        return super().update(there_and_back(k), there_and_back(v), layer)


def chunks_of(ids):
    return (ids[:, :20],) + tuple(ids[:, i:i + 1] for i in range(20, ids.shape[1]))


def loss(found, expected):
    return float((found - expected).pow(2).mean().sqrt())


@pytest.mark.parametrize("mode", ["q8", "q6", "q4"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_quantized_logits_lose_what_the_format_loses_and_no_more(models, name, mode):
    model, chunks = models(name), chunks_of(tokens(2, 40))
    exact = logits(model, "sdpa", dynamic(model), *chunks)
    allowed = logits(model, "sdpa", RoundTripped(model.config, mode), *chunks)

    # Dense reads decode the same floats, so the whole model computes the same bits.
    assert torch.equal(logits(model, "sdpa", paged(model, kv_quant=mode), *chunks), allowed)
    # Kernels round in another order: codes of deeper layers may flip, the loss is the same (numerics.md, section 2a:
    # 1.10 for attention; three layers amplify chance).
    ours = logits(model, hf.NAME, paged(model, kv_quant=mode), *chunks)
    assert 0 < loss(ours, exact) < 1.25 * loss(allowed, exact)


def test_eight_bits_beside_the_package_s_own_quantized_cache(models):
    pytest.importorskip("optimum.quanto")
    model, chunks = models("llama"), chunks_of(tokens(2, 40))
    exact = logits(model, "sdpa", dynamic(model), *chunks)
    quanto = transformers.QuantizedCache("quanto", model.config, nbits=4, q_group_size=16, residual_length=4)
    losses = {"quanto int4": loss(logits(model, "sdpa", quanto, *chunks), exact)}
    for mode in ("q8", "q6", "q4"):
        losses[mode] = loss(logits(model, hf.NAME, paged(model, kv_quant=mode), *chunks), exact)
    assert losses["q8"] < losses["q6"] < losses["q4"], losses
    assert losses["q8"] < 0.25 * losses["quanto int4"], losses


@pytest.mark.parametrize("mode, per_value", [("f32", 64), ("f16", 32), ("q8", 20), ("q6", 16), ("q4", 12)])
def test_bytes_in_use_are_the_formula_s(llama, mode, per_value):
    # d = 16: 4 d, 2 d, d + 4, 3 d / 4 + 4, d / 2 + 4 bytes a row; K and V, 2 heads, 3 layers, 2 rows of 32 tokens.
    cache = paged(llama, kv_quant=mode, block_size=16)
    logits(llama, hf.NAME, cache, tokens(2, 32))
    assert cache.stats()["bytes_in_use"] == 2 * 2 * 3 * 2 * 32 * per_value


@pytest.mark.parametrize("dtype, stored", [(torch.float32, "f32"), (torch.float16, "f16"), (torch.bfloat16, "bf16")])
@pytest.mark.parametrize("attn", ("eager", hf.NAME))
def test_off_stores_the_model_s_own_type(models, monkeypatch, dtype, stored, attn):
    for name in ("PAGEDKV_QUANT", "MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT"):
        monkeypatch.delenv(name, raising=False)
    model, ids = make_model("llama").to(dtype), tokens(2, 12)
    cache = paged(model)
    found = logits(model, attn, cache, ids)
    assert cache.kv_quant == stored and found.dtype == dtype
    expected = logits(models("llama"), "eager", dynamic(models("llama")), ids)
    assert loss(found.float(), expected) < {"f32": 1e-4, "f16": 0.05, "bf16": 0.5}[stored] * float(expected.std())


def test_the_mode_may_come_from_the_environment(llama, monkeypatch):
    monkeypatch.setenv("PAGEDKV_QUANT", "q4")
    assert paged(llama).kv_quant == "q4" and paged(llama, kv_quant="q8:q4").kv_quant == "q8:q4"
    monkeypatch.setenv("PAGEDKV_QUANT", "fp8")
    with pytest.raises(ValueError, match="q8"):
        paged(llama)


# --- refused -------------------------------------------------------------------------------------------------------


def forward(model, ids, cache, **options):
    model.set_attn_implementation(hf.NAME)
    with torch.no_grad():
        return model(ids, cache=cache, **options)


def expect_refused(model, text, ids=None, cache=None, error=ValueError, **options):
    cache = paged(model) if cache is None else cache
    before = cache.get_seq_length()
    with pytest.raises(error, match=text):
        forward(model, tokens(2, 6) if ids is None else ids, cache, **options)
    assert cache.get_seq_length() == before


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


def test_our_attention_refuses_another_cache_or_none(llama):
    for cache in (dynamic(llama), None):
        with pytest.raises(ValueError, match="PagedCache"):
            forward(llama, tokens(1, 3), cache, use_cache=cache is not None)


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


def test_a_cache_grows_where_it_may(llama):
    cache = paged(llama, num_blocks=2, dynamic=True)
    ids = tokens(2, 40)
    assert torch.allclose(logits(llama, hf.NAME, cache, ids), logits(llama, "sdpa", dynamic(llama), ids), atol=1e-3)


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


# --- files ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(models, tmp_path):
    """A saved conversation of a model with windows, padding and a crop in its past; and how it goes on."""
    def make(name="gemma3", mode="q4", attn=hf.NAME):
        model, (ids, mask) = models(name), left_padded(17, 6)
        cache = paged(model, kv_quant=mode)
        logits(model, attn, cache, ids, mask=mask)
        cache.crop(-1)
        path = tmp_path / "rows.kv"
        cache.save(path)
        more = torch.cat([mask[:, :-1], torch.ones(2, 12, dtype=torch.long)], 1)
        return model, path, cache, lambda c: logits(model, attn, c, tokens(2, 12, seed=6), mask=more)

    return make


@pytest.mark.parametrize("attn", ("sdpa", hf.NAME))
@pytest.mark.parametrize("mode", ["f32", "f16", "bf16", "q8", "q6", "q4", "q8:q4"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_a_loaded_cache_goes_on_as_if_it_had_never_been_saved(saved, name, mode, attn):
    # O-PERS-07, O-PERS-12 c: another block size is accepted.
    model, path, cache, go_on = saved(name, mode, attn)
    for block_size in (BLOCK, 16):
        loaded = hf.PagedCache.load(path, model.config, block_size=block_size)
        assert loaded.kv_quant == cache.kv_quant and loaded.get_seq_length() == 16
        for a, b in zip(loaded.layers, cache.layers):
            assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        loaded.verify()
        assert torch.equal(go_on(loaded), go_on(cache.fork()))
        loaded.verify()


def test_saving_is_of_stored_bytes_and_all_of_them(llama, tmp_path):
    # O-PERS-08: every block's rows are there; O-LIFE-09: nothing is quantized twice.
    cache = paged(llama, kv_quant="q4")
    forward(llama, tokens(1, 22), cache)
    cache.save(tmp_path / "a.kv")
    assert (tmp_path / "a.kv").stat().st_size > 22 * 3 * pagedkv.bytes_per_token("q4", 2, 16)
    for generation in range(3):
        cache = hf.PagedCache.load(tmp_path / "a.kv", llama.config)
        cache.save(tmp_path / "b.kv")
        assert (tmp_path / "a.kv").read_bytes() == (tmp_path / "b.kv").read_bytes()
        (tmp_path / "b.kv").replace(tmp_path / "a.kv")


def test_any_reader_of_safetensors_reads_the_file(saved):
    safetensors = pytest.importorskip("safetensors")
    _, path, cache, _ = saved("gemma3", "q8:q4")
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pagedkv.hf"
        assert len(file.keys()) == 2 * len(cache.layers) * 4
        found = [file.get_tensor(name) for name in ("1.2.keys", "1.2.values", "1.2.values.scales", "0.0.keys")]
    assert [t.dtype for t in found] == [torch.int8, torch.uint8, torch.float32, torch.int8]
    assert [tuple(t.shape) for t in found] == [(5, 2, 16), (5, 2, 8), (5, 2, 1), (WINDOW - 1, 2, 16)]


def test_text_goes_on_after_loading(models, tmp_path):
    model, ids = models("gemma3"), tokens(1, 19)
    expected = say(model, "sdpa", ids, dynamic(model), n=30)
    cache = paged(model)
    half = say(model, hf.NAME, ids, cache, n=15)
    cache.save(tmp_path / "half.kv")
    loaded = hf.PagedCache.load(tmp_path / "half.kv", model.config)
    assert torch.equal(say(model, hf.NAME, half, loaded, n=15), expected)


def test_a_long_text_is_loaded_piece_by_piece(models, tmp_path):
    # Longer than a window's pool has room for at once, and than what is written at a time.
    model, ids = models("gemma3"), tokens(1, 1300)
    cache = paged(model, kv_quant="q8", dynamic=True)
    logits(model, hf.NAME, cache, *ids.split(300, 1))
    cache.save(tmp_path / "long.kv")
    loaded = hf.PagedCache.load(tmp_path / "long.kv", model.config, num_blocks=400, dynamic=False)
    assert loaded.get_seq_length() == 1300
    assert torch.equal(logits(model, hf.NAME, loaded, tokens(1, 9)), logits(model, hf.NAME, cache, tokens(1, 9)))


def test_a_damaged_or_short_file_is_refused_wherever_it_is(saved):
    # O-PERS-01. Loading makes a new cache, so nothing can be left half restored.
    model, path, cache, go_on = saved()
    data = path.read_bytes()
    with pytest.raises(ValueError, match="is empty"):
        paged(model).save(path)
    assert path.read_bytes() == data
    for position in (0, 9, 13, 21, 200, len(data) // 2, len(data) - 40, len(data) - 1):
        path.write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1:])
        with pytest.raises(ValueError, match="rows.kv"):
            hf.PagedCache.load(path, model.config)
    for size in (0, 1, 19, 20, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(ValueError, match="rows.kv"):
            hf.PagedCache.load(path, model.config)
    path.write_bytes(data + b"x")
    with pytest.raises(ValueError, match=f"{len(data) + 1} bytes, its header says {len(data)}"):
        hf.PagedCache.load(path, model.config)
    path.write_bytes(data)
    assert torch.equal(go_on(hf.PagedCache.load(path, model.config)), go_on(cache))


def test_a_missing_file_is_not_found(llama, tmp_path):
    # O-PERS-02
    with pytest.raises(FileNotFoundError):
        hf.PagedCache.load(tmp_path / "missing.kv", llama.config)


@pytest.mark.parametrize("columns", [2**32 - 1, 2**63, -1, "7", 1.5, None, True])
@pytest.mark.parametrize("skipped", [[0, 0], [0, 2**63], [-1, 0], [], "no", [None, 0]])
def test_sizes_that_a_file_claims_are_not_believed(saved, columns, skipped):
    # O-PERS-04
    model, path, *_ = saved()

    def claim(header):
        header["__metadata__"].update(columns=json.dumps(columns), skipped=json.dumps(skipped))

    rewrite(path, claim)
    tracemalloc.start()
    with pytest.raises(ValueError):
        hf.PagedCache.load(path, model.config)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_header_size_that_a_file_claims_is_not_believed(tmp_path, llama):
    # O-PERS-04
    path = tmp_path / "rows.kv"
    for size in (2**32 - 1, 2**63, 181):
        path.write_bytes(struct.pack("<Q", size) + b"{" * 180)
        with pytest.raises(ValueError, match="header"):
            hf.PagedCache.load(path, llama.config)


def test_another_version_is_refused_with_both_numbers(saved):
    # O-PERS-07
    model, path, *_ = saved()
    for version in ("0", "2"):
        rewrite(path, lambda header: header["__metadata__"].update(version=version))
        with pytest.raises(ValueError, match=f"version {version}, this build reads 1"):
            hf.PagedCache.load(path, model.config)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("at", ["0", "1", "header", "half", "all but 1", "digest", "fsync", "replace"])
def test_saving_over_a_file_leaves_the_old_or_the_new_one(saved, monkeypatch, at):
    # O-PERS-09, O-PERS-10
    model, path, cache, go_on = saved()
    old = path.read_bytes()
    go_on(cache)
    cache.save(path.with_name("size"))
    size = path.with_name("size").stat().st_size
    path.with_name("size").unlink()
    limit = {"0": 0, "1": 1, "header": 600, "half": size // 2, "all but 1": size - 1,
             "digest": size + 100}.get(at, 1 << 30)

    def fail(*args):
        raise Stop

    class Limited:
        """A file that stops in the middle of a write. The header is written once more at the end, with its digest."""

        def __init__(self, file):
            self.file, self.seek, self.room = file, file.seek, limit

        def write(self, data):
            data = memoryview(data).cast("B")
            self.file.write(data[:self.room])
            if len(data) > self.room:
                raise Stop
            self.room -= len(data)

    whole_file = _safetensors.whole_file

    @contextlib.contextmanager
    def limited(path):
        with whole_file(path) as file:
            yield Limited(file)

    monkeypatch.setattr(_safetensors, "whole_file", limited)
    if at in ("fsync", "replace"):
        monkeypatch.setattr(os, at, fail)
    with pytest.raises(Stop):
        cache.save(path)
    assert path.read_bytes() == old and os.listdir(path.parent) == ["rows.kv"]

    monkeypatch.undo()
    cache.save(path)
    assert hf.PagedCache.load(path, model.config).get_seq_length() == 28


def test_a_full_disk_is_an_error_and_leaves_the_old_file(saved):
    # O-PERS-10
    resource = pytest.importorskip("resource")
    model, path, cache, _ = saved()
    old, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old) // 2, limits[1]))
    try:
        with pytest.raises(OSError):
            cache.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == old and os.listdir(path.parent) == ["rows.kv"]


def test_the_file_of_another_model_is_refused(llama, tmp_path):
    # O-PERS-11: of the same shape, other weights.
    other, path = make_model("llama", seed=7), tmp_path / "rows.kv"
    cache = paged(llama, fingerprint=hf.fingerprint(llama))
    forward(llama, tokens(1, 9), cache)
    cache.save(path)
    assert hf.PagedCache.load(path, llama.config, fingerprint=hf.fingerprint(llama)).get_seq_length() == 9
    for fingerprint in (hf.fingerprint(other), ""):
        with pytest.raises(ValueError, match="fingerprint is .* in the file"):
            hf.PagedCache.load(path, other.config, fingerprint=fingerprint)
    with torch.no_grad():  # trained on
        llama.model.layers[2].mlp.down_proj.weight.add_(1e-3)
    assert hf.fingerprint(llama) != cache._fingerprint


@pytest.mark.parametrize("change, named", [(dict(num_hidden_layers=2), "num_hidden_layers is 3 in the file, 2"),
                                           (dict(head_dim=32), "layers is"), (dict(vocab_size=98), "vocab_size"),
                                           (dict(rope_theta=5e5), "rope_parameters")])
def test_the_file_of_another_config_is_refused_by_name(llama, tmp_path, change, named):
    # O-PERS-11
    cache, path = paged(llama), tmp_path / "rows.kv"
    forward(llama, tokens(1, 9), cache)
    cache.save(path)
    other = make_model("llama", **change)
    with pytest.raises(ValueError, match=named):
        hf.PagedCache.load(path, other.config)


def test_what_can_be_used_is_loaded_and_what_cannot_is_refused(llama, tmp_path):
    # O-PERS-12
    path = tmp_path / "rows.kv"
    cache = hf.PagedCache(llama.config, kv_quant="f16", max_context=512)
    forward(llama, tokens(1, 100), cache)
    cache.save(path)
    with pytest.raises(ValueError, match="kv_quant is f16 in the file, q8 was asked"):
        hf.PagedCache.load(path, llama.config, kv_quant="q8")
    assert hf.PagedCache.load(path, llama.config, max_context=256).get_seq_length() == 100
    assert hf.PagedCache.load(path, llama.config, kv_quant="off").get_seq_length() == 100
    forward(llama, tokens(1, 200), cache)
    cache.save(path)
    with pytest.raises(ValueError, match="300 tokens in the file, max_context is 256"):
        hf.PagedCache.load(path, llama.config, max_context=256)
    with pytest.raises(pagedkv.CapacityError):
        hf.PagedCache.load(path, llama.config, num_blocks=3, dynamic=False)


def test_a_cache_is_saved_and_not_pickled(llama):
    with pytest.raises(TypeError, match="save"):
        pickle.dumps(paged(llama))


# --- the example ---------------------------------------------------------------------------------------------------


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[2] / "examples" / "python" / "hf_generate.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
