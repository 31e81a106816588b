"""An mlx-lm model on paged keys and values: the text stays, the bytes shrink, prompts share, the cache can be saved.

    python mlx_generate.py                          # a tiny random model
    python mlx_generate.py PATH_OR_NAME "prompt"    # a model of yours, on the CPU
"""

import copy
import os
import sys
import tempfile
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map_with_path
from mlx_lm.generate import generate_step
from mlx_lm.models import cache as own

import pagedkv.mlx

failures = 0


def expect(claim: object, what: str) -> None:
    global failures
    if not claim:
        print(f"not so: {what}", file=sys.stderr)
        failures += 1


def load(arguments: list[str]) -> tuple[Any, Any, Any]:
    """A model, a prompt as token ids, and what turns ids into text."""
    if arguments:
        import mlx_lm

        model, tokenizer = mlx_lm.load(arguments[0])[:2]
        return model, tokenizer.encode(arguments[1] if len(arguments) > 1 else "Once upon a time"), tokenizer.decode
    from mlx_lm.models import llama

    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs(model_type="llama", vocab_size=128, hidden_size=128, intermediate_size=256,
                                        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                                        rms_norm_eps=1e-5, tie_word_embeddings=False))
    # Larger than a fresh model's weights, so that it does not say the same word for ever.
    model.update(tree_map_with_path(lambda path, x: 2 * x if "proj" in path else x, model.parameters()))
    return model, mx.random.randint(1, 128, (100,)).tolist(), lambda ids: " ".join(map(str, ids))


def generate(model: Any, ids: Any, cache: Any, n_tokens: int) -> Any:
    return [token for token, _ in generate_step(mx.array(ids), model, prompt_cache=cache, max_tokens=n_tokens)]


def total(cache: Any, name: str) -> int:
    return sum(layer.paged_stats().get(name, 0) for layer in cache)


def main(arguments: list[str]) -> int:
    mx.set_default_device(mx.cpu)
    model, ids, decode = load(arguments)

    # What mlx-lm says by itself.
    plain_cache = own.make_prompt_cache(model)
    plain = generate(model, ids, plain_cache, 40)
    print(f"mlx-lm's own: {sum(layer.nbytes for layer in plain_cache) / 1024:.0f} KiB")

    # The same text from blocks, without touching the models: every step is handed dense keys and values.
    cache = pagedkv.mlx.make_prompt_cache(model)
    expect(generate(model, ids, cache, 40) == plain, "blocks in the model's own type give the same text")
    expect(total(cache, "dense_materializations") > 0, "unpatched models read dense")

    # With our attention in the place of theirs, nothing is ever dense; then 8 and 4 bits a value.
    with pagedkv.mlx.patch_attention():
        for kv_quant in ("off", "q8", "q4"):
            cache = pagedkv.mlx.make_prompt_cache(model, kv_quant)
            text = generate(model, ids, cache, 40)
            expect(total(cache, "dense_materializations") == 0, f"{kv_quant} is read packed")
            same = next((i for i, (a, b) in enumerate(zip(text, plain)) if a != b), 40)
            expect(kv_quant != "off" or same == 40 or arguments, "packed reads give the same text")
            print(f"{cache[0].paged_stats()['mode']}: {sum(layer.nbytes for layer in cache) / 1024:.0f} KiB, the first "
                  f"{same} of 40 tokens are the same")
        print(decode(plain))

        # A prompt that many requests begin with: copies share its blocks.
        trunk = pagedkv.mlx.make_prompt_cache(model, "q8")
        mx.eval(model(mx.array([ids]), cache=trunk))
        alone = total(trunk, "bytes_in_use")
        branches = [copy.deepcopy(trunk) for _ in range(4)]
        for first_token, branch in enumerate(branches, start=3):
            generate(model, [first_token], branch, 4)
        shared = total(trunk, "bytes_in_use")
        expect(shared < 4 * alone, "four branches take less than four prompts")
        print(f"one prompt {alone / 1024:.0f} KiB, with four branches {shared / 1024:.0f} KiB")

        # Saved as it is stored, and warm again in another process.
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "prompt.safetensors")
            pagedkv.mlx.save(path, trunk, {"model": type(model).__module__})
            loaded, metadata = pagedkv.mlx.load(path, model, return_metadata=True)
            expect(metadata == {"model": type(model).__module__}, "metadata come back")
            expect(generate(model, [5], loaded, 20) == generate(model, [5], trunk, 20), "it goes on alike")
            print(f"saved and loaded: {os.path.getsize(path) / 1024:.0f} KiB")
    return 0 if failures == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
