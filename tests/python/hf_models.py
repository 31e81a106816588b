"""Tiny transformers models and what tests ask of them.

They are random; their weights are large, so that a wrong key changes the text. Text is compared in f32.
"""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import pagedkv.hf as hf
from transformers import DynamicCache

torch.set_num_threads(2)
# generate() calls its argument `cache` from 5.24 on, and says so whenever it is called past_key_values.
pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

STOCK = ("eager", "sdpa")
BLOCK = 4  # small, so that short texts cross many blocks
WINDOW = 8

COMMON = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
              head_dim=16, initializer_range=0.3, max_position_embeddings=512, tie_word_embeddings=False,
              eos_token_id=None, bos_token_id=None, pad_token_id=0)
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]


def make_model(name, seed=0, **changes):
    torch.manual_seed(seed)
    one = {
        "llama": ("Llama", "LlamaConfig", dict(num_hidden_layers=3)),
        "mistral": ("Mistral", "MistralConfig", dict(num_hidden_layers=3, sliding_window=WINDOW)),
        "gemma2": ("Gemma2", "Gemma2Config", dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED,
                                                  query_pre_attn_scalar=16, attn_logit_softcapping=5.0)),
        "gemma3": ("Gemma3", "Gemma3TextConfig", dict(num_hidden_layers=4, sliding_window=WINDOW, layer_types=MIXED,
                                                      query_pre_attn_scalar=16)),
        # Two of its layers read the keys of two others; full layers have wider heads.
        "gemma4": ("Gemma4", "Gemma4TextConfig", dict(num_hidden_layers=6, sliding_window=WINDOW, global_head_dim=32,
                                                      num_kv_shared_layers=2, hidden_size_per_layer_input=8,
                                                      vocab_size_per_layer_input=97,
                                                      layer_types=["sliding_attention", "full_attention"] * 3)),
        # Attention sinks.
        "gpt_oss": ("GptOss", "GptOssConfig", dict(num_hidden_layers=2, sliding_window=WINDOW, num_local_experts=2,
                                                   num_experts_per_tok=1, rope_parameters=None,
                                                   layer_types=["sliding_attention", "full_attention"])),
    }[name]
    config = getattr(transformers, one[1])(**COMMON | one[2] | changes)
    return getattr(transformers, one[0] + "ForCausalLM")(config).eval()


@pytest.fixture(scope="module", autouse=True)  # of the modules that import it
def one_thread():
    """So little work is slower on two, and far slower where somebody else has the second."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name):
        if name not in made:
            made[name] = make_model(name)
        return made[name]

    return get


@pytest.fixture
def llama():
    return make_model("llama")


@pytest.fixture
def mistral():
    return make_model("mistral")


def tokens(n_rows, n, seed=1):
    return torch.randint(1, 97, (n_rows, n), generator=torch.Generator().manual_seed(seed))


def dynamic(model):
    return DynamicCache(config=model.config)


def paged(model, **options):
    return hf.PagedCache(model.config, **{"block_size": BLOCK} | options)


def say(model, attn, ids, cache, n=20, **options):
    """Greedy text, prompt included."""
    model.set_attn_implementation(attn)
    # Without a mask generate() would take every token 0 for padding, also one that the model has said.
    options = {"attention_mask": torch.ones_like(ids)} | options
    return model.generate(ids, cache=cache, do_sample=False, max_new_tokens=n, **options)


def logits(model, attn, cache, *chunks, mask=None):
    """Feeds chunk after chunk; the logits of all columns."""
    model.set_attn_implementation(attn)
    out = []
    with torch.no_grad():
        for ids in chunks:
            seen = cache.get_seq_length() + ids.shape[1]
            out.append(model(ids, cache=cache, attention_mask=None if mask is None else mask[:, :seen]).logits)
    return torch.cat(out, 1)


def left_padded(*lengths):
    """Prompts of these lengths in one batch, and its mask."""
    ids, mask = torch.zeros(2, len(lengths), max(lengths), dtype=torch.long)
    for row, n in enumerate(lengths):
        ids[row, -n:], mask[row, -n:] = tokens(1, n, seed=10 + row), 1
    return ids, mask


def one_layer(window):
    return transformers.MistralConfig(num_hidden_layers=1, hidden_size=4, num_attention_heads=1, num_key_value_heads=1,
                                      head_dim=4, sliding_window=window)


def forward(model, ids, cache, **options):
    model.set_attn_implementation(hf.NAME)
    with torch.no_grad():
        return model(ids, cache=cache, **options)


def expect_refused(model, text, ids=None, cache=None, error=ValueError, **options):
    cache = paged(model) if cache is None else cache
    before = cache.get_seq_length()
    with pytest.raises(error, match=text):
        forward(model, tokens(2, 6) if ids is None else ids, cache, **options)
    assert cache.get_seq_length() == before
