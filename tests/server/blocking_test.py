"""Nobody blocks everybody: bodies that are hard to read, and who waits meanwhile."""
import json
import socket
import threading
import time
import unittest

from served import Served, patient, user



def with_schema(schema, **fields):
    return {**user("say:x"), **fields, "response_format": {"type": "json_schema",
                                                           "json_schema": {"name": "n", "schema": schema}}}


HARD = {
    "40,000 messages": {"messages": [{"role": "user", "content": f"hello there {i}"} for i in range(40000)]},
    "an enum of 100,000": with_schema({"enum": [f"word{i}" for i in range(100000)]}),
    "100,000 keys beside a schema": with_schema({"type": "string"}, metadata={f"k{i}": i for i in range(100000)}),
    "a prompt of 8 MB": {"prompt": "lorem ipsum " * 660000},
    "a million ids": {"prompt": [1] * 1000000},
    "20,000 properties": with_schema({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20000)},
                                      "required": [f"p{i}" for i in range(20000)]}),
}


class Blocking(unittest.TestCase):
    def test_hard_bodies_keep_nobody_waiting(self):
        with Served(context=256) as server:
            for name, body in HARD.items():
                data = json.dumps(body)
                path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
                began = time.time()
                threads = [threading.Thread(target=server.request, args=("POST", path, data)) for _ in range(2)]
                for t in threads:
                    t.start()
                while any(t.is_alive() for t in threads):
                    for ask in (lambda: server.get("/health"), lambda: server.get("/metrics"), server.stats,
                                lambda: server.chat("say:ok")):
                        asked = time.time()
                        ask()
                        self.assertLess(time.time() - asked, patient(0.5), name)
                self.assertLess(time.time() - began, patient(10), name)

    def test_what_can_never_fit_is_refused_before_it_is_tokenized(self):
        with Served(context=256) as server:
            for field, path in (("prompt", "/v1/completions"), ("messages", "/v1/chat/completions")):
                text = "x" * 4096  # the tokens of this vocabulary have four bytes at most
                body = {"prompt": text} if field == "prompt" else user(text)
                status, answer = server.post(path, body)
                self.assertEqual((status, answer["error"]["param"], answer["error"]["code"]),
                                 (400, field, "context_length_exceeded"))
                self.assertIn("prompt is too long", answer["error"]["message"])
                self.assertIn("at least 1024 tokens", answer["error"]["message"])
            self.assertEqual(server.post("/v1/completions", {"prompt": " " * 1023 + "x"})[0], 400)

    def test_nothing_is_done_for_clients_that_left_the_queue(self):
        with Served(context=256) as server:
            body = json.dumps(HARD["40,000 messages"]).encode()
            socks = []
            for _ in range(20):
                sock = socket.create_connection(("127.0.0.1", server.port))
                sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
                             % (len(body), body))
                socks.append(sock)
            for sock in socks:
                sock.close()
            began = time.time()
            self.assertEqual(server.request("POST", "/v1/chat/completions", body)[0], 400)
            self.assertLess(time.time() - began, patient(2))
            self.assertGreater(server.stats()["http"]["gone"], 10)


if __name__ == "__main__":
    unittest.main(warnings="ignore")
