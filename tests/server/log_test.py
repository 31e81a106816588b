"""`pagedkv serve` whose stderr takes nothing, or is read by nobody: it serves on, and counts what it could not say."""
import fcntl
import os
import re
import socket
import subprocess
import time
import unittest

from served import Served

MODEL = f"{os.environ['PAGEDKV_TINY_MODELS']}/d64_gqa3_tied.gguf"
F_SETPIPE_SZ = 1031


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as one:
        return one.getsockname()[1]


class Silent(Served):
    """A server whose stderr is the test's own affair: the port is given, the log is not read."""

    def __init__(self, stderr, closed=False):
        self.scripted = True  # waits until it is ready
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [os.environ["PAGEDKV_BIN"], "serve", "-m", MODEL, "-c", "128", "--port", str(self.port)]
        if closed:
            command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)

    def wait_ready(self, seconds=300):
        until = time.time() + seconds
        while time.time() < until and self.process.poll() is None:
            try:
                if self.get("/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"the server is not ready; it ended with {self.process.poll()}")

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Log(unittest.TestCase):
    def ask(self, server, n=1):
        for _ in range(n):
            status, answer = server.post("/v1/completions", {"prompt": "abc", "max_tokens": 1, "temperature": 0})
            self.assertEqual(status, 200, answer)

    def serves_on(self, server):
        self.ask(server, 5)
        lost = server.stats()["log_lines_lost"]
        self.assertGreaterEqual(lost, 5)
        metrics = server.request("GET", "/metrics")[2].decode()
        self.assertGreaterEqual(int(re.search(r"(?m)^pagedkv_log_lines_lost_total (\d+)$", metrics)[1]), lost)
        self.assertEqual(server.stop(), 0)

    def test_a_full_disk_loses_lines_and_nothing_else(self):
        with open("/dev/full", "wb") as full, Silent(full) as server:
            self.serves_on(server)

    def test_a_closed_stderr_is_no_connections_number(self):
        with Silent(None, closed=True) as server:
            self.serves_on(server)

    def test_a_reader_that_left_raises_no_signal(self):
        read, write = os.pipe()
        os.close(read)
        with Silent(write) as server:
            os.close(write)
            self.serves_on(server)

    def fill_and_read(self, end, write_end):
        with Silent(write_end) as server:
            self.ask(server, 60)
            lost = server.stats()["log_lines_lost"]
            self.assertGreater(lost, 0)
            os.set_blocking(end, False)
            text = b""
            while True:
                try:
                    text += os.read(end, 65536)
                except BlockingIOError:
                    break
            self.ask(server)
            until = time.time() + 20
            while b"lines were lost" not in text and time.time() < until:
                try:
                    text += os.read(end, 65536)
                except BlockingIOError:
                    time.sleep(0.02)
            self.assertIn(f"pagedkv: [log] {lost} lines were lost: Resource temporarily unavailable\n".encode(), text)
            self.assertTrue(all(re.match(rb"  \S|path=|id=|status=|pagedkv: |$", line) for line in text.split(b"\n")[:-1]), text)
            self.assertEqual(server.stop(), 0)

    def test_a_pipe_that_nobody_reads_drops_lines_and_says_how_many_later(self):
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        self.addCleanup(os.close, write)
        fcntl.fcntl(write, F_SETPIPE_SZ, 4096)
        self.fill_and_read(read, write)
        self.assertTrue(os.get_blocking(write), "the pipe's other users keep their mode")

    def test_so_does_a_socket(self):  # as systemd's journal gives it
        ours, theirs = socket.socketpair()
        self.addCleanup(ours.close)
        self.addCleanup(theirs.close)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.fill_and_read(ours.fileno(), theirs.fileno())


if __name__ == "__main__":
    unittest.main()
