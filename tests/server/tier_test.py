"""What --cache-dir promises: prompts are there after any end of the process, and nothing that comes back is wrong."""
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
import unittest

from served import Served

MODEL = os.environ["PAGEDKV_TINY_MODELS"] + "/d64_gqa3_tied.gguf"
BIN = os.environ["PAGEDKV_BIN"]


def served(folder, *options):
    return Served([BIN, "serve", "-m", MODEL, "--port", "0", "--reproducible", "--cache-dir", folder, "--cache-disk", "32MiB",
                   "--cache-min-prefix", "32", "--cache-timeout", "3600", *options])


def tokens(n, seed):
    return [(i * 7919 + seed * 104729 + i * i) % 250 + 3 for i in range(n)]


class Tier(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name + "/blocks"

    def ask(self, server, seed, n=200, **fields):
        status, answer = server.post("/v1/completions", {"prompt": tokens(n, seed), "temperature": 0, "logprobs": 1,
                                                         "max_tokens": 8, "ignore_eos": True, **fields})
        self.assertEqual(status, 200, answer)
        return answer["choices"][0]["logprobs"]["token_logprobs"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def stored(self, server, n):
        return server.until(lambda s: s["tier"]["puts"]["done"] >= n and s["tier"]["waiting_blocks"] == 0)

    def test_a_killed_server_finds_its_prompts_again(self):
        for quant in ("off", "q8", "q4"):
            with self.subTest(quant=quant), tempfile.TemporaryDirectory() as folder:
                with served(folder, "--kv-quant", quant) as server:
                    cold, cached = self.ask(server, 1)
                    self.assertEqual(cached, 0)
                    self.stored(server, 12)
                    server.process.kill()
                with served(folder, "--kv-quant", quant) as server:
                    warm, cached = self.ask(server, 1)
                    self.assertEqual(cached, 192)
                    self.assertEqual(warm, cold)
                    tier = server.stats()["tier"]
                    self.assertEqual((tier["restores"], tier["restored_tokens"]), (1, 192))
                    # A salt is another namespace, also on the disk.
                    self.assertEqual(self.ask(server, 1, cache_salt="other"), (cold, 0))
                    metrics = server.get("/metrics")[1]
                    self.assertIn("pagedkv_tier_restored_tokens_total 192", metrics)
                    self.assertEqual(server.stop(), 0)

    def test_a_kill_at_any_moment_leaves_a_folder_that_opens_and_answers_that_are_right(self):
        seeds = range(6)
        with Served([BIN, "serve", "-m", MODEL, "--port", "0", "--reproducible"]) as server:
            right = {seed: self.ask(server, seed)[0] for seed in seeds}
        chance = random.Random(1)
        restored = 0
        for _ in range(20):
            with served(self.folder) as server:
                for seed in seeds:
                    self.assertEqual(self.ask(server, seed)[0], right[seed])
                stop = threading.Event()

                def load():
                    seed = 100
                    while not stop.is_set():
                        seed += 1
                        try:
                            self.ask(server, seed)
                        except (OSError, AssertionError, ValueError):
                            return
                asking = [threading.Thread(target=load) for _ in range(3)]
                for thread in asking:
                    thread.start()
                time.sleep(chance.random() / 4)
                restored += server.stats()["tier"]["restores"]
                server.process.send_signal(signal.SIGKILL)
                stop.set()
                for thread in asking:
                    thread.join()
        self.assertGreater(restored, 0)

    def test_flipped_bytes_are_misses(self):
        with served(self.folder) as server:
            right = {seed: self.ask(server, seed)[0] for seed in range(8)}
            self.stored(server, 8 * 12)
            self.assertEqual(server.stop(), 0)
        chance = random.Random(2)
        chunks = [os.path.join(at, name) for at, _, names in os.walk(self.folder) for name in names
                  if os.path.getsize(os.path.join(at, name)) >= 1 << 20]
        self.assertTrue(chunks)
        for path in chunks:
            with open(path, "r+b") as f:
                for at in range(0, os.path.getsize(path), 40_000):
                    f.seek(at + chance.randrange(10_000))
                    byte = f.read(1)
                    f.seek(-1, os.SEEK_CUR)
                    f.write(bytes([byte[0] ^ 1 << chance.randrange(8)]))
        with served(self.folder) as server:
            for seed, answer in right.items():
                self.assertEqual(self.ask(server, seed)[0], answer)
            self.assertGreater(server.stats()["tier"]["gets"]["refused"], 0)

    def test_a_folder_has_one_server_at_a_time(self):
        with served(self.folder) as server:
            self.ask(server, 1)
            second = subprocess.run([BIN, "serve", "-m", MODEL, "--port", "0", "--cache-dir", self.folder],
                                    capture_output=True, text=True, timeout=600, check=False)
            self.assertNotEqual(second.returncode, 0)
            self.assertIn(self.folder, second.stderr)
            server.process.kill()
        with served(self.folder) as server:
            self.ask(server, 1)

    def test_run_finds_what_run_left(self):
        def run(prompt):
            result = subprocess.run([BIN, "run", "-m", MODEL, "--raw", "--json", "--temp", "0", "-n", "4", "-p", prompt,
                                     "--cache-dir", self.folder, "--cache-min-prefix", "32", "--cache-timeout", "3600"],
                                    capture_output=True, text=True, timeout=600, check=False)
            self.assertEqual(result.returncode, 0, result.stderr)
            return json.loads(result.stdout)
        prompt = " ".join(f"word{i}" for i in range(40))
        first, second = run(prompt), run(prompt)
        self.assertEqual(first["tokens_reused"], 0)
        self.assertGreater(second["tokens_reused"], 0)
        self.assertEqual(second["text"], first["text"])

    def test_a_limit_of_the_size_of_files_ends_nothing(self):
        result = subprocess.run(["sh", "-c", 'ulimit -f 128; exec "$0" "$@"', BIN, "run", "-m", MODEL, "--raw", "--temp", "0",
                                 "-n", "4", "-p", "word " * 100, "--cache-dir", self.folder, "--cache-min-prefix", "32"],
                                capture_output=True, text=True, timeout=600, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("no room", result.stderr)

    def test_options_without_a_folder_are_refused(self):
        for option, value in (("--cache-disk", "1GiB"), ("--cache-sync", "each"), ("--cache-ttl", "5"),
                              ("--cache-min-prefix", "64"), ("--cache-timeout", "9")):
            result = subprocess.run([BIN, "serve", "-m", MODEL, option, value], capture_output=True, text=True, timeout=60,
                                    check=False)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("--cache-dir", result.stderr)


if __name__ == "__main__":
    unittest.main()
