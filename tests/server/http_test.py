"""The server over HTTP, in front of a scripted model: what comes in, what goes out, who is hurt by whom."""
import json
import os
import signal
import socket
import threading
import time
import unittest

from served import Served, WithServer, events_of, patient, stream_socket, user


class Body(WithServer):
    arguments = {"context": 64}

    def refused(self, body, field=None, path="/v1/chat/completions", status=400):
        got, answer = self.server.post(path, body)
        self.assertEqual(got, status, (body if len(str(body)) < 200 else "...", answer))
        self.assertEqual(set(answer["error"]), {"message", "type", "param", "code"})
        if field:
            self.assertEqual(answer["error"]["param"], field)
            self.assertIn(field.split(".")[0].split("[")[0], answer["error"]["message"])
        self.assertEqual(self.server.get("/health")[0], 200)
        return answer["error"]

    def test_malformed_json_is_400(self):  # O-API-01
        for body in ('{"messages":[{"role":"user","content":"hi"}],"stream":true, x}', "", "[]", "null",
                     '{"messages":[{"role":"us', '"text"', "{", "\x00"):
            self.refused(body)

    def test_empty_messages_and_prompts_name_the_field(self):  # O-API-02
        for body in ({"messages": []}, {}, {"messages": None}):
            self.refused(body, "messages")
        self.refused({"prompt": []}, "prompt", "/v1/completions")
        self.refused({}, "prompt", "/v1/completions")

    def test_deep_nesting_is_400(self):  # O-API-03
        for n in (3000, 100000):
            self.refused("[" * n)
            self.refused('{"a":' * n)
            self.refused('{"messages":[{"role":"user","content":"x"}],"response_format":{"type":"json_schema",'
                         '"json_schema":{"schema":' + '{"items":' * n + "{}" + "}" * n + "}}}")

    def test_bodies_past_the_limit_are_413_and_take_no_memory(self):  # O-API-04
        before = self.server.rss()
        sock = socket.create_connection(("127.0.0.1", self.server.port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000000\r\n\r\n")
        self.assertIn(b"413", sock.recv(4096))
        sock.close()
        sock = socket.create_connection(("127.0.0.1", self.server.port))
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            for _ in range(1600):
                sock.sendall(chunk)
        except OSError:
            pass  # closed: good
        sock.close()
        self.assertLess(self.server.rss() - before, 40 << 20)
        self.assertEqual(self.server.get("/health")[0], 200)

    def test_a_body_of_one_megabyte_is_refused_for_its_tokens_alone(self):  # O-API-05
        error = self.refused(user("x" * (1 << 20)), "messages")
        self.assertEqual(error["code"], "context_length_exceeded")

    def test_history_with_tool_calls_is_read(self):  # O-API-06
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for assistant in ({"role": "assistant", "content": None, "tool_calls": [call]},
                          {"role": "assistant", "tool_calls": [call]}):
            status, answer = self.chat_long([{"role": "user", "content": "a"}, assistant,
                                             {"role": "tool", "tool_call_id": "1", "content": "r"},
                                             {"role": "user", "content": "say:on"}])
            self.assertEqual(status, 200, answer)

    def chat_long(self, messages):
        with Served(context=512) as server:
            return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 4})

    def test_every_text_part_is_in_the_prompt(self):  # O-API-07
        with Served() as server:
            body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "say:alpha"},
                                                              {"type": "text", "text": "beta"}]}]}
            self.assertEqual(server.post("/v1/chat/completions", body)[1]["choices"][0]["message"]["content"],
                             "alphabeta")

    def test_wrong_types_name_the_field(self):  # O-API-08
        for field, value in (("stream", "yes"), ("stop", 7), ("temperature", "hot"), ("max_tokens", 1.5), ("n", "2"),
                             ("top_p", []), ("seed", "x"), ("logit_bias", [1]), ("user", 5), ("cache_salt", {}),
                             ("logprobs", 3), ("response_format", "json"), ("stream_options", 1), ("top_k", 1.5)):
            self.refused({**user("x"), field: value}, field)
        self.refused({"messages": "hi"}, "messages")
        self.refused({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role")
        self.refused({"messages": [{"role": "user", "content": 5}]}, "messages[0].content")
        self.refused({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                     "messages[0].content[0].type")
        self.refused({**user("x"), "tools": [{"type": "function"}]}, "tools")

    def test_limits_below_one_are_400(self):  # O-API-09
        for value in (0, -1, -223):
            self.refused({**user("x"), "max_tokens": value}, "max_tokens")
            self.refused({**user("x"), "max_completion_tokens": value}, "max_completion_tokens")

    def test_huge_limits_mean_what_the_context_leaves(self):  # O-API-10
        for value in ("2147483647", "1000000000000000000", "9223372036854775807", "9.2e18", "18446744073709551615",
                      "1e300"):
            body = '{"messages":[{"role":"user","content":"say:ok"}],"max_tokens":%s}' % value
            status, answer = self.server.post("/v1/chat/completions", body)
            self.assertEqual((status, answer["choices"][0]["message"]["content"]), (200, "ok"))
            self.assertEqual(self.server.get("/health")[0], 200)

    def test_a_prompt_that_fills_the_context_is_400_before_any_event(self):  # O-API-11
        for n in (64, 65, 200):
            for stream in (False, True):
                # The template adds "user> " and two more; the mark of completions adds one.
                for path, body in (("/v1/chat/completions", user("x" * (n - 8))),
                                   ("/v1/completions", {"prompt": "x" * (n - 1)})):
                    error = self.refused({**body, "stream": stream}, path=path)
                    self.assertEqual(error["code"], "context_length_exceeded")
                    self.assertIn(str(n), error["message"])
                    self.assertIn("64", error["message"])

    def test_answers_stop_when_the_context_is_full(self):  # O-API-12
        status, answer = self.server.post("/v1/completions",
                                          {"prompt": "x" * 39, "max_tokens": 50, "ignore_eos": True})
        self.assertEqual(status, 200)
        self.assertEqual(answer["usage"]["completion_tokens"], 25)  # the last one needs no slot
        self.assertEqual(answer["choices"][0]["finish_reason"], "length")
        self.assertEqual(self.server.chat("say:ok")[0], 200)

    def test_lone_surrogates_are_400(self):  # O-API-16
        for body in (r'{"messages":[{"role":"user","content":"\ud83d"}]}',
                     r'{"messages":[{"role":"user","content":"\ude00\ud83d"}]}',
                     r'{"messages":[{"role":"user","content":"x"}],"stop":"\ud83d"}'):
            self.refused(body)
        self.refused(b'{"messages":[{"role":"user","content":"\xff\xfe"}]}')

    def test_numbers_that_are_none_are_400(self):  # O-API-23
        for field in ("temperature", "top_p", "presence_penalty", "frequency_penalty", "min_p"):
            for value in ("NaN", "1e999", "-3", '"x"'):
                self.refused('{"messages":[{"role":"user","content":"x"}],"%s":%s}' % (field, value))
        for value in ("-5", "2147483648"):
            self.refused('{"messages":[{"role":"user","content":"x"}],"top_k":%s}' % value, "top_k")
        status, _ = self.server.post("/v1/chat/completions",
                                     {**user("say:x"), "temperature": None, "top_p": None, "top_k": -1})
        self.assertEqual(status, 200)

    def test_errors_of_streams_are_plain_and_quick(self):  # O-API-17
        started = time.time()
        self.refused({**user("x"), "stream": True, "n": 0}, "n")
        error = self.refused({**user("x"), "stream": True, "model": "nobody"}, "model", status=404)
        self.assertEqual(error["code"], "model_not_found")
        self.assertLess(time.time() - started, patient(1))

    def test_unknown_paths_and_methods(self):
        status, answer = self.server.post("/v1/embeddings", {})
        self.assertEqual((status, answer["error"]["code"]), (404, "not_found"))
        self.assertEqual(self.server.request("GET", "/v1/chat/completions")[0], 405)
        self.assertEqual(self.server.request("BREW", "/")[0], 405)

    def test_fields_that_are_not_known_are_told(self):
        status, headers, _ = self.server.request("POST", "/v1/chat/completions",
                                                 {**user("say:x"), "shiny_new_field": 1})
        self.assertEqual(status, 200)
        self.assertEqual(headers["X-Ignored-Fields"], "shiny_new_field")

    def test_tokenize_and_detokenize(self):
        status, answer = self.server.post("/tokenize", {"prompt": "abc", "add_special_tokens": False})
        self.assertEqual((status, answer["tokens"], answer["count"]), (200, [97, 98, 99], 3))
        self.assertEqual(self.server.post("/detokenize", {"tokens": [97, 98]})[1]["prompt"], "ab")
        self.assertEqual(self.server.post("/detokenize", {"tokens": [9999]})[0], 400)
        self.assertEqual(self.server.post("/tokenize", {"prompt": 5})[0], 400)

    def test_several_prompts_give_several_choices(self):
        status, answer = self.server.post("/v1/completions", {"prompt": ["say:a", "say:b"], "n": 2})
        self.assertEqual([c["text"] for c in answer["choices"]], ["a", "a", "b", "b"])
        self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2, 3])


class Text(WithServer):
    def streamed(self, content, **fields):
        _, _, text = self.server.request("POST", "/v1/chat/completions", {**user(content), "stream": True, **fields})
        events = events_of(text.decode("utf-8", "strict"))
        self.assertEqual(events[-1], "[DONE]")
        return [json.loads(e) for e in events[:-1]]

    def test_characters_over_several_tokens_are_whole(self):  # O-API-13
        for emoji in ("\U0001F600", "\u20ac", "a\U0001F600b\U0001F680"):
            deltas = [c["choices"][0]["delta"].get("content", "") for c in self.streamed("say:" + emoji)]
            self.assertEqual("".join(deltas), emoji)
            self.assertNotIn("\ufffd", "".join(deltas))

    def test_stop_strings_over_several_tokens(self):  # O-API-14
        self.assertEqual(self.server.chat("say:The quick brown fox jumps", stop=["own fox"])[1]["choices"][0]["message"]
                         ["content"], "The quick br")
        deltas = self.streamed("say:The quick brown fox jumps", stop=["own fox"])
        self.assertEqual("".join(d["choices"][0]["delta"].get("content", "") for d in deltas), "The quick br")
        self.assertEqual(deltas[-1]["choices"][0]["finish_reason"], "stop")
        self.assertEqual(self.server.chat("say:The quick brown fox jumps", stop=["own cat"])[1]["choices"][0]["message"]
                         ["content"], "The quick brown fox jumps")

    def test_text_that_might_have_become_a_stop_is_not_lost(self):  # O-API-15
        self.assertEqual(self.server.chat("say:...abXY", stop="XYZ")[1]["choices"][0]["message"]["content"], "...abXY")
        answer = self.server.chat("say:...abXYzzz", stop="XYZ", max_tokens=7)[1]["choices"][0]
        self.assertEqual((answer["message"]["content"], answer["finish_reason"]), ("...abXY", "length"))

    def test_usage_comes_last_and_only_when_asked_for(self):  # O-API-18
        chunks = self.streamed("say:hey", stream_options={"include_usage": True})
        self.assertEqual(chunks[-1]["choices"], [])
        self.assertEqual(chunks[-1]["usage"]["completion_tokens"], 3)
        self.assertTrue(all(c["usage"] is None for c in chunks[:-1]))
        for options in ({"include_usage": False}, None):
            self.assertFalse(any(c.get("usage") for c in self.streamed("say:hey", stream_options=options)))

    def test_roles_ids_and_finish_reasons_of_a_stream(self):  # O-API-19
        chunks = self.streamed("say:hello", n=2)
        for index in (0, 1):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            self.assertEqual(mine[0]["delta"]["role"], "assistant")
            self.assertTrue(all(c["finish_reason"] is None for c in mine[:-1]))
            self.assertEqual(mine[-1]["finish_reason"], "stop")
        self.assertEqual(len({c["id"] for c in chunks}), 1)
        self.assertEqual(len({c["created"] for c in chunks}), 1)

    def test_n_choices_each_time(self):  # O-API-20
        for _ in range(10):
            answer = self.server.chat("say:abc", n=4)[1]
            self.assertEqual([c["index"] for c in answer["choices"]], [0, 1, 2, 3])
        answer = self.server.chat("say:abc", n=4, max_tokens=1)[1]
        self.assertEqual([c["message"]["content"] for c in answer["choices"]], ["a"] * 4)
        self.assertEqual(answer["usage"]["prompt_tokens"], len("user> say:abc\n") + 1)

    def test_logprobs_are_finite_json(self):  # O-API-21
        _, _, text = self.server.request("POST", "/v1/chat/completions", {
            **user("say:abc"), "logprobs": True, "top_logprobs": 5, "top_k": 1, "logit_bias": {"5": -100}})
        answer = json.loads(text, parse_constant=lambda name: self.fail(name))
        content = answer["choices"][0]["logprobs"]["content"]
        self.assertEqual([t["token"] for t in content], ["a", "b", "c"])
        self.assertEqual(len(content[0]["top_logprobs"]), 5)

    def test_cached_tokens_are_told_as_they_are(self):  # O-MET-05
        body = {"prompt": "unique prompt 19 ch", "max_tokens": 2}
        with Served(block_size=4) as server:
            first = server.post("/v1/completions", body)[1]["usage"]
            second = server.post("/v1/completions", body)[1]["usage"]
            self.assertEqual((first["prompt_tokens"], first["prompt_tokens_details"]["cached_tokens"]), (20, 0))
            self.assertTrue(16 <= second["prompt_tokens_details"]["cached_tokens"] <= 19)
            s = server.idle()["scheduler"]
            self.assertEqual(s["prompt_tokens_computed"] + s["prompt_tokens_cached"], 40)

    def test_salts_share_nothing(self):
        for salt in ("one", "two"):
            usage = self.server.chat("say:" + "x" * 100, cache_salt=salt)[1]["usage"]
            self.assertEqual(usage["prompt_tokens_details"]["cached_tokens"], 0)
        usage = self.server.chat("say:" + "x" * 100, cache_salt="two")[1]["usage"]
        self.assertGreater(usage["prompt_tokens_details"]["cached_tokens"], 90)

    def test_several_requests_on_one_connection(self):
        import http.client
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port)
        for i in range(5):
            connection.request("POST", "/v1/chat/completions", json.dumps({**user(f"say:{i}"), "stream": i % 2 == 0}))
            text = connection.getresponse().read().decode()
            self.assertIn(str(i), text)


class Clients(unittest.TestCase):
    def test_a_client_that_leaves_is_noticed(self):  # O-CONC-01
        with Served(step_ms=5) as server:
            sock = stream_socket(server, {**user("loop:abc"), "max_tokens": 2000})
            for _ in range(3):
                sock.recv(4096)
            sock.close()
            started = time.time()
            server.idle()
            self.assertLess(time.time() - started, patient(1.5))
            sock = stream_socket(server, {**user("loop:abc"), "max_tokens": 2000, "stream": False})
            server.until(lambda s: s["scheduler"]["running"] == 1)
            sock.close()
            server.idle()
            self.assertEqual(server.stats()["scheduler"]["cancelled"], 2)

    def test_choices_stop_with_their_client(self):  # O-CONC-04
        with Served(step_ms=5) as server:
            sock = stream_socket(server, {**user("loop:abc"), "max_tokens": 1000, "n": 3})
            sock.recv(4096)
            sock.recv(4096)
            sock.close()
            self.assertGreater(server.idle()["scheduler"]["cancelled"], 0)

    def test_a_full_queue_is_429_at_once(self):  # O-CONC-06
        with Served(max_num_seqs=1, max_queue=4, step_ms=200) as server:
            results = []

            def ask(i):
                started = time.time()
                status, headers, text = server.request("POST", "/v1/chat/completions",
                                                       {**user(f"loop:{i}"), "max_tokens": 5})
                results.append((status, headers, json.loads(text), time.time() - started))

            threads = [threading.Thread(target=ask, args=(i,)) for i in range(10)]
            for t in threads:
                t.start()
            self.assertEqual(server.get("/health")[0], 200)
            for t in threads:
                t.join()
            refused = [r for r in results if r[0] != 200]
            self.assertEqual(len(refused), 5)
            for status, headers, answer, took in refused:
                self.assertEqual(status, 429)
                self.assertIn("Retry-After", headers)
                self.assertIn("max_queue", answer["error"]["message"])
                self.assertLess(took, patient(0.5))

    def test_a_reader_that_never_reads_costs_little_and_hurts_nobody(self):  # O-CONC-08
        with Served(context=100000, num_blocks=8192, step_ms=1) as server:
            server.chat("say:warm")
            before = server.rss()
            sock = stream_socket(server, {**user("flood:"), "max_tokens": 3200})
            started = time.time()
            self.assertEqual(server.chat("say:fine")[1]["choices"][0]["message"]["content"], "fine")
            self.assertLess(time.time() - started, patient(2))
            self.assertEqual(self.slow_readers(server), 1)
            server.idle()
            self.assertLess(server.rss() - before, 24 << 20)
            sock.close()

    def test_a_stalled_reader_is_cut_off_after_the_write_timeout(self):
        with Served(context=100000, num_blocks=8192, send_buffer=1 << 30, write_seconds=1) as server:
            sock = stream_socket(server, {**user("flood:"), "max_tokens": 300})
            self.assertEqual(self.slow_readers(server), 1)
            server.idle()
            sock.close()

    @staticmethod
    def slow_readers(server):
        """How many were cut off, once one was."""
        return server.until(lambda s: s["http"]["slow_readers"] > 0)["http"]["slow_readers"]

    def test_a_thousand_streams_that_wait_cost_little(self):
        with Served(max_num_seqs=1, max_queue=2000, step_ms=20, context=4096) as server:
            running = stream_socket(server, {**user("loop:abc"), "max_tokens": 4000})
            running.recv(4096)
            before = server.rss()
            waiting = [stream_socket(server, {**user(f"say:{i}"), "max_tokens": 100}) for i in range(1000)]
            server.until(lambda s: s["scheduler"]["waiting"] == 1000)
            if "PAGEDKV_SANITIZED" not in os.environ:
                self.assertLess((server.rss() - before) / 1000, 64 << 10)
            began = time.time()
            self.assertEqual(server.get("/health")[0], 200)
            self.assertLess(time.time() - began, patient(1))
            for sock in [running, *waiting]:
                sock.close()
            server.idle()
            self.assertEqual(server.stats()["scheduler"]["cancelled"], 1001)

    def test_slow_headers_and_bodies_are_cut_off(self):
        with Served(header_seconds=1, body_seconds=1) as server:
            slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
            for s in slow[:10]:
                s.sendall(b"POST /v1/chat/comp")
            for s in slow[10:]:
                s.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            self.assertEqual(server.chat("say:ok")[0], 200)
            time.sleep(1.6)
            for s in slow:
                s.settimeout(300)
                try:
                    while s.recv(4096):
                        pass
                except ConnectionResetError:
                    pass
            self.assertLess(server.stats()["http"]["connections"], 5)

    def test_conversations_never_see_each_others_text(self):  # O-CONC-11
        with Served(max_num_seqs=2, num_blocks=40, block_size=4, context=160) as server:
            marks = [f"mark{i}" * 3 for i in range(6)]

            def turn(i, n):
                status, answer = server.post("/v1/completions", {"prompt": f"{marks[i]} {'x' * n} say:{marks[i]}"})
                self.assertEqual((status, answer["choices"][0]["text"]), (200, marks[i]))
                usage = answer["usage"]
                return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

            prompt = cached = 0
            for n in range(20):
                results = []
                threads = [threading.Thread(target=lambda i=i: results.append(turn((n + i) % 6, n))) for i in range(4)]
                for t in threads:
                    t.start()
                for t in threads:
                    t.join()
                self.assertEqual(len(results), 4)
                prompt += sum(r[0] for r in results)
                cached += sum(r[1] for r in results)
            s = server.idle()["scheduler"]
            self.assertEqual((s["prompt_tokens_cached"], s["prompt_tokens_computed"] >= prompt - cached), (cached, True))

    def test_many_clients_that_leave_are_all_counted(self):  # O-MET-04
        import random
        rng = random.Random(5)
        with Served(step_ms=2, max_queue=200) as server:
            def leave(delay):
                sock = stream_socket(server, {**user("loop:abcdef"), "max_tokens": 1500})
                time.sleep(delay)
                sock.close()
            threads = [threading.Thread(target=leave, args=(rng.random() * 0.4,)) for _ in range(50)]
            for t in threads:
                t.start()
            for t in threads:
                t.join()
            s = server.idle()
            self.assertEqual(s["scheduler"]["cancelled"] + s["scheduler"]["finished_length"], s["scheduler"]["requests"])
            self.assertEqual(s["scheduler"]["cancelled"], 50)


class Operation(unittest.TestCase):
    def test_it_answers_while_the_model_loads(self):  # O-MET-06
        server = Served(load_seconds=1.5)
        try:
            status, answer = server.get("/health")
            self.assertEqual((status, answer["status"]), (503, "loading"))
            started = time.time()
            status, answer = server.chat("say:x")
            self.assertEqual((status, answer["error"]["code"]), (503, "loading"))
            self.assertLess(time.time() - started, patient(0.5))
            self.assertEqual(server.get("/metrics")[0], 200)
            server.wait_ready()
            self.assertEqual(server.chat("say:x")[0], 200)
        finally:
            server.__exit__()

    def test_an_engine_that_ended_is_told(self):  # O-MET-06
        with Served() as server:
            status, answer = server.chat("crash:")
            self.assertEqual(status, 500)
            status, answer = server.get("/health")
            self.assertEqual((status, answer["status"]), (503, "engine_ended"))
            started = time.time()
            self.assertEqual(server.chat("say:x")[0], 503)
            self.assertLess(time.time() - started, patient(0.5))

    def test_a_stall_is_told_and_it_recovers(self):  # O-MET-07
        with Served(stall_seconds=5, stall_timeout=1) as server:
            thread = threading.Thread(target=server.chat, args=("stall: say:x",))
            thread.start()
            while server.get("/health")[0] == 200 and thread.is_alive():
                time.sleep(0.05)
            status, answer = server.get("/health")
            self.assertEqual((status, answer["status"]), (503, "stalled"))
            age = [line for line in server.get("/metrics")[1].splitlines() if line.startswith("pagedkv_step_age")][0]
            self.assertGreater(float(age.split()[1]), 1)
            thread.join()
            self.assertEqual(server.get("/health")[0], 200)

    def test_sigterm_lets_requests_finish(self):  # O-CONC-13
        with Served(step_ms=5) as server:
            answers = []
            thread = threading.Thread(target=lambda: answers.append(server.chat("loop:ab", max_tokens=100)))
            thread.start()
            server.until(lambda s: s["scheduler"]["running"] == 1)
            self.assertEqual(server.stop(), 0)
            thread.join()
            self.assertEqual(answers[0][1]["usage"]["completion_tokens"], 100)

    def test_sigterm_cuts_off_what_takes_too_long(self):  # O-CONC-13
        with Served(step_ms=5, stop_seconds=0.5, context=4000) as server:
            sock = stream_socket(server, {**user("loop:ab"), "max_tokens": 3000})
            sock.recv(4096)
            started = time.time()
            self.assertEqual(server.stop(), 0)
            self.assertLess(time.time() - started, patient(3))
            data = b""
            while True:
                piece = sock.recv(65536)
                if not piece:
                    break
                data += piece
            self.assertIn(b"stopped", data)
            self.assertNotIn(b"[DONE]", data)

    def test_a_second_signal_ends_at_once(self):  # O-CONC-13
        with Served(step_ms=5, stop_seconds=60, context=4000) as server:
            sock = stream_socket(server, {**user("loop:ab"), "max_tokens": 3000})
            sock.recv(4096)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            started = time.time()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(300)
            self.assertLess(time.time() - started, patient(1))

    def test_keys(self):
        with Served(key="secret-key") as server:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Bearer secret-key2"},
                            {"Authorization": "secret-key"}, {"Authorization": "Bearer "}):
                for path in ("/v1/models", "/v1/models/scripted", "/metrics", "/stats"):
                    self.assertEqual(server.get(path, headers=headers)[0], 401)
            right = {"Authorization": "Bearer secret-key"}
            self.assertEqual(server.get("/v1/models", headers=right)[0], 200)
            self.assertEqual(server.get("/health")[0], 200)
            self.assertNotIn("secret-key", "".join(server.log))

    def test_pages_of_others_may_not_call(self):
        with Served() as server:
            self.assertEqual(server.post("/v1/chat/completions", user("say:x"),
                                         headers={"Origin": "https://evil.example"})[0], 403)
            self.assertEqual(server.post("/v1/chat/completions", user("say:x"),
                                         headers={"Origin": f"http://127.0.0.1:{server.port}"})[0], 200)
        with Served(cors="https://good.example") as server:
            status, headers, _ = server.request("POST", "/v1/chat/completions", user("say:x"),
                                                {"Origin": "https://good.example"})
            self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (200, "https://good.example"))
            status, headers, _ = server.request("POST", "/v1/chat/completions", {**user("say:x"), "stream": True},
                                                {"Origin": "https://good.example"})
            self.assertEqual((status, headers["Access-Control-Allow-Origin"]), (200, "https://good.example"))
            self.assertEqual(server.request("OPTIONS", "/v1/chat/completions",
                                            headers={"Origin": "https://good.example"})[0], 204)

    def test_no_text_of_a_prompt_is_logged(self):
        with Served() as server:
            server.chat("say:something private")
            server.chat("say:something private", max_tokens=-1)
            server.stop()
            self.assertNotIn("private", "".join(server.log))
            self.assertTrue(any('"completion_tokens"' in line for line in server.log))


if __name__ == "__main__":
    unittest.main(warnings="ignore")
