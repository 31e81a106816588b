"""pagedkv info and pagedkv completion: no model needed."""
import os
import subprocess
import unittest

from process import CliTest, pagedkv
from usage_test import COMMANDS, options_of

COMPLETE = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_pagedkv
printf '%s\\n' "${COMPREPLY[@]}"
"""


class Info(CliTest):
    def test_json_tells_what_the_machine_has(self):
        done = pagedkv("info", "--json")
        self.assertEqual((done.code, done.err), (0, ""))
        info = done.json()
        self.assertEqual(list(info), ["version", "cpu", "threads", "isa", "products", "huge_pages", "ggml", "read_gbps",
                                      "memory"])
        self.assertLessEqual(info["threads"], len(os.sched_getaffinity(0)))
        supported = [entry["name"] for entry in info["isa"]["entries"] if entry["supported"]]
        self.assertEqual(info["isa"]["runs"], supported[0], "the best comes first")
        self.assertEqual(info["isa"]["because"], "best supported")
        self.assertEqual(supported[-1], "scalar")
        self.assertRegex(info["ggml"]["version"], r"^\d+\.\d+")
        self.assertGreater(len(info["ggml"]["features"]), 0)
        self.assertGreater(info["read_gbps"]["one_thread"], 0.1)
        self.assertLessEqual(info["memory"]["kv_memory"], info["memory"]["limit"])
        self.assertLessEqual(info["memory"]["limit"], info["memory"]["ram"])

    def test_the_environment_chooses_the_kernels_and_is_told(self):
        done = pagedkv("info", env={"PAGEDKV_ISA": "scalar"})
        self.assertEqual((done.code, done.err), (0, ""))
        self.assertIn("scalar runs: PAGEDKV_ISA says so", done.out)
        self.assertEqual(pagedkv("info", "--json", env={"PAGEDKV_ISA": "scalar"}).json()["products"], [], "nobody waits for those")
        self.assertEqual(pagedkv("info", "--json", env={"PAGEDKV_ISA": "scalar"}).json()["isa"]["because"], "PAGEDKV_ISA")
        self.refused(pagedkv("info", env={"PAGEDKV_ISA": "mmx"}), 1, "mmx", "scalar")

    def test_little_memory_is_no_reason_to_fall(self):
        done = pagedkv("info", "--json", address_space=300 << 20)
        if done.code == 0:
            self.assertIn("memory", done.json())
        else:
            self.refused(done, 1)


class Completion(CliTest):
    def setUp(self):
        super().setUp()
        done = pagedkv("completion", "bash")
        self.assertEqual((done.code, done.err), (0, ""))
        self.script = self.file("pagedkv.bash", done.out.encode())

    def complete(self, *words):
        done = subprocess.run(["bash", "-c", COMPLETE, "bash", self.script, "pagedkv", *words], capture_output=True,
                              text=True, cwd=self.folder, check=True)
        self.assertEqual(done.stderr, "")
        return set(done.stdout.split("\n")) - {""}

    def test_every_command_and_option_is_offered(self):
        commands = {words[0] for words in COMMANDS}
        self.assertEqual({word for word in self.complete("") if not word.startswith("-")}, commands)
        for command in COMMANDS:
            with self.subTest(command=command):
                self.assertEqual(self.complete(*command, "--"), options_of(command))

    def test_values_are_offered_where_they_are_known(self):
        self.file("tiny model.gguf", b"")
        self.assertEqual(self.complete("run", "--kv-quant", "q"), {"q8", "q6", "q4"})
        self.assertEqual(self.complete("perplexity", "-c", "8", "--reference", "o"), {"off"})
        self.assertEqual(self.complete("bench", "model", "-m", "tiny"), {"tiny model.gguf"})
        self.assertEqual(self.complete("run", "--arena", "l"), {"layer_major"})
        self.assertEqual(self.complete("run", "-n", ""), set())
        self.assertEqual(self.complete("bench", "k"), {"kernels"})

    def test_other_shells_are_refused(self):
        self.refused(pagedkv("completion", "zsh"), 2, "[usage]", "zsh")
        self.refused(pagedkv("completion"), 2, "[usage]")


if __name__ == "__main__":
    unittest.main()
