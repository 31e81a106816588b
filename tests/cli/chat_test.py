"""pagedkv run -i with the real model: what is computed anew, the commands, a full window, Ctrl-C."""
import os
import pty
import re
import select
import signal
import subprocess
import time
import unittest

from process import BINARY, MODEL, CliTest, environment, needs_model, pagedkv

COUNTS = re.compile(r"\[(\d+) reused, (\d+) new; answer (\d+) tokens")
CHAT = ["run", "-i", "-m", MODEL, "--temp", "0", "-t", "1"]


@needs_model
class Chat(CliTest):
    def setUp(self):
        super().setUp()
        self.rest = b""

    def chat(self, *lines, options=("-n", "12"), code=0):
        """Exit code as told; the answers, and (reused, new, answered) of each turn."""
        done = pagedkv(*CHAT, *options, stdin="".join(line + "\n" for line in lines).encode())
        self.assertEqual(done.code, code, done.err)
        return done, [tuple(map(int, counts)) for counts in COUNTS.findall(done.err)]

    def test_a_second_turn_computes_only_what_is_new(self):
        done, turns = self.chat("What is the capital of France?", "And of Italy?", "Thanks.", options=("-n", "24"))
        self.assertIn("Paris", done.out)
        self.assertEqual(len(turns), 3)
        self.assertEqual(turns[0][0], 0)
        for (reused, new, answered), (next_reused, next_new, _) in zip(turns, turns[1:]):
            self.assertIn(reused + new + answered - next_reused, (0, 1), "a token that --max-tokens cut off is not stored")
            self.assertLess(next_new, 20, "a short message and the template around it")

    def test_a_turn_answers_as_one_prompt_does(self):
        done, _ = self.chat("Say hello.", options=("-n", "6"))
        self.assertEqual(done.out, pagedkv("run", "-m", MODEL, "--temp", "0", "-t", "1", "-n", "6", "-p", "Say hello.").out)

    def test_dropping_and_clearing_forget_turns(self):
        done, turns = self.chat("My name is Ada.", "I like rivers.", "/drop", "Hello?", "/clear", "Hello?", "/drop", "/drop",
                                options=("-n", "4"), code=1)
        self.assertIn("1 left", done.err)
        self.assertIn("2 turns forgotten", done.err)
        self.assertIn("no turn to forget", done.err)
        lengths = [reused + new for reused, new, _ in turns]
        self.assertLess(lengths[2], lengths[1] + lengths[0], "the first turn is gone")
        self.assertLess(lengths[3], lengths[0], "all turns are gone")

    def test_a_session_goes_on_where_it_ended(self):
        folder = self.folder / "blocks"
        options = ("-n", "16", "--reproducible", "--cache-dir", str(folder), "--cache-min-prefix", "16", "--cache-timeout", "3600", "--system",
                   "You know much about rivers, and tell it in few words.")
        whole, _ = self.chat("Which is the longest river?", "And the second one?", options=options[:3] + options[-2:])
        first, _ = self.chat("Which is the longest river?", options=(*options, "--session", "a.b-C_1"))
        second, turns = self.chat("And the second one?", options=(*options, "--session", "a.b-C_1"))
        self.assertEqual(first.out + second.out, whole.out)
        self.assertGreaterEqual(turns[0][0], 32, "blocks of the first turn came back")
        self.assertIn('1 turns of "a.b-C_1"', second.err)
        path = folder / "sessions" / "a.b-C_1.json"
        self.assertEqual(path.stat().st_mode & 0o777, 0o600)
        # Another one, and the same one without its --system.
        self.assertNotIn("turns of", self.chat("Hi.", options=(*options, "--session", "other"))[0].err)
        third, _ = self.chat("/save-text " + str(self.folder / "talk"), options=(*options[:-2], "--session", "a.b-C_1"))
        self.assertIn("rivers, and tell it", (self.folder / "talk").read_text(encoding="utf-8"))
        path.write_text(path.read_text(encoding="utf-8")[:-20], encoding="utf-8")
        broken, _ = self.chat("Hi.", options=(*options, "--session", "a.b-C_1"), code=1)
        self.assertIn("is damaged", broken.err)
        for name in ("", "../up", ".hidden", "a/b", "x" * 101, "ä"):
            self.assertEqual(pagedkv(*CHAT, "--cache-dir", str(folder), "--session", name).code, 2, name)
        self.assertEqual(pagedkv(*CHAT, "--session", "x").code, 2, "a session needs --cache-dir")

    def test_the_conversation_can_be_saved_but_not_over_a_file(self):
        path = self.folder / "talk to me.txt"
        done, _ = self.chat("Hi there", f"/save-text {path}", f"/save-text {path}", options=("-n", "3"), code=1)
        self.assertEqual(path.read_text(encoding="utf-8"), f"user:\nHi there\n\nassistant:\n{done.out[:-1]}\n\n")
        self.assertIn("File exists", done.err)

    def test_commands_are_told_and_unknown_ones_refused(self):
        done, turns = self.chat("/help", "/stats", "", "   ", "/quit", "never read")
        self.assertEqual((done.out, turns), ("", []))
        for word in ("/save-text FILE", "/drop", "/clear", "growth_bytes_copied"):
            self.assertIn(word, done.err)
        done, _ = self.chat("/frob", "/quit now", "/save-text", code=1)
        for word in ("there is no /frob", "/quit takes no argument", "/save-text needs"):
            self.assertIn(word, done.err)

    def test_a_full_window_offers_drop_and_goes_on(self):
        done, turns = self.chat("Tell me a story about a king.", "And then what happened?", "/drop", "And then?",
                                options=("-c", "48"), code=1)
        self.assertIn("[full] the window of 48 tokens is full: /drop", done.err)
        self.assertRegex(done.err, r"\[full\] with this message the conversation has \d+ tokens, the window has 48 .*/drop")
        self.assertEqual(len(turns), 2, "the refused message was not answered")

    def test_a_message_that_is_not_utf8_is_refused(self):
        done = pagedkv(*CHAT, "-n", "2", stdin=b"ab\xff\nHi\n")
        self.assertEqual(done.code, 1)
        self.assertIn("byte 2 of 3 is 0xff", done.err)
        self.assertEqual(len(COUNTS.findall(done.err)), 1)

    def test_options_that_make_no_sense_together(self):
        for words in (["-p", "x"], ["-f", "x"], ["--raw"], ["--json"], ["--stats"]):
            with self.subTest(words=words):
                self.refused(pagedkv(*CHAT, *words), 2, "[usage]", "excludes")

    def test_ctrl_c_stops_the_answer_and_not_the_program(self):
        child = subprocess.Popen([BINARY, *CHAT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 env=environment())
        self.addCleanup(child.kill)
        child.stdin.write(b"Tell me a very long story about a king.\n")
        child.stdin.flush()
        child.stdout.read(4)  # the answer has begun
        child.send_signal(signal.SIGINT)
        self.wait_for(child.stderr.fileno(), b"[cancelled]")
        out, err = child.communicate(b"/drop\n", timeout=600)
        self.assertEqual(child.returncode, 0, err)
        self.assertIn(b"0 left", err)

    def wait_for(self, stream, word, seconds=600):
        """Reads until the word has come. Returns what came up to its end; the rest waits for the next call."""
        got, end = self.rest, time.monotonic() + seconds
        while word not in got:
            left = end - time.monotonic()
            if left <= 0 or not select.select([stream], [], [], left)[0]:
                self.fail(f"{word} did not come; there is {got}")
            piece = os.read(stream, 4096)
            self.assertTrue(piece, f"the end came before {word}: {got}")
            got += piece
        at = got.index(word) + len(word)
        self.rest = got[at:]
        return got[:at]

    def test_lines_are_edited_on_a_terminal(self):
        terminal, other = pty.openpty()
        child = subprocess.Popen([BINARY, *CHAT, "-n", "2"], stdin=other, stdout=subprocess.DEVNULL, stderr=other,
                                 env=environment({"TERM": "xterm"}), start_new_session=True)
        self.addCleanup(os.close, terminal)
        self.addCleanup(child.wait)
        self.addCleanup(child.kill)
        os.close(other)

        def type_in(keys):
            self.wait_for(terminal, b"> ")
            os.write(terminal, keys)
        type_in(b"/hx\x7felp\n")  # backspace
        self.wait_for(terminal, b"/save-text FILE")
        type_in(b"/clear\x01 \n")  # Ctrl-A goes to the beginning: " /clear" is a message
        self.wait_for(terminal, b"[0 reused")
        type_in(b"\x1b[A\n")  # the arrow brings it back
        self.assertRegex(self.wait_for(terminal, b" reused"), rb"\[[1-9]\d* reused")
        type_in(b"/help")
        self.wait_for(terminal, b"/help")
        child.send_signal(signal.SIGINT)  # the line is thrown away
        type_in(b"\x04")  # Ctrl-D on an empty line
        self.assertEqual(child.wait(timeout=600), 0)


if __name__ == "__main__":
    unittest.main()
