"""The server with the libraries that people put before a model: llm, litellm, langchain-openai."""
import importlib.util
import os
import subprocess
import sys
import tempfile
import unittest

from served import Served

MODEL = os.environ.get("PAGEDKV_TEST_MODEL")
QUESTION = "What is the capital of France?"
TOO_LONG = "word " * 5000
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # prices are not fetched
os.environ["LANGSMITH_TRACING"] = "false"


def needs(package):
    return unittest.skipIf(importlib.util.find_spec(package) is None,
                           f"the {package} package is not there (tools/setup --clients)")


@unittest.skipIf(not MODEL, "PAGEDKV_TEST_MODEL names no model")
class Libraries(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.server = Served([os.environ["PAGEDKV_BIN"], "serve", "-m", MODEL, "--port", "0", "--context", "1024",
                             "--served-model-name", "smol"])

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()

    @needs("litellm")
    def test_litellm(self):
        import litellm

        def ask(content, **fields):
            return litellm.completion(model="openai/smol", api_base=self.server.url + "/v1", api_key="none",
                                      messages=[{"role": "user", "content": content}], max_tokens=24, temperature=0,
                                      num_retries=0, **fields)

        whole = ask(QUESTION).choices[0].message.content
        self.assertIn("Paris", whole)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in ask(QUESTION, stream=True))
        self.assertEqual(streamed, whole)
        litellm.suppress_debug_info = True
        with self.assertRaises(litellm.ContextWindowExceededError):
            ask(TOO_LONG)

    @needs("langchain_openai")
    def test_langchain(self):
        from langchain_core.exceptions import ContextOverflowError
        from langchain_openai import ChatOpenAI
        from pydantic import BaseModel

        class Capital(BaseModel):
            city: str
            country: str

        def model(max_tokens):
            return ChatOpenAI(base_url=self.server.url + "/v1", api_key="none", model="smol", temperature=0,
                              max_tokens=max_tokens, max_retries=0)

        whole = model(24).invoke(QUESTION).content
        self.assertIn("Paris", whole)
        self.assertEqual("".join(chunk.content for chunk in model(24).stream(QUESTION)), whole)
        several = model(8).batch([QUESTION, "Hello", "Count to ten."])
        self.assertTrue(all(answer.usage_metadata["output_tokens"] <= 8 for answer in several))
        capital = model(200).with_structured_output(Capital, method="json_schema").invoke(QUESTION)
        self.assertIn("Paris", capital.city)
        with self.assertRaises(ContextOverflowError):
            model(24).invoke(TOO_LONG)

    @needs("llm")
    def test_llm(self):
        with tempfile.TemporaryDirectory() as home:
            with open(os.path.join(home, "extra-openai-models.yaml"), "w", encoding="utf-8") as f:
                f.write(f"- model_id: smol\n  model_name: smol\n  api_base: {self.server.url}/v1\n"
                        "  supports_schema: true\n")

            def ask(*words):
                done = subprocess.run([sys.executable, "-m", "llm", "-m", "smol", "--key", "none", "-o", "temperature",
                                       "0", *words], env={**os.environ, "LLM_USER_PATH": home}, text=True,
                                      stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=120)
                self.assertEqual(done.returncode, 0, done.stderr)
                return done.stdout

            self.assertIn("Paris", ask(QUESTION))
            self.assertEqual(ask("--no-stream", QUESTION), ask(QUESTION))
            self.assertIn('"city"', ask("--schema", "city, country", "-o", "max_tokens", "200", QUESTION))


if __name__ == "__main__":
    unittest.main(warnings="ignore")
