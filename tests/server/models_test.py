"""The server on real models: what is shared, what it costs, and that sharing changes nothing."""
import os
import resource
import threading
import unittest

from served import Served

TINY = os.environ["PAGEDKV_TINY_MODELS"]
SMOLLM2 = os.environ.get("PAGEDKV_TEST_MODEL")


def served(model, *options):
    return Served([os.environ["PAGEDKV_BIN"], "serve", "-m", model, "--port", "0", *options])


def at_once(calls):
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return results


def tokens(n, seed):
    return [(i * 7919 + seed * 104729 + i * i) % 250 + 3 for i in range(n)]


class Tiny(unittest.TestCase):
    def complete(self, server, prompt, **fields):
        status, answer = server.post("/v1/completions", {"prompt": prompt, "temperature": 0, "logprobs": 1, "max_tokens": 12,
                                                         "ignore_eos": True, **fields})
        self.assertEqual(status, 200, answer)
        return answer

    def scores(self, answer):
        return [choice["logprobs"]["token_logprobs"] for choice in answer["choices"]]

    def test_cold_warm_forked_and_batched_have_equal_bits(self):
        for quant in ("off", "bf16", "q8", "q6", "q4"):
            for model in ("d64_gqa3_tied", "gemma3_window16_pattern3"):
                with self.subTest(quant=quant, model=model), \
                        served(f"{TINY}/{model}.gguf", "--kv-quant", quant, "--reproducible", "--max-step", "0",
                               "--max-num-batched-tokens", "48") as server:
                    prompt = tokens(90, 1)
                    cold = self.complete(server, prompt)
                    self.assertEqual(cold["usage"]["prompt_tokens_details"]["cached_tokens"], 0)
                    warm = self.complete(server, prompt)
                    self.assertEqual(self.scores(warm), self.scores(cold))
                    forked = self.complete(server, prompt, n=3, cache_salt="other")
                    self.assertEqual(self.scores(forked), self.scores(cold) * 3)
                    batched = at_once([lambda i=i: self.complete(server, prompt if i == 3 else tokens(40 + 11 * i, i),
                                                                 cache_salt="third") for i in range(7)])
                    self.assertEqual(self.scores(batched[3]), self.scores(cold))

    def test_an_edited_conversation_longer_than_the_window_is_answered(self):  # O-LIFE-06
        with served(f"{TINY}/gemma3_window8.gguf", "--reproducible") as server:
            before, answer, after = tokens(60, 1), tokens(9, 2), tokens(14, 3)
            self.complete(server, before + answer + after)
            edited = before + tokens(9, 4) + after
            again = self.complete(server, edited)
            self.assertEqual(self.scores(again), self.scores(self.complete(server, edited, cache_salt="cold")))


    def test_a_character_that_the_vocabulary_lacks_is_a_400_that_names_it(self):
        for model, prompt, character in (("spm_letters", "H\u00e9", "U+00E9"), ("bpe_few_bytes", "ab{", "U+007B")):
            with served(f"{TINY}/{model}.gguf") as server:
                status, answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
                self.assertEqual((status, answer["error"]["param"]), (400, "prompt"), answer)
                self.assertIn(character, answer["error"]["message"])
                self.assertEqual(server.post("/v1/completions", {"prompt": "ab", "max_tokens": 1})[0], 200)

    def test_a_grammar_that_the_vocabulary_cannot_follow_ends_its_request_alone(self):
        for model in ("spm_letters", "bpe_few_bytes"):
            with served(f"{TINY}/{model}.gguf") as server:
                for bias in ({}, {"2": 100}):
                    status, answer = server.post("/v1/completions", {"prompt": "ab", "logit_bias": bias,
                                                                     "response_format": {"type": "json_object"}})
                    self.assertEqual(status, 400, answer)
                    self.assertIn("no token of this model's vocabulary", answer["error"]["message"])
                    self.assertEqual(server.get("/health")[0], 200)
                    self.assertEqual(server.post("/v1/completions", {"prompt": "ab", "max_tokens": 1})[0], 200)
                self.assertEqual(server.idle()["scheduler"]["failed"], 2)

    def test_memory_that_the_system_refuses_is_its_own_error(self):
        # 512 bytes a token, in extents of 2 MiB: the process may have few more of them, and then as many as it likes.
        with served(f"{TINY}/d64_long_context.gguf", "-c", "100000", "--num-blocks", "32") as server:
            body = {"prompt": tokens(20000, 2), "max_tokens": 1}
            self.assertEqual(server.post("/v1/completions", {"prompt": tokens(2000, 1), "max_tokens": 1})[0], 200)
            with open(f"/proc/{server.process.pid}/status", encoding="ascii") as status:
                data = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
            resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (data + (6 << 20), resource.RLIM_INFINITY))
            status, answer = server.post("/v1/completions", body)
            self.assertEqual((status, answer["error"]["code"]), (503, "out_of_memory"), answer)
            self.assertIn("need", answer["error"]["message"])
            self.assertEqual(server.get("/health")[0], 200)
            resource.prlimit(server.process.pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY,) * 2)
            self.assertEqual(server.post("/v1/completions", body)[0], 200)


@unittest.skipIf(not SMOLLM2, "PAGEDKV_TEST_MODEL names no model")
class Real(unittest.TestCase):
    def test_a_grammar_at_its_dead_end_ends_one_request_and_no_other(self):
        # SmolLM2's vocabulary has no token for the bytes F1 and F2, which U+40000 begins with.
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\U00040000"}}}
        with served(SMOLLM2, "--context", "512") as server:
            running = threading.Thread(target=lambda: answers.append(server.chat("Count to a hundred.", max_tokens=100)))
            answers = []
            running.start()
            for bias in ({}, {"2": 100}, {"0": 100}):
                for fields in ({}, {"temperature": 0}, {"n": 3}):
                    status, answer = server.chat("Hi", response_format=schema, logit_bias=bias, max_tokens=50, **fields)
                    self.assertEqual(status, 400, answer)
                    self.assertIn("no token of this model's vocabulary goes on", answer["error"]["message"])
            self.assertEqual(server.get("/health")[0], 200)
            running.join()
            self.assertEqual(answers[0][0], 200)
            self.assertEqual(server.chat("Hi", max_tokens=5)[0], 200)
            status, answer = server.chat("Yes or no?", response_format={"type": "json_schema", "json_schema": {
                "name": "x", "schema": {"enum": ["yes", "no"]}}}, logit_bias={"2": 100}, max_tokens=50)
            self.assertEqual(status, 200)
            self.assertIn(answer["choices"][0]["message"]["content"].strip(), ('"yes"', '"no"'))

    def test_a_byte_that_the_vocabulary_lacks_does_not_vanish(self):
        with served(SMOLLM2, "--context", "512") as server:
            status, answer = server.chat("a\u0004b", max_tokens=1)
            self.assertEqual((status, answer["error"]["param"]), (400, "messages"), answer)
            self.assertIn("U+0004", answer["error"]["message"])

    def test_choices_of_the_largest_seeds_differ(self):
        with served(SMOLLM2, "--context", "512") as server:
            for seed in (2**32 - 2, 2**63 - 1, -1):
                answer = server.chat("Name some animals.", seed=seed, n=4, max_tokens=24, temperature=2, top_p=1)[1]
                texts = [choice["message"]["content"] for choice in answer["choices"]]
                self.assertEqual(len(set(texts)), 4, texts)
            pairs = [[server.chat("Name some animals.", seed=seed, max_tokens=24, temperature=2, top_p=1)[1]
                      ["choices"][0]["message"]["content"] for seed in seeds] for seeds in ((1, 1), (1, (1 << 33) ^ 2 ^ 1))]
            self.assertEqual(*pairs[0])
            self.assertNotEqual(*pairs[1])

    def test_a_repeated_prompt_of_4096_tokens_computes_a_block_and_a_token_at_most(self):
        with served(SMOLLM2, "--kv-quant", "q8") as server:
            prompt = server.post("/tokenize", {"prompt": "The river ran past the old mill. " * 700})[1]["tokens"][:4096]
            self.assertEqual(len(prompt), 4096)
            body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
            first = server.post("/v1/completions", body)[1]
            computed = server.idle()["scheduler"]["prompt_tokens_computed"]
            second = server.post("/v1/completions", body)[1]
            self.assertLessEqual(server.idle()["scheduler"]["prompt_tokens_computed"] - computed, 17)
            self.assertEqual(second["choices"][0]["text"], first["choices"][0]["text"])

    def test_32_chats_store_their_common_prompt_once(self):
        with served(SMOLLM2, "--kv-quant", "q8", "--max-num-seqs", "32") as server:
            common = server.post("/tokenize", {"prompt": "You are a patient teacher of history. " * 400})[1]["tokens"][:2048]
            own = [server.post("/tokenize", {"prompt": f" Question {i}: who was it?"})[1]["tokens"] for i in range(32)]
            results = at_once([lambda i=i: server.post("/v1/completions", {
                "prompt": common + own[i], "max_tokens": 8, "temperature": 0}) for i in range(32)])
            self.assertTrue(all(status == 200 for status, _ in results))
            cache = server.idle()["cache"]
            tails = sum((len(o) + 7) // 16 + 1 for o in own)
            self.assertLessEqual(cache["blocks_cached"], 2048 // 16 + tails + 32)  # within a block a chat
            self.assertLessEqual(server.stats()["scheduler"]["prompt_tokens_computed"],
                                 2048 + sum(len(o) + 16 for o in own))

    def test_a_pool_for_two_contexts_serves_four(self):  # O-MEM-05
        per_token = 12240
        with served(SMOLLM2, "--kv-quant", "q8", "--context", "1024", "--max-num-seqs", "4", "--num-blocks", "1",
                    "--kv-memory", str(2 * 1024 * per_token + (1 << 20))) as server:
            start = "".join(server.log)
            self.assertIn("47.8 MiB", start)  # the need of four full contexts
            prompt = server.post("/tokenize", {"prompt": "Tell me about the sea. " * 400})[1]["tokens"]
            results = at_once([lambda i=i: server.post("/v1/completions", {
                "prompt": prompt[i * 7:i * 7 + 900], "max_tokens": 60, "ignore_eos": True}) for i in range(4)])
            for status, answer in results:
                self.assertEqual(status, 200, answer)
                self.assertEqual(answer["usage"]["completion_tokens"], 60)
            self.assertEqual(server.idle()["scheduler"]["failed"], 0)
            status, answer = server.post("/v1/completions", {"prompt": (prompt * 2)[:1024]})
            self.assertEqual((status, answer["error"]["code"]), (400, "context_length_exceeded"))
            self.assertEqual(server.chat("hello", max_tokens=2)[0], 200)


if __name__ == "__main__":
    unittest.main(warnings="ignore")
