#!/usr/bin/env python3
"""Writes the tiny random models of the engine's tests.   make_gguf.py DIRECTORY [NAME...]

Weights are float32 and random, but the same on every machine; the vocabulary is the smallest that libllama loads
(an SPM one with byte tokens). tests/engine/files.h lists the files.
"""
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, RopeScalingType, TokenType

N_PIECES = 320

GEMMA = dict(arch="gemma3", tied=True, head_norms=True, post_norms=True)

# n_embd is heads * head_dim unless given.
MODELS = {
    "d64_gqa3_tied": dict(heads=3, kv_heads=1, head_dim=64, tied=True),
    "d64_gqa1_untied": dict(heads=2, kv_heads=2, head_dim=64),
    "d80_gqa1_untied": dict(heads=2, kv_heads=2, head_dim=80),
    "d128_gqa4_linear": dict(heads=4, kv_heads=1, head_dim=128, n_embd=192, scaling=RopeScalingType.LINEAR, factor=4.0),
    "d64_gqa7_llama3": dict(heads=7, kv_heads=1, head_dim=64, tied=True, llama3=True),
    "d64_gqa4_yarn": dict(heads=8, kv_heads=2, head_dim=64, scaling=RopeScalingType.YARN, factor=4.0, original=64),
    "d64_gqa3_none": dict(heads=3, kv_heads=1, head_dim=64, scaling=RopeScalingType.NONE, factor=4.0),
    "d64_gqa4_biases": dict(heads=4, kv_heads=1, head_dim=64, biases=True),
    "qwen2_d64_gqa7_tied": dict(arch="qwen2", heads=7, kv_heads=1, head_dim=64, tied=True, biases="qkv", base=1e6),
    "qwen2_d64_gqa2_untied": dict(arch="qwen2", heads=4, kv_heads=2, head_dim=64, biases="qkv", output_bias=True),
    "qwen3_d128_gqa2": dict(arch="qwen3", heads=4, kv_heads=2, head_dim=128, n_embd=160, tied=True, head_norms=True,
                            base=1e6),
    "qwen3_d64_yarn": dict(arch="qwen3", heads=2, kv_heads=2, head_dim=64, head_norms=True,
                           scaling=RopeScalingType.YARN, factor=4.0, original=64),
    # Every sixth layer sees all, as in the released models.
    "gemma3_window8": dict(GEMMA, heads=4, kv_heads=1, head_dim=64, n_embd=96, layers=7, window=8, base=1e6),
    "gemma3_window16_pattern3": dict(GEMMA, heads=2, kv_heads=2, head_dim=96, n_embd=128, layers=4, window=16,
                                     pattern=3, window_base=5000.0, scaling=RopeScalingType.LINEAR, factor=8.0,
                                     final_softcap=3.0),
    "gemma3_window11_listed": dict(GEMMA, heads=4, kv_heads=2, head_dim=256, n_embd=96, layers=3, window=11,
                                   pattern=[True, False, True], tied=False),
    "gemma3_window40_all": dict(GEMMA, heads=3, kv_heads=1, head_dim=64, layers=2, window=40, pattern=0),
    "gemma3_no_window": dict(GEMMA, heads=2, kv_heads=1, head_dim=64, layers=2, window=0, rotated=32),
    "d64_wide": dict(heads=4, kv_heads=1, head_dim=64, n_ff=256, layers=1, tied=True),  # rows of 256, as K-quants want
    # Vocabularies that cannot spell everything: letters and no bytes; bytes, but few of them.
    "spm_letters": dict(heads=1, kv_heads=1, head_dim=64, layers=1, vocabulary="letters"),
    "bpe_few_bytes": dict(heads=1, kv_heads=1, head_dim=64, layers=1, vocabulary="few bytes"),
    "d64_longest_context": dict(heads=2, kv_heads=1, head_dim=64, layers=1, context=2**31 - 1),
    "d64_long_context": dict(heads=2, kv_heads=1, head_dim=64, context=1048576),
}


def llama3_factors(n, base, factor=8.0, low=1.0, high=4.0, original=128):
    """How Llama 3.1 stretches slow rotations: 1 for fast ones, `factor` for slow ones, a ramp between."""
    wavelength = 2 * np.pi * base ** (np.arange(0, n, 2) / n)
    smooth = (original / wavelength - low) / (high - low)
    ramp = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, ramp))


def write(path, name, *, heads, kv_heads, head_dim, n_embd=None, layers=2, n_ff=160, context=512, tied=False,
          scaling=None, factor=None, original=None, llama3=False, biases=False, base=10000.0, arch="llama",
          output_bias=False, head_norms=False, post_norms=False, window=None, pattern=None, window_base=None,
          final_softcap=None, rotated=None, vocabulary="bytes"):
    n_embd = n_embd or heads * head_dim
    random = np.random.default_rng(sum(name.encode()))

    def matrix(n_in, n_out, gain=1.0):
        return (random.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def norm(width=n_embd, mean=1.0):
        return (mean * (1 + 0.2 * random.standard_normal(width))).astype(np.float32)

    w = GGUFWriter(path, arch)
    w.add_name(name)
    w.add_type("model")
    w.add_context_length(context)
    w.add_embedding_length(n_embd)
    w.add_block_count(layers)
    w.add_feed_forward_length(n_ff)
    w.add_head_count(heads)
    w.add_head_count_kv(kv_heads)
    w.add_key_length(head_dim)
    w.add_value_length(head_dim)
    w.add_rope_dimension_count(rotated or head_dim)
    w.add_rope_freq_base(base)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_vocab_size(N_PIECES)
    w.add_expert_count(0)
    if scaling is not None:
        w.add_rope_scaling_type(scaling)
    if factor is not None:
        w.add_rope_scaling_factor(factor)
    if original is not None:
        w.add_rope_scaling_orig_ctx_len(original)

    if window is not None:
        w.add_sliding_window(window)
    if pattern is not None:
        w.add_sliding_window_pattern(pattern)
    if window_base is not None:
        w.add_rope_freq_base_swa(window_base)
    if final_softcap is not None:
        w.add_final_logit_softcapping(final_softcap)
        w.add_attn_logit_softcapping(0.0)  # off

    pieces = ["<unk>", "<s>", "</s>"]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
    if vocabulary == "bytes":
        pieces += [f"<0x{b:02X}>" for b in range(256)]
        kinds += [TokenType.BYTE] * 256
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    if vocabulary == "few bytes":
        words = ["\u0120"] + letters + list("0123456789[]\",:-") + ["\u00c3", "\u00a9"[:1], "ab", "abc", "\u0120a"]
    else:
        words = ["\u2581"] + letters + ["\u2581" + c for c in letters]
        if vocabulary == "letters":
            words += [c.upper() for c in letters] + ["\u2581He"]
    words += [f"w{i}" for i in range(N_PIECES - len(pieces) - len(words))]
    pieces += words
    kinds += [TokenType.NORMAL] * len(words)
    if vocabulary == "few bytes":
        w.add_tokenizer_model("gpt2")
        w.add_token_merges(["a b", "ab c", "\u0120 a"])
        w.add_add_bos_token(False)
    else:
        w.add_tokenizer_model("llama")
        w.add_token_scores([-float(i) for i in range(len(pieces))])
    w.add_tokenizer_pre("default")
    w.add_token_list(pieces)
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)

    # Gemma scales the embedding by sqrt(n_embd) itself.
    w.add_tensor("token_embd.weight", matrix(n_embd, N_PIECES, gain=1 if arch == "gemma3" else np.sqrt(n_embd)))
    w.add_tensor("output_norm.weight", norm())
    if not tied:
        w.add_tensor("output.weight", matrix(n_embd, N_PIECES))
    if output_bias:
        w.add_tensor("output.bias", (0.3 * random.standard_normal(N_PIECES)).astype(np.float32))
    if llama3:
        w.add_tensor("rope_freqs.weight", llama3_factors(head_dim, base).astype(np.float32))
    for layer in range(layers):
        # Larger q and k than usual: attention that is not almost uniform shows errors of position and mask.
        matrices = {
            "attn_q": (n_embd, heads * head_dim, 1.6), "attn_k": (n_embd, kv_heads * head_dim, 1.6),
            "attn_v": (n_embd, kv_heads * head_dim, 1.0), "attn_output": (heads * head_dim, n_embd, 1.0),
            "ffn_gate": (n_embd, n_ff, 1.0), "ffn_up": (n_embd, n_ff, 1.0), "ffn_down": (n_ff, n_embd, 1.0),
        }
        w.add_tensor(f"blk.{layer}.attn_norm.weight", norm())
        w.add_tensor(f"blk.{layer}.ffn_norm.weight", norm())
        if head_norms:  # heads of length 1.6 instead of matrices that make them so
            w.add_tensor(f"blk.{layer}.attn_q_norm.weight", norm(head_dim, 1.6))
            w.add_tensor(f"blk.{layer}.attn_k_norm.weight", norm(head_dim, 1.6))
        if post_norms:
            w.add_tensor(f"blk.{layer}.post_attention_norm.weight", norm())
            # ggml looks GELU up in a table of half precision, where the smallest difference can choose the neighbour:
            # libllama's own logits differ by 1e-3 between chunk sizes. A feed-forward that adds less leaves the
            # tests sharp.
            w.add_tensor(f"blk.{layer}.post_ffw_norm.weight", norm(mean=0.25))
        for key, (n_in, n_out, gain) in matrices.items():
            w.add_tensor(f"blk.{layer}.{key}.weight", matrix(n_in, n_out, gain))
            if biases is True or biases and key in ("attn_q", "attn_k", "attn_v"):
                w.add_tensor(f"blk.{layer}.{key}.bias", (0.3 * random.standard_normal(n_out)).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in MODELS.items():
        if sys.argv[2:] and name not in sys.argv[2:]:
            continue
        write(folder / f"{name}.gguf", name, **options)


if __name__ == "__main__":
    main()
