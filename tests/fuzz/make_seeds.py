#!/usr/bin/env python3
"""Writes what the fuzzers start from:  make_seeds.py DIRECTORY  ->  DIRECTORY/{gguf,formats,image,products,sampling,schema,body,header}/*"""
import random
import struct
import sys
from pathlib import Path

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10
TENSOR_F32, TENSOR_Q4_0 = 0, 2


def text(word):
    return struct.pack("<Q", len(word)) + word.encode()


def key(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def tensor(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(version, keys, tensors, n_data):
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join(keys + tensors)
    return header + bytes(-len(header) % 32) + bytes(n_data)


def gguf_seeds():
    keys = [
        key("general.architecture", STRING, text("llama")),
        key("general.alignment", U32, struct.pack("<I", 32)),
        key("n", U64, struct.pack("<Q", 7)),
        key("llama.rope.freq_base", F32, struct.pack("<f", 1e4)),
        key("a.flag", BOOL, b"\1"),
        key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("bc")),
        key("x", ARRAY, struct.pack("<IQ3I", U32, 3, 1, 2, 3)),
    ]
    tensors = [tensor("a", [8], TENSOR_F32, 0), tensor("blk.0.w", [32, 2], TENSOR_Q4_0, 32)]
    yield gguf(3, [], [], 0)
    yield gguf(3, keys, [], 0)
    yield gguf(2, keys[:3], tensors, 96)
    yield gguf(3, keys, tensors, 96)
    yield gguf(3, [key("split.count", U32, struct.pack("<I", 2))], tensors, 96)


def format_seeds():
    words = "off f16 f32 bf16 q8 q6 q4 auto q8_0 int8 1 true YES off:q4 q8:q4 f16:f32 Q8-0:bf16".split()
    return [word.encode() for word in words]


def sampling_seeds():
    # The provider of the fuzzer reads numbers from the end and the grammar from what is left at the front.
    rng = random.Random(2)
    grammars = ['root ::= "a" | "b"', 'root ::= "a" [^\\x00-\\U0010FFFF]', 'root ::= [a-z]{2,5} ("," [a-z]+)*',
                'root ::= a root "x" | "y"\na ::= b\nb ::= "z" |', 'root ::= s\ns ::= "a" s "b" | "a" s "c" | "d"',
                'root ::= "{" [^}]* "}"', 'root ::= .*', 'root ::= "\\u00e9" # x\n', 'root ::= (("a"?)*)+ "b"{0,3}',
                'root ::= [0-9] | "-"? "[" root "]"', '"', 'root ::= <x>', 'root ::= root']
    for grammar in grammars:
        yield grammar.encode() + rng.randbytes(60)
    for text in ("hello", "H\u00e9", "a\x04b", "ab{", "abc a"):
        yield text.encode() + rng.randbytes(60)


def schema_seeds():
    schemas = ['{}', 'false', '{"type":"object","properties":{"a":{"type":"integer"},"b":false},"required":["a"],'
               '"additionalProperties":{"type":"string","maxLength":3}}', '{"$defs":{"n":{"properties":{"k":{"type":'
               '"array","items":{"$ref":"#/$defs/n"}}}}},"$ref":"#/$defs/n","minItems":1}',
               '{"type":"string","pattern":"^[a-f\\\\d]{2,3}|(x|\\u00e9)+$","minLength":2}', '{"format":"date-time"}',
               '{"type":"number","minimum":-1.5,"exclusiveMaximum":2e3,"multipleOf":0.25}',
               '{"oneOf":[{"const":1},{"enum":["a",null]},{"type":"object","required":["z"]}]}',
               '{"anyOf":[{"type":["null","string"]},{"allOf":[{"type":"integer"},{"maximum":9}]}]}',
               '{"prefixItems":[{"type":"boolean"},{}],"items":{"type":"null"},"minItems":1,"maxItems":4}']
    return [schema.encode() + b"\1" for schema in schemas]


def body_seeds():
    # The last byte: bit 0 chat, bit 1 the vocabulary.
    chats = ['{"messages":[{"role":"system","content":"a"},{"role":"user","content":[{"type":"text","text":"hello"}]}],'
             '"max_tokens":3,"stop":["x"],"stream":true,"stream_options":{"include_usage":true},"model":"m"}',
             '{"messages":[{"role":"user","content":"a"}],"logit_bias":{"5":-1},"n":2,"seed":7,"temperature":0.5,'
             '"top_p":0.9,"logprobs":true,"top_logprobs":2,"response_format":{"type":"json_schema","json_schema":'
             '{"name":"s","schema":{"type":"object","properties":{"a":{"type":"integer"}}}}}}',
             '{"messages":[{"role":"assistant","content":null,"refusal":"no"},{"role":"user","content":""}],"user":"u"}']
    completions = ['{"prompt":"hello","max_tokens":1,"logprobs":1,"echo":false}', '{"prompt":[[1,2],[3]],"n":1}',
                   '{"prompt":["a","b"],"grammar":"root ::= [a-z]","presence_penalty":1}', '{"prompt":[1,2,3]}']
    for bodies, chat in ((chats, 1), (completions, 0)):
        for body in bodies:
            yield body.encode() + bytes([chat])
            yield body.encode() + bytes([chat | 2])


def header_seeds():
    return [b"/v1/models/org%2Fplain?x=1&blocks=1\n127.0.0.1:8080\nBearer secret\nhttp://127.0.0.1:8080",
            b"http://localhost/v1/chat/completions\nevil.example\nbearer secret\n", b"*\n[::1]:80\nBasic x\nnull",
            b"/\nllm.example.:8080\nBearer  secret\nhttps://llm.example"]


def image_seeds():
    rng = random.Random(1)
    return [rng.randbytes(n) for n in (16, 64, 256, 1024, 4096) for _ in range(6)]


def product_seeds():
    """The format, the shape, and bytes for the blocks."""
    rng = random.Random(3)
    return [bytes([kind, *rng.randbytes(3)]) + rng.randbytes(n) for kind in range(6) for n in (40, 400)]


def main(directory):
    for name, seeds in (("gguf", gguf_seeds()), ("formats", format_seeds()), ("image", image_seeds()),
                        ("products", product_seeds()),
                        ("sampling", sampling_seeds()), ("schema", schema_seeds()),
                        ("body", body_seeds()), ("header", header_seeds())):
        folder = Path(directory) / name
        folder.mkdir(parents=True, exist_ok=True)
        for i, seed in enumerate(seeds):
            (folder / f"seed-{i:02}").write_bytes(seed)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
