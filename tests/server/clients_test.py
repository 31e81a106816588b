"""The server with programs that we did not write: the official Python client, promtool, curl."""
import json
import os
import shutil
import subprocess
import threading
import time
import unittest

from served import Served, user

try:
    import openai
except ImportError:
    openai = None

MODEL = os.environ.get("PAGEDKV_TEST_MODEL")


def real_server(*options):
    return Served([os.environ["PAGEDKV_BIN"], "serve", "-m", MODEL, "--port", "0", *options])


def client_of(server, **options):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, **options)


@unittest.skipIf(openai is None, "the openai package is not there (tools/setup --clients)")
@unittest.skipIf(not MODEL, "PAGEDKV_TEST_MODEL names no model")
class OfficialClient(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = real_server("--kv-quant", "q8")
        cls.client = client_of(cls.server)
        cls.model = cls.client.models.list().data[0].id

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    def ask(self, content, **fields):
        return self.client.chat.completions.create(
            model=self.model, messages=[{"role": "user", "content": content}], **fields)

    def test_chat(self):
        answer = self.ask("What is the capital of France?", temperature=0, max_tokens=32)
        self.assertIn("Paris", answer.choices[0].message.content)
        self.assertEqual(answer.choices[0].finish_reason, "stop")
        again = self.ask("What is the capital of France?", temperature=0, max_tokens=32)
        self.assertEqual(again.choices[0].message.content, answer.choices[0].message.content)
        self.assertGreater(again.usage.prompt_tokens_details.cached_tokens, 0)

    def test_stream(self):
        whole = self.ask("Count to five.", temperature=0, max_tokens=24).choices[0].message.content
        text, usage, finish = "", None, None
        for chunk in self.ask("Count to five.", temperature=0, max_tokens=24, stream=True,
                              stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        self.assertEqual(text, whole)
        self.assertEqual(usage.completion_tokens > 0, True)
        self.assertIn(finish, ("stop", "length"))

    def test_choices_differ_by_seed_and_repeat_with_it(self):
        first = self.ask("Tell me a story.", n=3, seed=7, max_tokens=16, temperature=1)
        texts = [c.message.content for c in first.choices]
        self.assertEqual([c.index for c in first.choices], [0, 1, 2])
        self.assertGreater(len(set(texts)), 1)

    def test_logprobs(self):
        answer = self.ask("Say yes.", logprobs=True, top_logprobs=3, temperature=0, max_tokens=4)
        for token in answer.choices[0].logprobs.content:
            self.assertLessEqual(token.logprob, 0)
            self.assertEqual(len(token.top_logprobs), 3)
            self.assertAlmostEqual(token.logprob, token.top_logprobs[0].logprob, places=5)
            self.assertEqual(bytes(token.bytes).decode(), token.token)

    def test_json(self):
        answer = self.ask("Describe a cat as JSON.", response_format={"type": "json_object"}, max_tokens=120, seed=1)
        if answer.choices[0].finish_reason == "stop":
            self.assertIsInstance(json.loads(answer.choices[0].message.content), dict)

    def test_json_schema(self):
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20},
                                                   "age": {"type": "integer", "minimum": 0},
                                                   "kind": {"enum": ["cat", "dog"]}},
                  "required": ["name", "age", "kind"], "additionalProperties": False}
        answer = self.ask("Invent a pet.", max_tokens=200, seed=3, response_format={
            "type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": schema}})
        pet = json.loads(answer.choices[0].message.content)
        self.assertEqual(list(pet), ["name", "age", "kind"])
        self.assertIn(pet["kind"], ("cat", "dog"))
        self.assertIsInstance(pet["age"], int)

    def test_errors_are_the_clients_own_types(self):
        with self.assertRaises(openai.NotFoundError):
            self.client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask("x", temperature=200)
        self.assertEqual(caught.exception.param, "temperature")
        with self.assertRaises(openai.NotFoundError):
            self.client.embeddings.create(model=self.model, input="x")
        with self.assertRaises(openai.BadRequestError) as caught:
            self.ask("x " * 20000)
        self.assertEqual(caught.exception.code, "context_length_exceeded")

    def cancelled(self):
        return self.server.idle()["scheduler"]["cancelled"]

    def test_a_timeout_of_the_client_cancels(self):
        before = self.cancelled()
        with self.assertRaises(openai.APITimeoutError):
            client_of(self.server, timeout=0.3).chat.completions.create(
                model=self.model, messages=user("Write a very long story.")["messages"], max_tokens=4000,
                extra_body={"ignore_eos": True})
        self.assertEqual(self.cancelled(), before + 1)

    def test_a_closed_stream_cancels(self):
        before = self.cancelled()
        stream = self.ask("Write a very long story.", stream=True, max_tokens=4000, extra_body={"ignore_eos": True})
        for i, _ in enumerate(stream):
            if i == 3:
                break
        stream.close()
        self.assertEqual(self.cancelled(), before + 1)

    def test_completions(self):
        answer = self.client.completions.create(model=self.model, prompt="The capital of France is", max_tokens=4,
                                                temperature=0, logprobs=2)
        self.assertIn("Paris", answer.choices[0].text)
        self.assertEqual(len(answer.choices[0].logprobs.tokens), answer.usage.completion_tokens)

    def test_penalties_and_bias_have_an_effect(self):
        plain = self.ask("Say a a a a a a", temperature=0, max_tokens=24).choices[0].message.content
        token = self.server.post("/tokenize", {"prompt": plain[:5], "add_special_tokens": False})[1]["tokens"][0]
        biased = self.ask("Say a a a a a a", temperature=0, max_tokens=24, logit_bias={str(token): -100})
        self.assertNotEqual(biased.choices[0].message.content, plain)
        apart = self.ask("Say a a a a a a", temperature=0, max_tokens=24, frequency_penalty=2, presence_penalty=2)
        self.assertNotEqual(apart.choices[0].message.content, plain)

    def test_many_at_once_with_one_prefix_store_it_once(self):
        prefix = "You are a patient teacher. " * 60
        before = self.server.idle()["scheduler"]
        results = []

        def ask(i):
            results.append(self.client.chat.completions.create(
                model=self.model, max_tokens=8, temperature=0,
                messages=[{"role": "system", "content": prefix}, {"role": "user", "content": f"Question {i}?"}]))

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(len(results), 8)
        n = results[0].usage.prompt_tokens
        after = self.server.idle()["scheduler"]
        computed = after["prompt_tokens_computed"] - before["prompt_tokens_computed"]
        self.assertLess(computed, n + 8 * 40)


@unittest.skipIf(shutil.which("promtool") is None, "promtool is not there (tools/setup --clients)")
class Prometheus(unittest.TestCase):
    def check(self, server):
        text = server.get("/metrics")[1]
        done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False)
        self.assertEqual((done.returncode, done.stdout + done.stderr), (0, ""))
        for line in text.splitlines():
            if not line.startswith("#"):
                value = float(line.rsplit(" ", 1)[1])
                self.assertTrue(value == value and abs(value) != float("inf"), line)
        return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def test_while_loading(self):
        server = Served(load_seconds=1)
        try:
            self.assertEqual(self.check(server)["pagedkv_ready"], "0")
        finally:
            server.__exit__()

    def test_before_and_after_requests(self):  # O-MET-01, -03
        with Served() as server:
            self.check(server)
            for i in range(24):
                self.assertEqual(server.chat(f"say:{i} " + "x" * i * 3)[0], 200)
            server.idle()
            m = self.check(server)
            state = {s: float(m[f'pagedkv_blocks{{state="{s}"}}']) for s in ("free", "open", "full", "shared", "cached")}
            self.assertEqual(state["open"] + state["full"] + state["shared"], 0)
            self.assertGreater(state["cached"], 0)
            self.assertEqual(sum(state.values()), 256)
            self.assertEqual(m["pagedkv_sequences_running"], "0")
            self.assertEqual(m["pagedkv_requests_total"], "24")

    def test_utilization_stays_within_its_range(self):  # O-MET-02
        with Served(num_blocks=64, context=512, max_queue=500) as server:
            threads = [threading.Thread(target=server.chat, args=(f"loop:{i}",), kwargs={"max_tokens": 60})
                       for i in range(40)]
            for t in threads:
                t.start()
            while any(t.is_alive() for t in threads):
                value = float(self.check(server)["pagedkv_block_utilization"])
                self.assertTrue(0 <= value <= 1)
            server.idle()
            time.sleep(0.05)
            self.assertEqual(self.check(server)["pagedkv_block_utilization"], "0")


@unittest.skipIf(shutil.which("curl") is None, "curl is not there")
class Curl(unittest.TestCase):
    def test_large_bodies_with_expect(self):
        with Served() as server:
            body = json.dumps({**user("say:ok"), "ignored": "x" * (2 << 20)})
            done = subprocess.run(["curl", "-s", "-H", "Expect: 100-continue", "--data-binary", "@-",
                                   server.url + "/v1/chat/completions"], input=body, text=True, capture_output=True,
                                  check=True)
            self.assertEqual(json.loads(done.stdout)["choices"][0]["message"]["content"], "ok")

    def test_a_stream(self):
        with Served() as server:
            done = subprocess.run(["curl", "-sN", "-d", json.dumps({**user("say:ok"), "stream": True}),
                                   server.url + "/v1/chat/completions"], text=True, capture_output=True, check=True)
            self.assertTrue(done.stdout.endswith("data: [DONE]\n\n"))


if __name__ == "__main__":
    unittest.main(warnings="ignore")
