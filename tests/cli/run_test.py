"""pagedkv run with the real model: answers, stdout, stop reasons, environment, limits."""
import signal
import subprocess
import unittest

from process import BINARY, MODEL, CliTest, environment, needs_model, pagedkv

QUESTION = "What is the capital of France?"
STORY = "Tell me a very long story about a king."
COUNTERS = """bytes_reserved bytes_committed bytes_resident bytes_in_use blocks_total blocks_free blocks_open blocks_full
    blocks_shared blocks_cached block_utilization tokens alloc_events growth_events growth_bytes_copied shrink_events
    dense_materializations dequantized_rows floor_clamped_rows saturated_values fallbacks kernel_calls hits
    copies""".split()


@needs_model
class Run(CliTest):
    def answer(self, *words, prompt=QUESTION, **more):
        done = pagedkv("run", "-m", MODEL, "-p", prompt, "--temp", "0", "--json", *words, **more)
        self.assertEqual(done.code, 0, done.err)
        return done.json()

    def test_the_capital_of_france_is_paris_in_every_safe_format(self):
        for mode in ("off", "q8", "q6"):
            with self.subTest(mode=mode):
                answer = self.answer("--kv-quant", mode)
                self.assertIn("Paris", answer["text"])
                self.assertEqual(answer["finish_reason"], "stop")
                self.assertEqual(answer["stats"]["growth_bytes_copied"], 0)
                self.assertEqual(answer["stats"]["dense_materializations"], 0)

    def test_products_are_whose_they_are_said_to_be(self):
        ours, ggmls = self.answer("-n", "4")["products"], self.answer("-n", "4", "--products", "ggml")["products"]
        self.assertEqual(ggmls, {"isa": None, "own": 0, "ggml": ours["own"] + ours["ggml"]})
        self.refused(pagedkv("run", "-m", "x", "-p", "y", "--products", "mine"), 2, "--products", "mine", "auto, ggml")

    def test_json_has_the_fixed_names_and_nothing_else_on_stdout(self):
        answer = self.answer("-n", "4")
        self.assertEqual(set(answer), {"text", "finish_reason", "tokens_in", "tokens_reused", "tokens_out", "products",
                                       "prefill_tok_s", "decode_tok_s", "stats"})
        self.assertEqual(set(COUNTERS) - set(answer["stats"]), set())
        self.assertEqual(answer["finish_reason"], "length")
        self.assertEqual(answer["tokens_out"], 4)
        self.assertGreater(answer["prefill_tok_s"], 0)

    def test_stdout_is_the_answer_and_stderr_the_rest(self):
        text = self.answer("-n", "12")["text"]
        done = pagedkv("run", "-m", MODEL, "-p", QUESTION, "--temp", "0", "-n", "12", "--stats")
        self.assertEqual(done.out, text + "\n")
        for word in ("tok/s", "blocks used", "bytes per token", "23,040", "KV bytes held", "growth_bytes_copied"):
            self.assertIn(word, done.err)
        self.assertNotIn("\033", done.err, "no color where no terminal is")
        self.assertNotIn("llama_", done.err, "libllama's log is not shown")

    def test_the_prompt_may_come_from_a_file_or_stdin(self):
        expected = self.answer("-n", "8")
        path = self.file("prompt.txt", QUESTION.encode() + b"\n")
        common = ["run", "-m", MODEL, "--temp", "0", "-n", "8", "--json"]
        for done in (pagedkv(*common, "-f", path), pagedkv(*common, "-f", "-", stdin=QUESTION.encode())):
            self.assertEqual(done.code, 0, done.err)
            self.assertEqual(done.json()["text"], expected["text"])
            self.assertEqual(done.json()["tokens_in"], expected["tokens_in"])

    def test_bad_prompts(self):
        run = ["run", "-m", MODEL]
        self.refused(pagedkv(*run, "-f", "/no/prompt"), 1, "/no/prompt")
        self.refused(pagedkv(*run, "-f", str(self.folder)), 1, "directory")
        self.refused(pagedkv(*run, "-f", self.file("empty.txt", b"")), 1, "empty.txt", "empty")
        self.refused(pagedkv(*run, "-f", "-"), 1, "stdin is empty")
        self.refused(pagedkv(*run, "-p", ""), 1, "empty")
        self.refused(pagedkv(*run, "-f", self.file("bad.txt", b"ab\xff")), 1, "bad.txt", "UTF-8", "byte 2 of 3", "0xff")
        self.refused(pagedkv(*run, "-p", "word " * 200, "-c", "64"), 1, "210 tokens", "64")
        self.refused(pagedkv(*run, "-p", "x", "-c", "8193"), 1, "8193", "8192")

    def test_odd_prompts_are_prompts(self):
        for prompt in ("[1,2]", "{}", "-n", "--json", "%s%n", "<|im_end|>", "\u20ac\U0001f600"):
            with self.subTest(prompt=prompt):
                self.assertEqual(self.answer("-n", "1", prompt=prompt)["tokens_out"], 1)

    # O-API-12
    def test_a_full_context_stops_with_reason_length(self):
        answer = self.answer("-c", "64", prompt=STORY)
        self.assertEqual(answer["finish_reason"], "length")
        self.assertIn(answer["tokens_in"] + answer["tokens_out"], (64, 65), "the last token needs no room")
        done = pagedkv("run", "-m", MODEL, "-p", STORY, "--temp", "0", "-c", "64")
        self.assertEqual(done.code, 0)
        self.assertIn("[length] the context of 64 tokens is full", done.err)

    def test_a_fixed_pool_ends_the_answer_or_refuses_the_prompt(self):
        answer = self.answer("--no-dynamic", "--num-blocks", "4", prompt=STORY)
        self.assertEqual(answer["finish_reason"], "length")
        self.assertEqual(answer["stats"]["blocks_total"], 4)
        self.refused(pagedkv("run", "-m", MODEL, "-p", "word " * 100, "--no-dynamic", "--num-blocks", "4"), 1, "64")
        self.refused(pagedkv("run", "-m", MODEL, "-p", "x", "--kv-memory", "1"), 1, "1 bytes")

    def test_stop_strings_end_the_answer_and_are_not_shown(self):
        self.assertEqual(self.answer("--stop", "zzz", "--stop", " of France")["text"], "The capital")

    def test_one_seed_gives_one_answer(self):
        words = ["run", "-m", MODEL, "-p", STORY, "--temp", "1.5", "-n", "12", "--json", "-t", "1"]
        one, two, other = (pagedkv(*words, "--seed", seed).json()["text"] for seed in ("1", "1", "2"))
        self.assertEqual(one, two)
        self.assertNotEqual(one, other)

    def test_flags_win_over_the_environment_and_its_newer_names_over_the_older(self):
        old = {"MTPLX_PAGED_KV_QUANT": "q6", "MTPLX_VLLM_METAL_PAGED_KV_QUANT": "q4"}
        for words, env, bytes_per_token in (([], {}, "23,040"), ([], {"MTPLX_PAGED_KV_QUANT": "q6"}, "9,360"),
                                            ([], old, "6,480"), ([], {**old, "PAGEDKV_QUANT": "q8"}, "12,240"),
                                            ([], {**old, "PAGEDKV_QUANT": ""}, "6,480"),
                                            (["--kv-quant", "off"], {**old, "PAGEDKV_QUANT": "q8"}, "23,040"),
                                            (["--kv-cache-dtype", "Q8:INT4"], old, "9,360"),
                                            (["--cache-type-k", "q8", "--cache-type-v", "q4"], old, "9,360"),
                                            (["--cache-type-k", "q8"], {"PAGEDKV_QUANT": "q4"}, "9,360")):
            with self.subTest(words=words, env=env):
                done = pagedkv("run", "-m", MODEL, "-p", "Hi", "-n", "1", *words, env=env)
                self.assertEqual(done.code, 0, done.err)
                self.assertRegex(done.err, rf"bytes per token +{bytes_per_token} ")
        self.refused(pagedkv("run", "-m", MODEL, "-p", "x", env={"PAGEDKV_QUANT": "q3"}), 1, "PAGEDKV_QUANT", "q3", "q8")
        self.refused(pagedkv("run", "-m", MODEL, "-p", "x", env={"PAGEDKV_DYNAMIC": "maybe"}), 1, "PAGEDKV_DYNAMIC",
                     "maybe", "yes")

    def test_dynamic_follows_flag_then_environment(self):
        small = ["--num-blocks", "1", "-n", "3"]
        for words, env, total in ((["--no-dynamic"], {}, 1), ([], {"PAGEDKV_DYNAMIC": "off"}, 1),
                                  ([], {"MTPLX_DYNAMIC_PAGED_KV": "No"}, 1)):
            with self.subTest(words=words, env=env):
                answer = self.answer(*small, *words, env=env, prompt="Hi")
                self.assertEqual(answer["stats"]["blocks_total"], total)
        answer = self.answer("--num-blocks", "1", "--dynamic", env={"PAGEDKV_DYNAMIC": "0"})
        self.assertGreater(answer["stats"]["blocks_total"], 1)

    def test_a_spelling_that_means_another_layout_elsewhere_is_told_once(self):
        done = pagedkv("run", "-m", MODEL, "-p", "Hi", "-n", "1", "--cache-type-k", "q8_0", "--cache-type-v", "q8_0")
        self.assertEqual(done.err.count("not ggml's"), 1, done.err)
        done = pagedkv("run", "-m", MODEL, "-p", "Hi", "-n", "1", "--kv-quant", "q8_0:q4_0")
        self.assertEqual(done.err.count("not ggml's"), 1, done.err)
        done = pagedkv("run", "-m", MODEL, "-p", "Hi", "-n", "1", "--kv-quant", "q8")
        self.assertNotIn("ggml", done.err)

    def test_both_arenas_and_odd_block_sizes_give_the_same_answer(self):
        expected = self.answer()["text"]
        for words in (["--arena", "layer_major"], ["--block-size", "7"], ["--num-blocks", "1"], ["-t", "1"]):
            with self.subTest(words=words):
                self.assertEqual(self.answer(*words)["text"], expected)

    def test_little_address_space_is_an_answer_or_a_message(self):
        ends = set()
        for mib in (60, 120, 250, 400, 700, 1200, 3000):
            with self.subTest(mib=mib):
                done = pagedkv("run", "-m", MODEL, "-p", QUESTION, "--temp", "0", "-n", "2", "-t", "1",
                               address_space=mib << 20)
                ends.add(done.code)
                if done.code == 0:
                    self.assertEqual(done.out, "The capital\n")
                elif mib > 60:  # below that the dynamic linker may be the one who gives up
                    self.refused(done, 1)
        self.assertIn(0, ends)
        self.assertNotIn(-6, ends, "nothing aborts")
        self.assertNotIn(-11, ends, "nothing crashes")

    def test_ctrl_c_ends_the_answer_cleanly(self):
        child = subprocess.Popen([BINARY, "run", "-m", MODEL, "-p", STORY, "--temp", "0"], env=environment(),
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=300)
        self.assertEqual(child.returncode, 130, err)
        self.assertIn(b"[cancelled]", err)
        self.assertTrue((first + out).endswith(b"\n"))

    def test_a_full_disk_is_an_error(self):
        with open("/dev/full", "wb") as full:
            done = subprocess.run([BINARY, "run", "-m", MODEL, "-p", "Hi", "-n", "4"], stdout=full,
                                  stderr=subprocess.PIPE, env=environment(), check=False, timeout=300)
        self.assertEqual(done.returncode, 1)
        self.assertIn(b"[run] stdout cannot be written: No space left on device", done.stderr)

    def test_an_answer_needs_no_stderr(self):
        quiet = pagedkv("run", "-m", MODEL, "-p", "Hi", "-n", "4", "--temp", "0")
        for redirected in ("2>&-", "2>/dev/full"):
            done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", BINARY, "run", "-m", MODEL, "-p", "Hi", "-n",
                                   "4", "--temp", "0"], check=False, stdout=subprocess.PIPE, env=environment(), timeout=300)
            self.assertEqual(done.returncode, 0, redirected)
            self.assertEqual(done.stdout.decode(), quiet.out)

    def test_a_reader_that_has_enough_ends_the_answer_without_a_word(self):
        child = subprocess.Popen([BINARY, "run", "-m", MODEL, "-p", STORY, "--temp", "0"], env=environment(),
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        child.stdout.read(1)
        child.stdout.close()
        err = child.stderr.read()
        child.stderr.close()
        self.assertEqual(child.wait(300), 141, err)
        self.assertNotIn(b"stdout", err)

    def test_a_model_that_ends_at_once_has_no_rates(self):
        done = pagedkv("run", "-m", MODEL, "--raw", "-p", "<|im_start|>user\nSay nothing<|im_end|>\n<|im_start|>assistant\n"
                       "Done.", "-n", "64", "--temp", "0", "--json")
        self.assertEqual(done.code, 0, done.err)
        got = done.json()
        self.assertEqual((got["finish_reason"], got["tokens_out"]), ("stop", 0), "this prompt is at its end")
        self.assertEqual(got["decode_tok_s"], 0)
        self.assertGreater(got["prefill_tok_s"], 0)


if __name__ == "__main__":
    unittest.main()
