"""pagedkv inspect: figures from a model's header, and what a broken file gets."""
import unittest
from pathlib import Path

from process import MODEL, CliTest, needs_model, pagedkv


class Inspect(CliTest):
    @needs_model
    def test_bytes_per_token_of_every_format(self):
        figures = pagedkv("inspect", "-m", MODEL, "--json").json()
        self.assertEqual([f["name"] for f in figures["formats"]], ["f32", "f16", "bf16", "q8", "q6", "q4"])
        by_name = {f["name"]: f for f in figures["formats"]}
        for name, expected in {"f32": 46080, "f16": 23040, "bf16": 23040, "q8": 12240, "q6": 9360, "q4": 6480}.items():
            self.assertEqual(by_name[name]["bytes_per_token"], expected)
            self.assertEqual(by_name[name]["bytes_per_token_past_window"], expected, "this model has no window")
            self.assertGreaterEqual(by_name[name]["padding_bytes_per_token"], 0)
            self.assertGreater(by_name[name]["tokens_in_memory"], 0)
        self.assertEqual(figures["architecture"], "llama")
        self.assertEqual(figures["context_length"], 8192)
        self.assertEqual(figures["groups"], [{"layers": list(range(30)), "num_q_heads": 9, "num_kv_heads": 3,
                                              "head_dim_k": 64, "head_dim_v": 64, "sliding_window": 0}])

    @needs_model
    def test_memory_and_context_can_be_given(self):
        figures = pagedkv("inspect", "-m", MODEL, "--json", "--kv-memory", "64MiB", "-c", "100").json()
        f16 = figures["formats"][1]
        self.assertEqual(figures["kv_memory"], 64 << 20)
        self.assertLessEqual(f16["tokens_in_memory"] * f16["bytes_per_token"], 64 << 20)
        self.assertGreater(f16["tokens_in_memory"] * f16["bytes_per_token"], 48 << 20)
        self.assertEqual(f16["context_bytes"], 7 * 16 * 23040, "100 tokens take 7 blocks of 16")

    @needs_model
    def test_the_table_has_the_same_figures(self):
        done = pagedkv("inspect", "-m", MODEL)
        self.assertEqual((done.code, done.err), (0, ""))
        for word in ("llama", "full attention", "bytes/token", "23,040", "12,240", "9,360", "6,480"):
            self.assertIn(word, done.out)

    def test_a_file_that_is_no_model(self):
        for what, content in (("empty.gguf", b""), ("text.gguf", b"hello, this is not a model at all, sorry"),
                              ("magic.gguf", b"GGUF"), ("counts.gguf", b"GGUF\3\0\0\0" + b"\xff" * 64)):
            with self.subTest(what=what):
                path = self.file(what, content)
                self.refused(pagedkv("inspect", "-m", path), 1, path)
                self.refused(pagedkv("run", "-m", path, "-p", "x"), 1, path)
        self.refused(pagedkv("inspect", "-m", "/no/such.gguf"), 1, "/no/such.gguf")
        self.refused(pagedkv("inspect", "-m", str(self.folder)), 1, "directory")

    @needs_model
    def test_a_vocabulary_that_run_refuses(self):
        whole = Path(MODEL).read_bytes()
        at = whole.index(b"tokenizer.ggml.pre") + len(b"tokenizer.ggml.pre") + 4  # its type, then length and text
        size = int.from_bytes(whole[at:at + 8], "little")
        name = whole[at + 8:at + 8 + size]
        path = self.file("pre.gguf", whole[:at + 8] + b"x" * size + whole[at + 8 + size:])
        self.assertIn(b"smol", name)
        for words in (["inspect", "-m", path], ["run", "-m", path, "-p", "x"]):
            self.refused(pagedkv(*words), 1, "vocabulary", "x" * size)

    @needs_model
    def test_a_truncated_model(self):
        whole = Path(MODEL).read_bytes()
        for size in (1, 24, 1 << 16, 1 << 20, 3 << 20, len(whole) // 2, len(whole) - 1):
            with self.subTest(size=size):
                path = self.file("cut.gguf", whole[:size])
                self.refused(pagedkv("run", "-m", path, "-p", "x"), 1, path)


if __name__ == "__main__":
    unittest.main()
