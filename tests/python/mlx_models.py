"""Tiny mlx-lm models and what tests ask of them.

They are random, their weights large enough that a wrong key changes the text. Nothing is downloaded.
"""

import contextlib

import numpy as np
import pytest

mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")

import pagedkv.mlx as paged
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma2, gemma3_text, gpt_oss, llama, plamo3, qwen3_next
from pagedkv.mlx import scaled_dot_product_attention

BLOCK = 4  # small, so that short texts cross many blocks
WINDOW = 6
VOCAB = 101
COMMON = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
              rms_norm_eps=1e-5, vocab_size=VOCAB)
MIXED = ["full_attention", "sliding_attention"] * 2


def make_model(name, dtype=mx.float32, seed=3):
    module, options = {
        "llama": (llama, dict(num_hidden_layers=3, tie_word_embeddings=False)),
        "sliding_llama": (llama, dict(num_hidden_layers=4, layer_types=MIXED, sliding_window=WINDOW,
                                      tie_word_embeddings=False)),
        "gemma3_text": (gemma3_text, dict(num_hidden_layers=6, query_pre_attn_scalar=16, sliding_window=WINDOW,
                                          sliding_window_pattern=3)),
        # Caps its logits itself, so it reads K and V itself.
        "gemma2": (gemma2, dict(num_hidden_layers=2, query_pre_attn_scalar=16)),
        # Its masks are one key wider than its caches.
        "plamo3": (plamo3, dict(num_hidden_layers=3, sliding_window_pattern=3, window_size=WINDOW)),
        # Attention sinks.
        "gpt_oss": (gpt_oss, dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED[::-1],
                                  num_local_experts=4, num_experts_per_tok=2)),
        # Every other layer is recurrent.
        "qwen3_next": (qwen3_next, dict(num_hidden_layers=4, full_attention_interval=2, linear_num_value_heads=4,
                                        linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
                                        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
                                        decoder_sparse_step=1, shared_expert_intermediate_size=32, mlp_only_layers=[],
                                        moe_intermediate_size=32, rope_theta=1e4, partial_rotary_factor=0.5,
                                        max_position_embeddings=512)),
    }[name]
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(COMMON | options | {"model_type": name}))
    model.update(tree_map_with_path(lambda path, x: 3 * x if "proj" in path else x, model.parameters()))
    if name == "gpt_oss":
        for layer in model.layers:
            layer.self_attn.sinks = mx.random.normal(layer.self_attn.sinks.shape)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name, dtype=mx.float32):
        if (name, dtype) not in made:
            made[name, dtype] = make_model(name, dtype)
        return made[name, dtype]

    return get


@pytest.fixture(autouse=True)
def nothing_stays_patched():
    yield
    left = paged.attention._patches
    while paged.attention._patches:
        paged.unpatch_attention()
    assert left == 0 and paged.attention._replaced is None


def tokens(n, seed=1):
    return np.random.default_rng(seed).integers(1, VOCAB, n).tolist()


def make(model, kv_quant=None, **options):
    return paged.make_prompt_cache(model, kv_quant, **{"block_size": BLOCK} | options)


def say(model, cache, prompt, n=20, **options):
    """Greedy tokens."""
    steps = generate_step(mx.array(prompt), model, prompt_cache=cache, max_tokens=n, **options)
    return [token for token, _ in steps]


def logits(model, cache, *chunks):
    out = [model(mx.array([chunk]), cache=cache)[0] for chunk in chunks]
    return np.array(mx.concatenate(out).astype(mx.float32))


def patched(packed):
    return paged.patch_attention() if packed else contextlib.nullcontext()


def count(cache, name):
    """A counter over all layers; kernel calls by the prefix of their path."""
    total = 0
    for layer in cache:
        stats = layer.paged_stats()
        total += (sum(n for path, n in stats.get("kernel_calls", {}).items() if path.startswith("attend"))
                  if name == "attend" else stats.get(name, 0))
    return total


def rows(n, value=None, heads=2, dim=8, seed=0, dtype=mx.float32):
    """[1, heads, n, dim]: random, or value(i) in all of token i."""
    if value is None:
        return mx.array(np.random.default_rng(seed).standard_normal((1, heads, n, dim)), dtype)
    return mx.broadcast_to(mx.array([value(i) for i in range(n)], dtype)[None, None, :, None], (1, heads, n, dim))


def attend(cache, k, v, q):
    """What an attention layer of a patched model does."""
    mask = cache.make_mask(k.shape[2])
    keys, values = cache.update_and_fetch(k, v)
    return scaled_dot_product_attention(q, keys, values, cache=cache, scale=q.shape[3] ** -0.5, mask=mask)


# The same call from a module that is not patched.
fetch_dense = eval("lambda cache, keys, values: cache.update_and_fetch(keys, values)", {})
