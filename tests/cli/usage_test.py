"""What the command line refuses, and how it says so."""
import re
import subprocess
import unittest

from process import BINARY, ROOT, CliTest, environment, pagedkv

COMMANDS = (["run"], ["serve"], ["perplexity"], ["inspect"], ["info"], ["completion", "bash"], ["bench", "limits"],
            ["bench", "cache"], ["bench", "kernels"], ["bench", "products"], ["bench", "model"])


def options_of(command):
    """Every long option that a command's help lists."""
    text = pagedkv(*command, "--help").out
    return {name for line in text.split("\n") if re.match(r"  -", line)
            for name in re.findall(r"--[a-z][a-z0-9-]*", line.split("  ", 2)[1])}


class Usage(CliTest):
    def test_what_stdout_does_not_take_is_an_error(self):
        for words in (["--version"], ["--help"], ["run", "--help"], ["completion", "bash"], ["info", "--json"]):
            for redirected in (">/dev/full", ">&-"):
                with self.subTest(words=words, redirected=redirected):
                    done = subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", BINARY, *words], check=False,
                                          stderr=subprocess.PIPE, env=environment(), timeout=300)
                    self.assertEqual(done.returncode, 1)
                    self.assertIn(b"stdout cannot be written", done.stderr)

    def usage_error(self, words, *named, env=None):
        self.refused(pagedkv(*words, env=env), 2, "[usage]", *named)

    def run_error(self, words, *named):
        self.usage_error(["run", "-m", "none.gguf", "-p", "x", *words], *named)

    def test_numbers_are_whole_words_in_range(self):
        for option, name, low, high in (("--block-size", "--block-size", 1, 256), ("-c", "--context", 1, 2**31 - 1),
                                        ("-n", "--max-tokens", 1, 2**31 - 1), ("-t", "--threads", 1, 512),
                                        ("--num-blocks", "--num-blocks", 1, 2**31 - 1),
                                        ("--top-k", "--top-k", 0, 2**31 - 1), ("--seed", "--seed", 0, 2**63 - 1)):
            for word in (str(low - 1), str(high + 1), str(2 * high), "99999999999999999999", "-5", "12x", "1e99", "nan",
                         "", " 1", "0x10", "1.5"):
                with self.subTest(option=option, word=word):
                    self.run_error([option, word], f'{name}: "{word}" is not a whole number from {low} to {high}')

    def test_chunks_of_a_text_are_numbers_and_formats(self):
        for words, named in ((["-c", "3"], ("--context", '"3"', "4 to 2147483647")), (["--chunks", "0"], ("--chunks", '"0"')),
                             (["--reference", "q3"], ("--reference", "q3", "q8"))):
            with self.subTest(words=words):
                self.usage_error(["perplexity", "-m", "none.gguf", "-f", "x", *words], *named)

    def test_real_numbers_are_in_range(self):
        for option, low, high in (("--temp", 0, 100), ("--top-p", 0, 1), ("--min-p", 0, 1),
                                  ("--repeat-penalty", 0.1, 10)):
            for word in ("nan", "-nan", "inf", "-1", "1e99", "1e999", "101"):
                with self.subTest(option=option, word=word):
                    self.run_error([option, word], option, f'"{word}"', f"{low} to {high}")
            for word in ("", "x", "1x", "0.5.5"):
                with self.subTest(option=option, word=word):
                    self.run_error([option, word], f'{option}: "{word}" is not a number')

    def test_sizes_have_units_and_a_limit(self):
        for word in ("0", "-1", "1.5GiB", "12XB", "GiB", "99999999999GiB", "99999999999999999999", ""):
            with self.subTest(word=word):
                self.run_error(["--kv-memory", word], f'--kv-memory: "{word}" is not a size from 1 to 70368744177664')

    def test_unknown_modes_list_those_that_exist(self):
        for option in ("--kv-quant", "--paged-kv-quant", "--paged-kv-quantization", "--kv-cache-dtype"):
            self.run_error([option, "fp8"], "--kv-quant", "fp8", "q8", "q6", "q4", "bf16")
        self.run_error(["--cache-type-k", "q5"], "--cache-type-k", "q5", "q8")
        self.run_error(["--kv-quant", "q8:"], "--kv-quant")
        self.run_error(["--arena", "rows"], "rows", "block_major", "layer_major")

    def test_options_that_exclude_each_other(self):
        for words in (["--kv-quant", "q8", "--cache-type-k", "q8"], ["--kv-cache-dtype", "q8", "--cache-type-v", "q8"],
                      ["-f", "x"], ["--dynamic", "--no-dynamic"], ["--raw", "--system", "x"]):
            with self.subTest(words=words):
                self.run_error(words, "excludes")

    def test_what_is_missing_or_unknown_is_named(self):
        self.usage_error([], "command")
        self.usage_error(["frob"], "frob")
        self.usage_error(["bench", "frob"], "frob")
        self.usage_error(["run", "-p", "x"], "--model")
        self.usage_error(["run", "-m", "x"], "--prompt TEXT or --file FILE or --interactive or --session NAME")
        self.usage_error(["run", "-m", "x", "-p"], "--prompt")
        self.usage_error(["perplexity", "-m", "x"], "--file")
        self.run_error(["--frob"], "--frob")
        self.run_error(["--stop", ""], "--stop")
        self.run_error(["-p", "again"], "--prompt")

    def test_help_and_version_succeed_on_stdout(self):
        for words in (["--version"], ["run", "--version"], ["bench", "cache", "--version"]):
            done = pagedkv(*words)
            self.assertEqual((done.code, done.err), (0, ""))
            self.assertRegex(done.out, r"^pagedkv \d+\.\d+\.\d+\n$")
        for words in ([], *COMMANDS):
            done = pagedkv(*words, "--help")
            self.assertEqual((done.code, done.err), (0, ""))
            self.assertIn("Usage: pagedkv", done.out)

    def test_every_option_is_in_its_commands_part_of_the_documentation(self):
        text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
        names = r"--[a-z][a-z0-9-]*"
        intro, *parts = re.split(r"(?m)^## pagedkv ", text)
        parts = {part.split("\n", 1)[0]: set(re.findall(names, part)) for part in parts}
        for command in COMMANDS:
            with self.subTest(command=command):
                missing = options_of(command) - parts[command[0]] - set(re.findall(names, intro))
                self.assertEqual(missing, set(), "not in this command's part of docs/cli.md")
        listed = set().union(*map(options_of, COMMANDS))
        self.assertGreater(len(listed), 30)
        self.assertEqual(set(re.findall(names, text)) - listed, set(), "in docs/cli.md, but no command has it")


if __name__ == "__main__":
    unittest.main()
