"""PagedCache in transformers: the same text as DynamicCache, packed reads, quantized rows."""

import os
import pathlib
import subprocess
import sys
import types

import pytest
from hf_models import (
    BLOCK, STOCK, dynamic, left_padded, llama, logits, make_model, models, one_layer, paged, pytestmark, say, tokens,
    torch, transformers,
)

import pagedkv
import pagedkv.hf as hf
from transformers import DynamicCache


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


@pytest.mark.filterwarnings("ignore:attn_implementation:RuntimeWarning")
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_without_a_paged_cache_sdpa_answers(models, name):
    model, (ids, mask) = models(name), left_padded(13, 4, 9)

    def answers(attn):
        model.set_attn_implementation(attn)
        with torch.no_grad():
            scored = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        return scored, model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=20)

    scored, text = answers(hf.NAME)
    expected, expected_text = answers("sdpa")
    assert torch.allclose(scored, expected, atol=1e-4) and torch.equal(text, expected_text)


def test_sdpa_in_our_place_is_noticed_once(llama, monkeypatch):
    monkeypatch.setitem(hf.attention.__globals__, "_noticed", False)
    llama.set_attn_implementation(hf.NAME)
    with pytest.warns(RuntimeWarning, match="without a PagedCache: sdpa answers") as notices:
        for _ in range(2):
            llama(tokens(1, 3), use_cache=False)
    assert len([n for n in notices if n.category is RuntimeWarning]) == 1


def test_its_layers_can_be_walked(llama):
    cache, own = paged(llama), dynamic(llama)
    logits(llama, "sdpa", cache, tokens(1, 9)), logits(llama, "sdpa", own, tokens(1, 9))
    for (k, v, window), (own_k, own_v, _) in zip(cache, own, strict=True):
        assert torch.equal(k, own_k) and torch.equal(v, own_v) and window is None


@pytest.mark.parametrize("multi_query", [True, False])
def test_falcon_s_single_head_is_seen(multi_query):
    config = transformers.FalconConfig(vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
                                       multi_query=multi_query, alibi=False, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.FalconForCausalLM(config).eval()
    ids = tokens(1, 9)
    assert torch.equal(say(model, "sdpa", ids, paged(model)), say(model, "sdpa", ids, dynamic(model)))


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


# --- the example ---------------------------------------------------------------------------------------------------


def test_the_example_runs():
    example = pathlib.Path(__file__).parents[2] / "examples" / "python" / "hf_generate.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
