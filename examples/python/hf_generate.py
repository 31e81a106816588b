"""A transformers model on paged keys and values: the text stays, the bytes shrink, the conversation can be saved.

    python hf_generate.py                          # a tiny random model
    python hf_generate.py PATH_OR_NAME "prompt"    # a model of yours, on the CPU
"""

import os
import sys
import tempfile
import warnings
from typing import Any

warnings.simplefilter("ignore", FutureWarning)  # past_key_values is about to be called cache

import torch
import transformers

import pagedkv.hf
from pagedkv.hf import PagedCache

failures = 0


def expect(claim: object, what: str) -> None:
    global failures
    if not claim:
        print(f"not so: {what}", file=sys.stderr)
        failures += 1


def load(arguments: list[str]) -> tuple[Any, Any, Any]:
    """A model that attends over packed blocks, and a prompt as token ids [1, n]."""
    if arguments:
        tokenizer = transformers.AutoTokenizer.from_pretrained(arguments[0])
        model = transformers.AutoModelForCausalLM.from_pretrained(arguments[0], dtype=torch.float32,
                                                                  attn_implementation="pagedkv")
        prompt = arguments[1] if len(arguments) > 1 else "Once upon a time"
        return model.eval(), tokenizer(prompt, return_tensors="pt").input_ids, tokenizer.decode
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                      initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="pagedkv")
    return model.eval(), torch.randint(1, 128, (1, 100)), lambda ids: " ".join(str(int(i)) for i in ids)


def generate(model: Any, ids: Any, cache: Any, n_tokens: int) -> Any:
    return model.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=n_tokens)


def main(arguments: list[str]) -> int:
    model, ids, decode = load(arguments)
    torch.set_num_threads(min(4, os.cpu_count() or 1))

    # What transformers says by itself.
    model.set_attn_implementation("sdpa")
    plain = generate(model, ids, transformers.DynamicCache(config=model.config), 40)

    # The same text from blocks, exact and never dense; then 8 and 4 bits a value.
    model.set_attn_implementation("pagedkv")
    for kv_quant in ("f32", "q8", "q4"):
        cache = PagedCache(model.config, kv_quant=kv_quant)
        text = generate(model, ids, cache, 40)
        stats = cache.stats()
        expect(stats["dense_materializations"] == 0, f"{kv_quant} is read packed")
        expect(kv_quant != "f32" or torch.equal(text, plain), "f32 blocks give the same text")
        same = int((text == plain)[0].long().cumprod(0).sum()) - ids.shape[1]
        print(f"{kv_quant}: {stats['bytes_in_use'] / 1024:.0f} KiB in use, the first {same} of 40 tokens are the same")
    print(decode(plain[0, ids.shape[1]:]))

    # A prompt that many requests begin with: copies share its blocks.
    prompt = PagedCache(model.config, kv_quant="q8")
    with torch.no_grad():
        model(ids, cache=prompt)
    alone = prompt.stats()["bytes_in_use"]
    branches = [prompt.fork() for _ in range(4)]
    for first_word, branch in enumerate(branches, start=3):
        generate(model, torch.cat([ids, torch.tensor([[first_word]])], 1), branch, 4)
    shared = prompt.stats()["bytes_in_use"]
    expect(shared < 4 * alone, "four branches take less than four prompts")
    print(f"one prompt {alone / 1024:.0f} KiB, with four branches {shared / 1024:.0f} KiB")

    # Saved as it is stored, and warm again in another process.
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "conversation.safetensors")
        identity = pagedkv.hf.fingerprint(model)
        cache = PagedCache(model.config, kv_quant="q8", fingerprint=identity)
        half = generate(model, ids, cache, 20)
        cache.save(path)
        loaded = PagedCache.load(path, model.config, fingerprint=identity)
        expect(torch.equal(generate(model, half, loaded, 20), generate(model, half, cache, 20)), "it goes on alike")
        print(f"saved and loaded: {os.path.getsize(path) / 1024:.0f} KiB")
    return 0 if failures == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
