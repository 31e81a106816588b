#!/usr/bin/env python3
"""Decoding in transformers with pagedkv beside transformers' own caches, in turn, on a random llama.

    bench/python/transformers_generate.py [--context 4096] [--batch 1] [--linear torch|onednn] [--tokens 16] [--rounds 7]
                                          [--threads N] [--intermediate 2816] [--vocab 32000]

8 layers, 16 query and 4 KV heads of 64, f32, CPU. Every cache has a process of its own, for what one leaves in the
allocator changes what a growing tensor costs the next; their rounds take turns, and the first is a warm-up. Prints one
JSON array of records on stdout, a table on stderr: the median over the rounds of all rows' tokens per second of
generate(), its p10 and p90, page faults a step, and the bytes of K and V.

--linear onednn runs the model's linear layers, for every cache, through the packed oneDNN operator that torch.compile
chooses when it freezes a model: torch.nn.Linear itself takes MKL, which on CPUs of AMD multiplies a few rows on one
thread at less than half of what memory gives, so that a step is mostly weights, whatever the cache does.
"""

import argparse
import json
import multiprocessing
import resource
import statistics
import sys
import time
import warnings

LLAMA = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
         "head_dim": 64, "max_position_embeddings": 32768}
CONTENDERS = {"DynamicCache, sdpa": "dynamic", "pagedkv f32": "f32", "pagedkv q8": "q8", "pagedkv q4": "q4",
              "QuantizedCache quanto int4": "quanto"}


def pack_linear(module, n_rows):
    """Every torch.nn.Linear below `module` as torch's packed oneDNN operator, for decoding n_rows at once."""
    import torch

    class PackedLinear(torch.nn.Module):
        def __init__(self, linear):
            super().__init__()
            self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), n_rows)

        def forward(self, x):
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")

    for name, child in module.named_children():
        if isinstance(child, torch.nn.Linear):
            setattr(module, name, PackedLinear(child))
        else:
            pack_linear(child, n_rows)


class Contender:
    """A model and one cache with the tokens it holds; each round goes on where the last one ended."""

    def __init__(self, kind, options):
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.cache_utils import DynamicCache, QuantizedCache

        import pagedkv.hf
        warnings.simplefilter("ignore")
        if options.threads:
            torch.set_num_threads(options.threads)
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=options.vocab, intermediate_size=options.intermediate, **LLAMA)
        config._attn_implementation = "pagedkv" if kind in ("f32", "q8", "q4") else "sdpa"
        self.model = LlamaForCausalLM(config).eval()
        self.model.generation_config.eos_token_id = None
        if kind == "dynamic":
            self.cache = DynamicCache(config=config)
        elif kind == "quanto":
            self.cache = QuantizedCache("quanto", config, nbits=4)
        else:
            self.cache = pagedkv.hf.PagedCache(config, kind, dynamic=True)
        self.ids = torch.randint(0, options.vocab, (options.batch, options.context),
                                 generator=torch.Generator().manual_seed(1))
        began = time.perf_counter()
        with torch.inference_mode():  # the last token is the first round's
            self.model.model(self.ids[:, :-1], past_key_values=self.cache, use_cache=True)
        self.prefill_s = time.perf_counter() - began
        if options.linear == "onednn":
            pack_linear(self.model, options.batch)

    def round(self, n_tokens):
        """(tokens per second, page faults a step)"""
        import torch
        faults, began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter()
        self.ids = self.model.generate(self.ids, cache=self.cache, max_new_tokens=n_tokens, do_sample=False,
                                       attention_mask=torch.ones_like(self.ids), pad_token_id=0)
        seconds = time.perf_counter() - began
        return (n_tokens * len(self.ids) / seconds,
                (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / n_tokens)

    def kv_bytes(self):
        import torch

        import pagedkv.hf
        if isinstance(self.cache, pagedkv.hf.PagedCache):
            return self.cache.stats()["bytes_in_use"]
        if any(hasattr(layer, "_quantized_keys") for layer in self.cache.layers):
            return None  # packed inside quanto's own tensors
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.cache.layers
                   if isinstance(layer.keys, torch.Tensor))


def contend(kind, options, pipe):
    """A contender's process: prefills, then one round for each message, the last is None."""
    contender = Contender(kind, options)
    pipe.send(contender.prefill_s)
    while (n_tokens := pipe.recv()) is not None:
        pipe.send(contender.round(n_tokens))
    pipe.send(contender.kv_bytes())


def measure(options):
    spawn = multiprocessing.get_context("spawn")
    records, pipes, results = [], [], []
    for number, (name, kind) in enumerate(CONTENDERS.items(), 1):
        print(f"[{number}/{len(CONTENDERS)}] prefill of {options.batch} x {options.context} tokens: {name}",
              file=sys.stderr)
        pipe, theirs = spawn.Pipe()
        spawn.Process(target=contend, args=(kind, options, theirs), daemon=True).start()
        theirs.close()  # so that a process that died is an EOFError
        records.append({"case": name, **vars(options), "prefill_s": pipe.recv()})
        pipes.append(pipe)
        results.append([])
    for number in range(options.rounds + 1):
        print(f"\rround {number}/{options.rounds}", end="", file=sys.stderr)
        for pipe, result in zip(pipes, results):
            pipe.send(options.tokens)
            result.append(pipe.recv())
    print(file=sys.stderr)
    for record, pipe, result in zip(records, pipes, results):
        pipe.send(None)
        rates = sorted(rate for rate, _ in result[1:])
        record |= {"kv_bytes": pipe.recv(), "median_tok_s": statistics.median(rates), "runs": len(rates),
                   "p10": rates[len(rates) // 10], "p90": rates[-1 - len(rates) // 10],
                   "faults_a_step": statistics.median(faults for _, faults in result[1:])}
        record["ratio"] = record["median_tok_s"] / records[0]["median_tok_s"]
    return records


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("context", 4096), ("batch", 1), ("tokens", 16), ("rounds", 7), ("threads", 0),
                          ("intermediate", 2816), ("vocab", 32000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--linear", choices=("torch", "onednn"), default="torch")
    records = measure(parser.parse_args())
    print(f"{'':28} {'tok/s':>8} {'p10':>8} {'p90':>8} {'against the first':>18} {'prefill s':>10} {'faults/step':>12} "
          f"{'K and V MiB':>12}", file=sys.stderr)
    for r in records:
        mib = "" if r["kv_bytes"] is None else f"{r['kv_bytes'] / 2**20:.1f}"
        print(f"{r['case']:28} {r['median_tok_s']:8.1f} {r['p10']:8.1f} {r['p90']:8.1f} {r['ratio']:17.2f}x "
              f"{r['prefill_s']:10.1f} {r['faults_a_step']:12.0f} {mib:>12}", file=sys.stderr)
    json.dump(records, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
