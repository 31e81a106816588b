"""Runs the pagedkv binary (PAGEDKV_BIN) as a child process.

The model is PAGEDKV_TEST_MODEL: tools/model smollm2. The text is PAGEDKV_TEST_TEXT, or WikiText-2's test text in
../shared/data beside the checkout; it is not a part of the repository.
"""
import json
import os
import resource
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("PAGEDKV_BIN", str(ROOT / "build/release/bin/pagedkv"))
MODEL = os.environ.get("PAGEDKV_TEST_MODEL", "")
TEXT = os.environ.get("PAGEDKV_TEST_TEXT", str(ROOT.parent / "shared/data/wikitext-2-raw/wiki.test.raw"))
TIMEOUT = 600
OURS = ("PAGEDKV_", "MTPLX_", "NO_COLOR")

needs_model = unittest.skipUnless(MODEL, "PAGEDKV_TEST_MODEL is not set")
needs_text = unittest.skipUnless(Path(TEXT).is_file(), f"there is no {TEXT}; PAGEDKV_TEST_TEXT can name another")


def environment(extra=None):
    """The test's environment without what a developer's shell may have set for pagedkv."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    return {**kept, **(extra or {})}


class Done:
    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    def json(self):
        return json.loads(self.out)


def pagedkv(*words, env=None, stdin=b"", address_space=None):
    """Runs `pagedkv WORDS` to its end. address_space limits virtual memory, in bytes, as `ulimit -v` does."""
    def limit():
        if address_space:
            resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    done = subprocess.run([BINARY, *words], input=stdin, capture_output=True, env=environment(env), timeout=TIMEOUT,
                          preexec_fn=limit, check=False)
    return Done(done.returncode, done.stdout.decode("utf-8"), done.stderr.decode("utf-8", "replace"))


class CliTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def file(self, name, content):
        path = self.folder / name
        path.write_bytes(content)
        return str(path)

    def refused(self, done, code, *words):
        """Exit code, one message of the common form that has the words in it, and nothing on stdout."""
        self.assertEqual(done.code, code, done.err)
        self.assertEqual(done.out, "")
        self.assertRegex(done.err, r"(?m)^pagedkv: \[[a-z A-Z-]+\] ")
        for word in words:
            self.assertIn(word, done.err)
