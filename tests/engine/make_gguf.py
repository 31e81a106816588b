#!/usr/bin/env python3
"""Writes the tiny random llama models of the engine's tests.   make_gguf.py DIRECTORY

Weights are float32 and random, but the same on every machine; the vocabulary is the smallest that libllama loads
(an SPM one with byte tokens). tests/engine/tiny_models.h lists the files.
"""
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, RopeScalingType, TokenType

N_PIECES = 320

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
    "d64_long_context": dict(heads=2, kv_heads=1, head_dim=64, context=1048576),
}


def llama3_factors(n, base, factor=8.0, low=1.0, high=4.0, original=128):
    """How Llama 3.1 stretches slow rotations: 1 for fast ones, `factor` for slow ones, a ramp between."""
    wavelength = 2 * np.pi * base ** (np.arange(0, n, 2) / n)
    smooth = (original / wavelength - low) / (high - low)
    ramp = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelength < original / high, 1.0, np.where(wavelength > original / low, factor, ramp))


def write(path, name, *, heads, kv_heads, head_dim, n_embd=None, layers=2, n_ff=160, context=512, tied=False,
          scaling=None, factor=None, original=None, llama3=False, biases=False, base=10000.0):
    n_embd = n_embd or heads * head_dim
    random = np.random.default_rng(sum(name.encode()))

    def matrix(n_in, n_out, gain=1.0):
        return (random.standard_normal((n_out, n_in)) * gain / np.sqrt(n_in)).astype(np.float32)

    def norm():
        return (1 + 0.2 * random.standard_normal(n_embd)).astype(np.float32)

    w = GGUFWriter(path, "llama")
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
    w.add_rope_dimension_count(head_dim)
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

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = ["\u2581"] + letters + ["\u2581" + c for c in letters]
    words += [f"w{i}" for i in range(N_PIECES - len(pieces) - len(words))]
    pieces += words
    kinds += [TokenType.NORMAL] * len(words)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list(pieces)
    w.add_token_scores([-float(i) for i in range(len(pieces))])
    w.add_token_types(kinds)
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)

    w.add_tensor("token_embd.weight", matrix(n_embd, N_PIECES, gain=np.sqrt(n_embd)))
    w.add_tensor("output_norm.weight", norm())
    if not tied:
        w.add_tensor("output.weight", matrix(n_embd, N_PIECES))
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
        for key, (n_in, n_out, gain) in matrices.items():
            w.add_tensor(f"blk.{layer}.{key}.weight", matrix(n_in, n_out, gain))
            if biases:
                w.add_tensor(f"blk.{layer}.{key}.bias", (0.3 * random.standard_normal(n_out)).astype(np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, options in MODELS.items():
        write(folder / f"{name}.gguf", name, **options)


if __name__ == "__main__":
    main()
