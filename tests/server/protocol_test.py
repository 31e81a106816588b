"""HTTP at its edges, and who may ask: what is read, what is refused, and with which status."""
import json
import socket
import time
import unittest

from served import Served, WithServer, patient, post, raw, user


def get(path, *headers, version="1.1", method="GET"):
    return "\r\n".join([f"{method} {path} HTTP/{version}", *headers, "Connection: close", "", ""]).encode()


def status(answer):
    return int(answer.split(b" ", 2)[1])


class Http(WithServer):
    arguments = {"step_ms": 2}

    def status(self, data):
        return status(raw(self.server, data))

    def test_a_request_has_one_host(self):
        self.assertEqual(self.status(get("/health")), 400)
        self.assertEqual(self.status(get("/health", "Host: localhost", "Host: localhost")), 400)
        self.assertEqual(self.status(get("/health", "Host:")), 400)
        self.assertEqual(self.status(get("/health", "Host: localhost")), 200)
        self.assertEqual(self.status(get("/health", version="1.0")), 200)

    def test_targets_are_read_as_urls(self):
        host = "Host: localhost"
        self.assertEqual(self.status(get(f"http://localhost:{self.server.port}/health", host)), 200)
        self.assertEqual(self.status(get("http://evil.example/health", host)), 403)  # it counts before Host
        self.assertEqual(self.status(get("/%68ealth", host)), 200)
        self.assertIn(b'"id":"org/plain"', raw(self.server, get("/v1/models/org%2Fplain", host)))
        self.assertIn(b'"id":"org/plain"', raw(self.server, get("/v1/models/org/plain", host)))
        self.assertIn(b'"blocks"', raw(self.server, get("/stats?x=1&blocks=1", host)))
        self.assertNotIn(b'"states"', raw(self.server, get("/stats?xblocks=1", host)))
        for target in ("/%zz", "ftp://localhost/health", "health", "localhost:80"):
            self.assertEqual(self.status(get(target, host)), 400, target)

    def test_blank_lines_before_a_request_are_nothing(self):
        self.assertEqual(self.status(b"\r\n\r\n" + get("/health", "Host: localhost")), 200)

    def test_wrong_methods_are_405_with_what_is_allowed(self):
        for method, path, allowed in (("GET", "/v1/chat/completions", "POST"), ("POST", "/v1/models", "GET, HEAD"),
                                      ("DELETE", "/v1/models/scripted", "GET, HEAD"), ("POST", "/", "GET, HEAD")):
            code, headers, _ = self.server.request(method, path)
            self.assertEqual((code, headers["Allow"]), (405, allowed))
        code, headers, body = self.server.request("HEAD", "/v1/models/scripted")
        self.assertEqual((code, body, int(headers["Content-Length"]) > 20), (200, b"", True))
        self.assertEqual(self.server.request("HEAD", "/v1/models/nobody")[0], 404)

    def test_compressed_bodies_are_415(self):
        body = user("say:x")
        self.assertEqual(self.status(post(body, "Content-Encoding: gzip")), 415)
        self.assertEqual(self.status(post(body, "Content-Encoding: identity")), 200)
        self.assertEqual(self.status(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip, chunked"
                                     b"\r\n\r\n0\r\n\r\n"), 415)

    def test_streams_of_http_1_0_have_no_chunk_sizes(self):
        answer = raw(self.server, post({**user("say:abc"), "stream": True}, version="1.0"))
        head, body = answer.split(b"\r\n\r\n", 1)
        self.assertNotIn(b"chunked", head)
        self.assertTrue(body.startswith(b"data: {"), body[:40])
        self.assertTrue(body.endswith(b"data: [DONE]\n\n"))

    def test_the_limit_of_headers_is_the_limit(self):
        for n, code in ((16000, 200), (16384, 431), (17000, 431), (100000, 431)):
            self.assertEqual(self.status(get("/health", "Host: localhost", "X-Long: " + "x" * n)), code, n)

    def test_clients_that_send_no_more_get_their_answer(self):
        for stream in (False, True):
            answer = raw(self.server, post({**user("say:" + "abc" * 30), "stream": stream}), half_close=True)
            self.assertIn(b"200 OK", answer)
            self.assertTrue(b"[DONE]" in answer if stream else b"abc" * 30 in answer, answer[-200:])

    def test_clients_that_leave_unread_bytes_behind_are_noticed(self):
        gone = self.server.stats()["http"]["gone"]
        for stream in (False, True):
            sock = socket.create_connection(("127.0.0.1", self.server.port))
            sock.sendall(post({**user("loop:abc"), "max_tokens": 1500, "stream": stream}) + b"GET / HT")
            self.server.until(lambda s: s["scheduler"]["running"] == 1)
            sock.close()
            began = time.time()
            self.server.idle()
            self.assertLess(time.time() - began, patient(1.5))
        self.assertEqual(self.server.stats()["http"]["gone"], gone + 2)

    def test_nobody_gets_his_own_body_back(self):
        long = "x" * (1 << 20)
        for body in ('{"a": "' + long, json.dumps({**user("x"), "stop": {long: long}}), json.dumps({"prompt": {long: 1}}),
                     json.dumps({**user("x"), "response_format": {"type": long}}),
                     json.dumps({**user("x"), "response_format": {"type": "json_schema", "json_schema": {"schema": {
                         long: 1}}}})):
            code, _, text = self.server.request("POST", "/v1/chat/completions", body)
            self.assertEqual(code, 400)
            self.assertLess(len(text), 2000)
        code, _, text = self.server.request("GET", "/" + "x" * 10000)
        self.assertEqual((code, len(text) < 2000), (404, True))

    def test_what_the_web_side_refuses_is_counted_and_logged(self):
        self.status(b"nonsense\r\n\r\n")
        metrics = self.server.get("/metrics")[1]
        self.assertRegex(metrics, r'pagedkv_http_replies_total\{path="other",code="400"\} [1-9]')
        self.assertTrue(any("this is not HTTP/1.1" in line for line in self.server.log))


class Access(unittest.TestCase):
    def hosts(self, server, names):
        return [status(raw(server, get("/stats", "Host: " + name))) for name in names]

    def test_a_name_that_is_not_the_servers_is_refused(self):
        with Served() as server:
            port = server.port
            own = [f"127.0.0.1:{port}", "127.0.0.1", f"LOCALHOST:{port}", f"[::1]:{port}", "localhost.", "127.9.9.9"]
            self.assertEqual(self.hosts(server, own), [200] * len(own))
            evil = [f"evil.example:{port}", "192.168.1.7", "localhost.evil.example", "[::1", "a@localhost"]
            self.assertEqual(self.hosts(server, evil), [403] * len(evil))
            # DNS rebinding: the page's own origin is the name that leads here.
            code, answer = server.post("/v1/chat/completions", user("say:x"),
                                       headers={"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"})
            self.assertEqual((code, answer["error"]["code"]), (403, "host_not_allowed"))
            self.assertEqual(server.chat("say:x")[0], 200)

    def test_a_wildcard_host_is_called_by_any_address(self):
        with Served(host="0.0.0.0") as server:
            names = ["192.168.1.7", "[fe80::1]", socket.gethostname(), "evil.example"]
            self.assertEqual(self.hosts(server, names), [200, 200, 200, 403])

    def test_further_names_are_told(self):
        with Served(allowed_host="Box.example") as server:
            self.assertEqual(self.hosts(server, ["box.example:80", "evil.example"]), [200, 403])
        with Served(allowed_host="*") as server:
            self.assertEqual(self.hosts(server, ["box.example:80", "evil.example"]), [200, 200])

    def test_a_welcome_page_may_send_and_read_headers(self):
        origin = {"Origin": "https://good.example"}
        with Served(cors="https://good.example", max_body=1000) as server:
            asked = "authorization,content-type,x-stainless-os,x-stainless-retry-count"
            code, headers, _ = server.request("OPTIONS", "/v1/chat/completions",
                                              headers={**origin, "Access-Control-Request-Headers": asked})
            self.assertEqual((code, headers["Access-Control-Allow-Headers"]), (204, asked))
            _, headers, _ = server.request("POST", "/v1/chat/completions", user("say:x"), origin)
            for name in ("X-Request-Id", "X-Ignored-Fields"):
                self.assertIn(name, headers["Access-Control-Expose-Headers"])
            for body, more, code in (("x" * 2000, {}, 413), ("{}", {"X-Long": "x" * 20000}, 431)):
                got, headers, _ = server.request("POST", "/v1/chat/completions", body, {**origin, **more})
                self.assertEqual((got, headers["Access-Control-Allow-Origin"]), (code, "https://good.example"))

    def test_the_scheme_of_a_key_is_read_in_any_case(self):
        with Served(key="secret-key") as server:
            for scheme, code in (("bearer", 200), ("BEARER", 200), ("Basic", 401)):
                self.assertEqual(server.get("/v1/models", headers={"Authorization": scheme + " secret-key"})[0], code)


if __name__ == "__main__":
    unittest.main(warnings="ignore")
