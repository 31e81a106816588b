"""Starts servers for tests, and talks to them below any client library."""
import contextlib
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
import unittest
import urllib.request


def patient(seconds):
    """What takes this long on a quiet machine may take this much longer here: a bound that only a hang or a wait behind
    others reaches, however slow or busy the machine is."""
    return 20 * seconds


class Served:
    """A server process. `args`: of the scripted server; `command`: another one, whose URL line is looked for."""

    def __init__(self, command=None, **args):
        self.scripted = command is None
        command = command or [os.environ["PAGEDKV_SCRIPTED_SERVER"], *(f"{k}={v}" for k, v in args.items())]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log = []
        self.port = None
        self.reader = threading.Thread(target=self._read_log, daemon=True)
        self.reader.start()
        if self.scripted:
            self.port = int(self.process.stdout.readline())
        else:
            until = time.time() + 600
            while self.port is None and time.time() < until and self.process.poll() is None:
                time.sleep(0.05)
            if self.port is None:
                raise RuntimeError("".join(self.log))
        self.url = f"http://127.0.0.1:{self.port}"

    def _read_log(self):
        for line in self.process.stderr:
            self.log.append(line)
            if not self.scripted and " URL " in line:
                self.port = int(line.split("://")[1].split()[0].rsplit(":", 1)[1])

    def __enter__(self):
        if self.scripted:
            self.wait_ready()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def wait_ready(self, seconds=300):
        until = time.time() + seconds
        while time.time() < until:
            if self.get("/health")[0] == 200:
                return
            time.sleep(0.02)
        raise RuntimeError("the server is not ready")

    def request(self, method, path, body=None, headers=None, timeout=600):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        if isinstance(body, (dict, list)):
            body = json.dumps(body)
        if isinstance(body, str):
            body = body.encode("utf-8", "surrogatepass")
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, dict(answer.getheaders()), text

    def get(self, path, **kwargs):
        status, _, text = self.request("GET", path, **kwargs)
        return status, (json.loads(text) if text[:1] == b"{" else text.decode())

    def post(self, path, body, **kwargs):
        status, _, text = self.request("POST", path, body, **kwargs)
        return status, json.loads(text)

    def chat(self, content, **fields):
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **fields})

    def stats(self):
        return self.get("/stats")[1]

    def until(self, holds, seconds=300):
        """Stats once `holds` of them."""
        end = time.time() + seconds
        while not holds(stats := self.stats()):
            if time.time() > end:
                raise AssertionError(f"not within {seconds} s: {stats}")
            time.sleep(0.02)
        return stats

    def idle(self, seconds=300):
        """Stats once nothing runs or waits and no block is held."""
        def nothing_held(s):
            c = s["cache"]
            return (s["scheduler"]["running"] == s["scheduler"]["waiting"] == 0
                    and c["blocks_open"] + c["blocks_full"] + c["blocks_shared"] == 0)
        return self.until(nothing_held, seconds)

    def rss(self):
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as f:
            return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    def stop(self, timeout=300):
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)


class WithServer(unittest.TestCase):
    """Tests of one scripted server, `server`, which `arguments` tell what to be."""
    arguments = {}

    @classmethod
    def setUpClass(cls):
        cls.server = Served(**cls.arguments).__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.server.__exit__()


def stream_socket(server, body, path="/v1/chat/completions"):
    """A raw socket on which a streamed request has been sent; the server closes it, or the process's end."""
    data = json.dumps({"stream": True, **body}).encode()
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.sendall(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
                 % (path.encode(), len(data), data))
    return sock


def raw(server, data, half_close=False, timeout=120):
    """All that comes back for these bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.settimeout(timeout)
        sock.sendall(data)
        if half_close:
            sock.shutdown(socket.SHUT_WR)
        out = b""
        while piece := sock.recv(65536):
            out += piece
        return out


def post(body, *headers, version="1.1", path="/v1/chat/completions"):
    data = json.dumps(body).encode()
    return "\r\n".join([f"POST {path} HTTP/{version}", "Host: localhost", f"Content-Length: {len(data)}", *headers,
                        "Connection: close", "", ""]).encode() + data


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


def events_of(text):
    """The data of server-sent events."""
    return [line[6:] for line in text.split("\n\n") if line.startswith("data: ")]
