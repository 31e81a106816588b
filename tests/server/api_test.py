"""What requests may say and what answers look like, where other servers and clients have words of their own."""
import json
import time
import unittest

from served import WithServer, events_of, post, raw, user


class Api(WithServer):
    def test_a_stream_that_fails_ends_with_its_error(self):
        # Not asked to close, the server does so all the same: raw() reads until then.
        answer = raw(self.server, post({**user("loop:x"), "grammar": "dead end", "stream": True}).replace(
            b"Connection: close", b"X: y"))
        self.assertIn(b"text/event-stream", answer)
        self.assertIn(b'data: {"error"', answer)
        self.assertTrue(answer.endswith(b"\r\n0\r\n\r\n"))
        self.assertNotIn(b"[DONE]", answer)

    def test_constraints_that_would_not_be_obeyed_are_refused(self):
        for field, value in (("guided_json", {"type": "object"}), ("min_tokens", 5),
                             ("stop_token_ids", [1]), ("use_beam_search", True), ("length_penalty", 2),
                             ("skip_special_tokens", False), ("chat_template", "x")):
            code, answer = self.server.chat("say:x", **{field: value})
            self.assertEqual((code, answer["error"]["param"]), (400, field))
        for field, value in (("guided_json", None), ("min_tokens", 0), ("stop_token_ids", []),
                             ("use_beam_search", False), ("length_penalty", 1.0), ("skip_special_tokens", True)):
            self.assertEqual(self.server.chat("say:x", **{field: value})[0], 200, field)
        self.assertEqual(self.server.chat("loop:x", n_predict=3)[1]["usage"]["completion_tokens"], 3)

    def test_a_grammar_is_followed(self):
        code, answer = self.server.chat("loop:x", grammar="dead end", max_tokens=9)  # what the scripted model knows of it
        self.assertEqual((code, "no token goes on" in answer["error"]["message"]), (400, True))
        self.assertEqual(self.server.chat("say:x", grammar="")[0], 200)
        code, answer = self.server.chat("say:x", grammar="dead end", response_format={"type": "json_object"})
        self.assertEqual((code, answer["error"]["param"]), (400, "grammar"))

    def test_what_routers_send_along_is_not_told_as_ignored(self):
        _, headers, _ = self.server.request("POST", "/v1/chat/completions", {
            **user("say:x"), "metadata": {"a": 1}, "store": False, "service_tier": "auto", "provider": {}, "shiny": 1})
        self.assertEqual(headers["X-Ignored-Fields"], "shiny")

    def test_offsets_are_characters_and_names_do_not_repeat(self):
        answer = self.server.post("/v1/completions", {"prompt": "say:a\u20acb", "logprobs": 5})[1]["choices"][0]
        scores = answer["logprobs"]
        self.assertEqual(answer["text"], "a\u20acb")
        self.assertEqual(scores["tokens"][:5], ["a", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "b"])
        self.assertEqual(scores["text_offset"][0:2] + scores["text_offset"][4:5], [0, 1, 2])

    def test_tokens_of_a_stop_string_are_not_listed(self):
        body = {"prompt": "say:The quick brown fox", "logprobs": 1}
        for stop, tokens in (("ick", "The qu"), ("The", ""), ("xyz", "The quick brown fox"), ("oxen", "The quick brown fox")):
            answer = self.server.post("/v1/completions", {**body, "stop": stop})[1]["choices"][0]
            self.assertEqual("".join(answer["logprobs"]["tokens"]), tokens)
            text = self.server.request("POST", "/v1/completions", {**body, "stop": stop, "stream": True})[2].decode()
            pieces = [json.loads(event)["choices"][0] for event in events_of(text)[:-1]]
            streamed = [token for piece in pieces for token in (piece["logprobs"] or {"tokens": []})["tokens"]]
            self.assertEqual("".join(streamed), tokens)

    def test_history_of_older_clients_is_read(self):
        for message in ({"function_call": {"name": "f", "arguments": "{}"}}, {"refusal": "no"},
                        {"content": [{"type": "refusal", "refusal": "no"}]}):
            code, answer = self.server.post("/v1/chat/completions", {"messages": [
                {"role": "user", "content": "a"}, {"role": "assistant", **message}, {"role": "user", "content": "say:on"}]})
            self.assertEqual((code, answer.get("error")), (200, None))

    def test_a_name_given_twice_is_listed_once(self):
        names = [model["id"] for model in self.server.get("/v1/models")[1]["data"]]
        self.assertEqual(names, ["scripted", "alias", "org/plain"])

    def test_the_reason_of_a_400_is_in_the_log_and_no_text(self):
        self.server.chat("say:x", stop={"private": 1})
        self.server.request("POST", "/v1/chat/completions", '{"private": private}')
        until = time.time() + 5
        while not any("is not JSON" in line for line in self.server.log) and time.time() < until:
            time.sleep(0.05)
        lines = "".join(self.server.log)
        self.assertIn("expected is a string, or a list", lines)
        self.assertNotIn("private", lines)


if __name__ == "__main__":
    unittest.main(warnings="ignore")
