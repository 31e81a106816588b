"""What a config says about the layers of a model, and what tells models apart."""

import hashlib
import json
from dataclasses import dataclass

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from .._core import parse_kv_quant
from ..quant import PagedKVQuantConfig

FORMAT_OF_DTYPE = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class LayerShape:
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    num_q_heads: int
    window: int  # keys a query sees, itself included; 0: all


def shapes_of(config):
    """The layers of a decoder that store K and V, and those that read them.

    Returns ({layer: LayerShape}, {layers that attend}). A layer that reuses another's K and V only attends.
    Errors: ValueError for an encoder-decoder, and for a layer whose state is not K and V of every token.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"[PagedCache] {config.model_type} is an encoder-decoder; only decoders are supported")
    text = config.get_text_config(decoder=True)
    kinds, extras = get_layer_types_and_kwargs(text)
    sharing = getattr(text, "kv_sharing_modes", None) or [None] * len(kinds)
    stored, attending = {}, set()
    for layer, (kind, extra, own, mode) in enumerate(zip(kinds, extras, text.per_layer_config, sharing)):
        if kind == "dummy":
            if mode == "reuse":
                attending.add(layer)
            continue
        if kind not in ("full_attention", "sliding_attention", "chunked_attention"):
            raise ValueError(f"[PagedCache] layer {layer} of {text.model_type} is of type {kind}; supported are "
                             "full_attention, sliding_attention and chunked_attention")
        heads = own.num_attention_heads
        if stores_latents(text):
            # DeepSeek's latents: one head, the compressed rows as K and the rotated part as V.
            shape = (1, own.kv_lora_rank, own.qk_rope_head_dim)
        else:
            head_dim = getattr(own, "head_dim", None) or own.hidden_size // heads
            kv_heads = getattr(own, "num_key_value_heads", None) or heads
            if getattr(own, "multi_query", False) and not getattr(own, "new_decoder_architecture", False):
                kv_heads = 1  # Falcon, GPTBigCode: the number beside it does not count
            shape = (kv_heads, head_dim, head_dim)
        stored[layer] = LayerShape(*shape, num_q_heads=heads, window=extra.get("sliding_window") or 0)
        attending.add(layer)
    if not stored:
        raise ValueError(f"[PagedCache] {text.model_type} has no attention layer")
    return stored, attending


def mode_of(kv_quant):
    """A word, or a PagedKVQuantConfig, as the mode's own name: "q8", "f32", "q8:q4"."""
    config = PagedKVQuantConfig(kv_quant) if not hasattr(kv_quant, "mode") else kv_quant
    return parse_kv_quant(config.mode)


def stores_latents(text):
    return getattr(text, "kv_lora_rank", None) is not None


def identity_of(config, shapes):
    """What of a config makes K and V differ, as it is written to a file: names and JSON values."""
    text = config.get_text_config(decoder=True)
    names = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
             "num_attention_heads", "rope_parameters")
    identity = {name: getattr(text, name, None) for name in names}
    identity["layers"] = [[layer, s.num_kv_heads, s.head_dim, s.head_dim_v, s.window] for layer, s in shapes.items()]
    return json.loads(json.dumps(identity, default=str))


def fingerprint(model: torch.nn.Module) -> str:
    """Tells models of the same shape apart: SHA-256, in hex, over every parameter's name, shape and 64 of its values.

    Give it to PagedCache(fingerprint=...) and PagedCache.load(fingerprint=...): a file of another model, or of the
    same one before it was trained on, is then refused. A config alone does not know the weights.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        some = flat[:: max(1, flat.numel() // 64)][:64].to(torch.float32).cpu()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()
