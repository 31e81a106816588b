"""tools/model and tools/setup, as far as they can be tried without fetching anything."""
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command, **environment):
    return subprocess.run([ROOT / "tools" / command[0], *command[1:]], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env={**os.environ, **environment})


class Model(unittest.TestCase):
    def test_an_unknown_name_lists_what_there_is(self):
        for arguments in [["llama9"], [], ["smollm2", "gemma3"]]:
            result = run("model", *arguments)
            self.assertEqual((result.returncode, result.stdout), (2, ""))
            self.assertIn("there are: smollm2, gemma3", result.stderr)

    def test_a_file_of_the_right_size_is_found_in_the_cache_and_nothing_is_fetched(self):
        with tempfile.TemporaryDirectory() as cache:
            file = Path(cache) / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
            file.parent.mkdir()
            with file.open("wb") as out:
                out.truncate(98362432)
            result = run("model", "smollm2", PAGEDKV_CACHE_DIR=cache)
            self.assertEqual((result.returncode, result.stdout, result.stderr), (0, f"{file}\n", ""))


class Setup(unittest.TestCase):
    def test_an_unknown_flag_shows_the_usage(self):
        result = run("setup", "--frobnicate")
        self.assertEqual(result.returncode, 2)
        self.assertIn("tools/setup --prefix", result.stderr)

    def test_the_cache_can_be_moved(self):
        self.assertEqual(run("setup", "--cache", PAGEDKV_CACHE_DIR="/elsewhere").stdout, "/elsewhere\n")


if __name__ == "__main__":
    unittest.main()
