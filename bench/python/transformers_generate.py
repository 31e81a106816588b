#!/usr/bin/env python3
"""Decoding in transformers with pagedkv beside transformers' own caches, in turn, on a random llama.

    bench/python/transformers_generate.py [--context 4096] [--tokens 16] [--rounds 7] [--threads N] [--intermediate 2816]

8 layers, 16 query and 4 KV heads of 64, f32, CPU. Prints one JSON array of records on stdout, a table on stderr: the
median of tokens per second of generate() over the rounds, its p10 and p90, and the bytes of K and V.
"""

import argparse
import json
import statistics
import sys
import time
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache, QuantizedCache

import pagedkv.hf


def make_model(attention, intermediate):
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=1024, intermediate_size=intermediate, num_hidden_layers=8,
                         num_attention_heads=16, num_key_value_heads=4, head_dim=64, max_position_embeddings=32768)
    config._attn_implementation = attention
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    return model


class Contender:
    """One cache with the tokens it holds; each round goes on where the last one ended."""

    def __init__(self, name, model, cache, prompt):
        self.name, self.model, self.cache = name, model, cache
        self.rates, self.prefill_seconds = [], 0
        began = time.perf_counter()
        with torch.inference_mode():
            logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        self.prefill_seconds = time.perf_counter() - began
        self.ids = torch.cat([prompt, logits[:, -1].argmax(-1, keepdim=True)], 1)

    def round(self, n_tokens):
        began = time.perf_counter()
        self.ids = self.model.generate(self.ids, cache=self.cache, max_new_tokens=n_tokens, do_sample=False,
                                       attention_mask=torch.ones_like(self.ids), pad_token_id=0)
        self.rates.append(n_tokens / (time.perf_counter() - began))

    def kv_bytes(self):
        if isinstance(self.cache, pagedkv.hf.PagedCache):
            return self.cache.stats()["bytes_in_use"]
        layers = [layer for layer in self.cache.layers if isinstance(layer.keys, torch.Tensor)]
        if any(hasattr(layer, "_quantized_keys") for layer in self.cache.layers):
            return None  # packed inside quanto's own tensors
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("context", 4096), ("tokens", 16), ("rounds", 7), ("threads", 0), ("intermediate", 2816)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.threads:
        torch.set_num_threads(options.threads)
        pagedkv.set_num_threads(options.threads)

    stock, paged = make_model("sdpa", options.intermediate), make_model("pagedkv", options.intermediate)
    prompt = torch.randint(0, 32000, (1, options.context), generator=torch.Generator().manual_seed(1))
    contenders = []
    plans = [("DynamicCache, sdpa", stock, lambda: DynamicCache(config=stock.config))]
    plans += [(f"pagedkv {mode}", paged, lambda mode=mode: pagedkv.hf.PagedCache(paged.config, mode, dynamic=True))
              for mode in ("f32", "q8", "q4")]
    plans += [("QuantizedCache quanto int4", stock, lambda: QuantizedCache("quanto", stock.config, nbits=4))]
    for number, (name, model, make) in enumerate(plans, 1):
        print(f"[{number}/{len(plans)}] prefill of {options.context} tokens: {name}", file=sys.stderr)
        contenders.append(Contender(name, model, make(), prompt))
    for number in range(options.rounds + 1):  # the first is a warm-up
        print(f"\rround {number}/{options.rounds}", end="", file=sys.stderr)
        for contender in contenders:
            contender.round(options.tokens)
    print(file=sys.stderr)

    records, first = [], statistics.median(contenders[0].rates[1:])
    print(f"{'':28} {'tok/s':>8} {'p10':>8} {'p90':>8} {'against the first':>18} {'prefill s':>10} {'K and V MiB':>12}",
          file=sys.stderr)
    for c in contenders:
        rates = sorted(c.rates[1:])
        median, p10, p90 = statistics.median(rates), rates[len(rates) // 10], rates[-1 - len(rates) // 10]
        n_bytes = c.kv_bytes()
        records.append({"case": c.name, "context": options.context, "median_tok_s": median, "p10": p10, "p90": p90,
                        "runs": len(rates), "ratio": median / first, "prefill_s": c.prefill_seconds,
                        "kv_bytes": n_bytes, "tokens": c.ids.shape[1], "threads": torch.get_num_threads()})
        mib = "" if n_bytes is None else f"{n_bytes / 2**20:.1f}"
        print(f"{c.name:28} {median:8.1f} {p10:8.1f} {p90:8.1f} {median / first:17.2f}x {c.prefill_seconds:10.1f} "
              f"{mib:>12}", file=sys.stderr)
    json.dump(records, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
