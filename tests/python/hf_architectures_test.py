"""Architectures of transformers, made small by config: the greedy text of DynamicCache, or a refusal by name."""

import functools

import pytest
from hf_models import BLOCK, WINDOW, left_padded, one_thread, pytestmark, tokens, torch, transformers

import pagedkv.hf as hf
from transformers import DynamicCache

N = 12  # new tokens: every prompt passes a window
COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
              initializer_range=0.3, max_position_embeddings=256, tie_word_embeddings=False, eos_token_id=None,
              bos_token_id=None, pad_token_id=0)
GROUPED = COMMON | dict(num_key_value_heads=2, head_dim=16)
GPT = COMMON | dict(n_layer=2, n_head=4, n_embd=64, n_positions=256, n_ctx=256, n_inner=96)
SLIDING = GROUPED | dict(sliding_window=WINDOW)
MIXED = SLIDING | dict(layer_types=["sliding_attention", "full_attention"])
EXPERTS = dict(num_experts=4, num_local_experts=4, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
               shared_expert_intermediate_size=32, n_shared_experts=1, n_group=1, topk_group=1)
DECODER = COMMON | dict(is_decoder=True)
SEQ2SEQ = COMMON | dict(is_decoder=True, d_model=64, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=96,
                        encoder_layers=1, encoder_attention_heads=4, encoder_ffn_dim=96)
LATENTS = COMMON | EXPERTS | dict(num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
                                  qk_nope_head_dim=16, v_head_dim=16, first_k_dense_replace=1)
HYBRID = GROUPED | EXPERTS | dict(layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                                  linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16)
MAMBA = dict(mamba_n_heads=4, mamba_d_head=32, mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16)

PACKED = "the blocks are read as they are"
DENSE = "the model has attention of its own, whatever attn_implementation says, and is handed dense K and V"
NO_MASK = "the model asks for a mask that is not plainly causal"  # the stock attentions run
NO_LATENTS = "stores latents that attn_implementation=\"pagedkv\" cannot attend to"  # the stock attentions run
NO_TENSOR = "was called on packed keys or values"  # the stock attentions run
NO_STATE = "supported are full_attention, sliding_attention and chunked_attention"  # by PagedCache itself

ARCHITECTURES = {
    "afmoe": (PACKED, MIXED | EXPERTS),
    "apertus": (PACKED, GROUPED),
    "arcee": (PACKED, GROUPED),
    "aria_text": (PACKED, GROUPED | EXPERTS),
    "biogpt": (PACKED, COMMON),
    "bitnet": (PACKED, GROUPED),
    "codegen": (PACKED, GPT | dict(rotary_dim=8)),
    "cohere": (PACKED, GROUPED),
    "cohere2": (PACKED, MIXED),
    "ctrl": (PACKED, GPT | dict(dff=96)),
    "cwm": (PACKED, MIXED | dict(bos_token_id=1, eos_token_id=2)),
    "dots1": (PACKED, GROUPED | EXPERTS),
    "ernie4_5": (PACKED, GROUPED),
    "exaone4": (PACKED, MIXED),
    "flex_olmo": (PACKED, GROUPED | EXPERTS),
    "gemma": (PACKED, GROUPED),
    "gemma2": (PACKED, MIXED | dict(query_pre_attn_scalar=16, attn_logit_softcapping=5.0)),
    "gemma3_text": (PACKED, MIXED | dict(query_pre_attn_scalar=16)),
    "gemma3n_text": (PACKED, MIXED | dict(num_hidden_layers=4, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                                          vocab_size_per_layer_input=97, laurel_rank=8, intermediate_size=[96] * 4,
                                          activation_sparsity_pattern=None,
                                          layer_types=["sliding_attention", "full_attention"] * 2)),
    "gemma4_text": (PACKED, MIXED | dict(num_hidden_layers=6, num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                                         vocab_size_per_layer_input=97, global_head_dim=32,
                                         layer_types=["sliding_attention", "full_attention"] * 3)),
    "glm": (PACKED, GROUPED),
    "glm4": (PACKED, GROUPED),
    "glm4_moe": (PACKED, GROUPED | EXPERTS),
    "gpt2": (PACKED, GPT),
    "gpt_bigcode": (PACKED, GPT),  # multi_query
    "gpt_neox": (PACKED, COMMON),
    "gpt_oss": (PACKED, MIXED | EXPERTS | dict(rope_parameters=None)),
    "gptj": (PACKED, GPT | dict(rotary_dim=8)),
    "granite": (PACKED, GROUPED),
    "granitemoe": (PACKED, GROUPED | EXPERTS),
    "helium": (PACKED, GROUPED),
    # Runs its layers several times a forward, which makes much of small differences: smaller weights.
    "hrm_text": (PACKED, COMMON | dict(initializer_range=0.1)),
    "hunyuan_v1_dense": (PACKED, GROUPED),
    "jais2": (PACKED, GROUPED),
    "llama": (PACKED, GROUPED),
    "minimax_m2": (PACKED, GROUPED | EXPERTS),
    "ministral": (PACKED, MIXED),
    "mistral": (PACKED, SLIDING),
    "mixtral": (PACKED, SLIDING | EXPERTS),
    "modernbert-decoder": (PACKED, COMMON | dict(sliding_window=WINDOW, bos_token_id=1, eos_token_id=2, cls_token_id=1,
                                                 sep_token_id=2, layer_types=MIXED["layer_types"])),
    "nanochat": (PACKED, GROUPED),
    "nemotron": (PACKED, GROUPED),
    "olmo": (PACKED, GROUPED),
    "olmo2": (PACKED, GROUPED),
    "olmo3": (PACKED, MIXED),
    "olmoe": (PACKED, GROUPED | EXPERTS),
    "opt": (PACKED, COMMON | dict(ffn_dim=96, word_embed_proj_dim=64)),
    "persimmon": (PACKED, COMMON),
    "phi": (PACKED, GROUPED),
    "phi3": (PACKED, SLIDING),
    "phimoe": (PACKED, SLIDING | EXPERTS),
    "qwen2": (PACKED, MIXED | dict(use_sliding_window=True)),
    "qwen2_moe": (PACKED, MIXED | EXPERTS | dict(use_sliding_window=True)),
    "qwen3": (PACKED, MIXED | dict(use_sliding_window=True)),
    "qwen3_moe": (PACKED, GROUPED | EXPERTS),
    "roberta": (PACKED, DECODER),
    "seed_oss": (PACKED, GROUPED),
    "smollm3": (PACKED, MIXED | dict(use_sliding_window=True, no_rope_layers=[1, 0])),
    "stablelm": (PACKED, GROUPED),
    "starcoder2": (PACKED, SLIDING),
    "vaultgemma": (PACKED, MIXED | dict(query_pre_attn_scalar=16)),
    "bloom": (DENSE, COMMON | dict(n_layer=2, n_head=4)),
    "falcon": (DENSE, COMMON | dict(alibi=False)),  # multi_query
    "gpt_neo": (DENSE, COMMON | dict(num_layers=2, num_heads=4, window_size=WINDOW,
                                     attention_types=[[["global", "local"], 1]])),
    "mpt": (DENSE, COMMON | dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=256)),
    "xglm": (DENSE, dict(vocab_size=97, d_model=64, ffn_dim=96, num_layers=2, attention_heads=4, init_std=0.3,
                         eos_token_id=None, bos_token_id=None, pad_token_id=0)),
    "bart": (NO_MASK, SEQ2SEQ),
    "doge": (NO_MASK, GROUPED),
    "llama4_text": (NO_MASK, GROUPED | EXPERTS | dict(attention_chunk_size=WINDOW, no_rope_layers=[1, 0],
                                                      interleave_moe_layer_step=2, intermediate_size_mlp=96,
                                                      layer_types=["chunked_attention", "full_attention"])),
    "deepseek_v2": (NO_LATENTS, LATENTS),
    "deepseek_v3": (NO_LATENTS, LATENTS),
    "diffllama": (NO_TENSOR, GROUPED),
    "jetmoe": (NO_TENSOR, GROUPED | EXPERTS | dict(kv_channels=16)),
    "bamba": (NO_STATE, GROUPED | MAMBA | dict(attn_layer_indices=[1])),
    "jamba": (NO_STATE, GROUPED | EXPERTS | dict(attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8,
                                                 use_mamba_kernels=False)),
    "lfm2": (NO_STATE, GROUPED | dict(layer_types=["conv", "full_attention"])),
    "mamba": (NO_STATE, COMMON | dict(state_size=8)),
    "qwen3_next": (NO_STATE, HYBRID),
}


@functools.cache
def model_of(name):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **ARCHITECTURES[name][1])
    config.eos_token_id = None
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert sum(p.numel() for p in model.parameters()) < 2**20, "it is not small"
    return model


def answer(model, attn, ids, mask, cache):
    """Greedy text and the logits that chose it, [rows, N, vocabulary]."""
    model.set_attn_implementation(attn)
    said = model.generate(ids, cache=cache, attention_mask=mask, do_sample=False, max_new_tokens=N, pad_token_id=0,
                          output_logits=True, return_dict_in_generate=True)
    return said.sequences, torch.stack(said.logits, 1)


def expect_the_same(model, attn, ids, mask, expected, packed):
    sequences, logits = expected
    cache = hf.PagedCache(model.config, block_size=BLOCK)
    text, found = answer(model, attn, ids, mask, cache)
    assert torch.equal(text, sequences)
    # A text may have one word only: the logits tell more.
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-3 * float(logits.abs().max()))
    assert (cache.stats()["dense_materializations"] == 0) == packed
    cache.verify()


def test_there_are_sixty():
    assert len(ARCHITECTURES) >= 60 and sum(how is PACKED for how, _ in ARCHITECTURES.values()) >= 60


@pytest.mark.filterwarnings("ignore")  # of transformers, about single models
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "left_padded"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_text_is_dynamic_cache_s_or_there_is_a_refusal_by_name(name, padded):
    how = ARCHITECTURES[name][0]
    model = model_of(name)
    ids, mask = left_padded(13, 4, 9) if padded else (tokens(1, 13), torch.ones(1, 13, dtype=torch.long))
    if how is NO_STATE:
        with pytest.raises(ValueError, match=rf"layer \d of {name} is of type \w+; {how}"):
            hf.PagedCache(model.config)
        return
    expected = answer(model, "eager", ids, mask, DynamicCache(config=model.config))
    expect_the_same(model, "eager", ids, mask, expected, packed=False)
    if how in (PACKED, DENSE):
        expect_the_same(model, hf.NAME, ids, mask, expected, packed=how is PACKED)
        return
    cache = hf.PagedCache(model.config)
    with pytest.raises((ValueError, TypeError), match=how):
        answer(model, hf.NAME, ids, mask, cache)
    assert cache.get_seq_length() == 0
