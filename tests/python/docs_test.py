"""The Python of README.md and docs/python.md runs as it stands there."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def snippets(name):
    """The python blocks of a document that are programs, not sessions."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)
    return [block for block in blocks if not block.startswith(">>>")]


def the(name, word):
    found = [block for block in snippets(name) if word in block]
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_transformers_snippet(document, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                      num_attention_heads=2, num_key_value_heads=1, eos_token_id=None, pad_token_id=0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    inputs = {"input_ids": torch.arange(1, 9)[None], "attention_mask": torch.ones(1, 8)}
    names = {"AutoModelForCausalLM": transformers.AutoModelForCausalLM, "name": tmp_path, "inputs": inputs}
    exec(the(document, "pagedkv.hf"), names)
    assert names["model"].config._attn_implementation == "pagedkv"


def test_the_mlx_lm_snippet(tmp_path, monkeypatch):
    mlx_lm = pytest.importorskip("mlx_lm")
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    from mlx_lm.models import llama
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    words = {word: i for i, word in enumerate(["<unk>", "once", "upon", "a", "time"] + [f"w{i}" for i in range(59)])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = TokenizerWrapper(transformers.PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>"))
    model = llama.Model(llama.ModelArgs(model_type="llama", hidden_size=32, num_hidden_layers=2, intermediate_size=64,
                                        num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=64))
    monkeypatch.chdir(tmp_path)
    names = {"mlx_lm": mlx_lm, "model": model, "tokenizer": tokenizer, "prompt": "once upon a time"}
    exec(the("docs/python.md", "pagedkv.mlx"), names)
    assert (tmp_path / "prompt.safetensors").exists() and names["cache"][0].offset > 4


def test_the_llm_snippet(model_path, tmp_path, monkeypatch, capsys):
    import pagedkv

    (tmp_path / "model.gguf").symlink_to(model_path)
    monkeypatch.chdir(tmp_path)
    names = {"pagedkv": pagedkv}
    exec(the("docs/python.md", "pagedkv.LLM("), names)
    assert "Paris" in capsys.readouterr().out
    names["llm"].close()


def test_every_snippet_is_one_of_these():
    assert len(snippets("docs/python.md")) == 3 and len(snippets("README.md")) == 1
