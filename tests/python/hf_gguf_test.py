"""Real models in transformers, from GGUF files: the logits of DynamicCache."""

import os

import pytest
from hf_models import logits, one_thread, pytestmark, torch, transformers

import pagedkv.hf as hf
from transformers import DynamicCache

pytest.importorskip("gguf", reason="tools/python-tests --all brings the gguf package")

WINDOW = 16  # Gemma's, instead of 512: what is seen is another text, by the same weights


def model_of(path):
    # from_pretrained(gguf_file=...) wants the accelerate package, too; this is the part of it that reads the file.
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = transformers.AutoConfig.from_pretrained(os.path.dirname(path), gguf_file=os.path.basename(path))
    if getattr(config, "sliding_window", None):
        config.sliding_window = WINDOW
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected
    model.tie_weights()
    return model


@pytest.mark.filterwarnings("ignore")  # of transformers, about what it reads
@pytest.mark.parametrize("variable, start", [("PAGEDKV_TEST_MODEL", [504, 3575, 282]),  # The capital of
                                             ("PAGEDKV_TEST_GEMMA", [2, 818, 5279, 529])], ids=["smollm2", "gemma3"])
def test_the_logits_are_those_of_dynamic_cache(variable, start):
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"{variable} names no GGUF file (make test-all sets it)")
    model = model_of(path)
    # Text of the model's own: what it never says has logits of several hundred, and their rounding.
    torch.manual_seed(0)
    text = model.generate(torch.tensor([start]), attention_mask=torch.ones(1, len(start)), do_sample=True, top_k=0,
                          temperature=0.8, max_new_tokens=48, eos_token_id=None, pad_token_id=0)
    chunks = (text[:, :24], text[:, 24:44], *text[:, 44:].split(1, 1))
    expected = logits(model, "sdpa", DynamicCache(config=model.config), *chunks)
    for attn in (hf.NAME, "sdpa"):
        cache = hf.PagedCache(model.config)
        found = logits(model, attn, cache, *chunks)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
        assert cache.kv_quant == "f32" and (cache.stats()["dense_materializations"] == 0) == (attn == hf.NAME)
