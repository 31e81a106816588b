"""The page at / in a real browser. With PAGEDKV_SCREENSHOT=FILE also a picture of it."""
import os
import shutil
import threading
import time
import unittest

from served import Served

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None

CHROMIUM = shutil.which("chromium")


@unittest.skipIf(sync_playwright is None or CHROMIUM is None, "no playwright or chromium (tools/setup --clients)")
class Page(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.playwright = sync_playwright().start()
        cls.browser = cls.playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])

    @classmethod
    def tearDownClass(cls):
        cls.browser.close()
        cls.playwright.stop()

    def open(self, server, **options):
        # The tests look into the page by evaluating code, which its own policy forbids.
        page = self.browser.new_page(bypass_csp=True, **options)
        self.problems = []
        page.on("console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda e: self.problems.append(str(e)))
        page.on("request", lambda r: None if r.url.startswith((server.url, "data:"))
                else self.problems.append("asks for " + r.url))
        page.goto(server.url + "/")
        page.wait_for_function("document.querySelector('#map').dataset.states")
        return page

    def states(self, page):
        return page.evaluate("document.querySelector('#map').dataset.states")

    def test_the_map_changes_while_a_request_runs(self):
        with Served(step_ms=20) as server:
            page = self.open(server)
            before = self.states(page)
            self.assertEqual(set(before), {"-"})
            thread = threading.Thread(target=server.chat, args=("loop:abc " + "x" * 200,),
                                      kwargs={"max_tokens": 200})
            thread.start()
            page.wait_for_function("/[of]/.test(document.querySelector('#map').dataset.states)")
            self.assertEqual(page.text_content("#state"), "working")
            thread.join()
            page.wait_for_function("/c/.test(document.querySelector('#map').dataset.states)")
            page.focus("#map")
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            self.assertIn("block 1: ", page.text_content("#cell"))
            page.hover("#map", position={"x": 4, "y": 4})
            self.assertIn("block 0: ", page.text_content("#cell"))
            self.assertEqual(self.problems, [])
            page.close()

    def test_the_chat_streams(self):
        with Served(step_ms=30) as server:
            page = self.open(server)
            page.fill("#say", "say:hello there")
            page.keyboard.press("Enter")
            page.wait_for_function("document.querySelector('#talk').textContent.includes('hel')")
            self.assertNotIn("model" + "hello there", page.text_content("#talk"))
            page.wait_for_function("document.querySelector('#talk').textContent.endsWith('hello there')")
            page.wait_for_function("!document.querySelector('#send').disabled")
            page.fill("#say", "say:" + "abcab" * 60)
            page.click("#send")
            page.wait_for_function("document.querySelector('#talk').textContent.includes('abcab')")
            page.click("#stop")
            self.assertEqual(server.idle()["scheduler"]["cancelled"], 1)
            self.assertEqual(self.problems, [])
            page.close()

    def test_clear_stops_the_answer(self):
        with Served(step_ms=20) as server:
            page = self.open(server)
            page.fill("#say", "loop:abc")
            page.click("#send")
            page.wait_for_function("document.querySelector('#talk').textContent.includes('abcabc')")
            page.click("#clear")
            self.assertEqual(server.idle()["scheduler"]["cancelled"], 1)
            self.assertEqual(page.text_content("#talk"), "")
            page.wait_for_function("!document.querySelector('#send').disabled")
            page.fill("#say", "say:again")
            page.click("#send")
            page.wait_for_function("document.querySelector('#talk').textContent.endsWith('again')")
            self.assertEqual(server.idle()["recent"][0]["prompt_tokens"], len("user> say:again\n") + 1)
            page.close()

    def test_a_message_that_is_too_long_does_not_end_the_chat(self):
        with Served(context=128) as server:
            page = self.open(server)
            page.fill("#say", "x" * 300)
            page.click("#send")
            page.wait_for_function("document.querySelector('#talk').textContent.includes('too long')")
            self.assertEqual(page.input_value("#say"), "x" * 300)
            page.fill("#say", "say:fine")
            page.click("#send")
            page.wait_for_function("document.querySelector('#talk').textContent.endsWith('fine')")
            page.close()

    def test_enter_that_ends_a_composition_does_not_send(self):
        with Served() as server:
            page = self.open(server)
            page.fill("#say", "say:x")
            for detail in ("isComposing: true", "keyCode: 229"):
                page.evaluate("document.querySelector('#say').dispatchEvent(new KeyboardEvent('keydown', "
                              "{key: 'Enter', bubbles: true, cancelable: true, %s}))" % detail)
            self.assertEqual((page.text_content("#talk"), page.input_value("#say")), ("", "say:x"))
            page.press("#say", "Enter")
            page.wait_for_function("document.querySelector('#talk').textContent.endsWith('modelx')")
            page.close()

    def test_the_legend_counts_all_blocks_of_a_large_pool(self):
        with Served(num_blocks=9000) as server:
            page = self.open(server)
            self.assertEqual(len(self.states(page)), 8192)
            self.assertEqual(page.text_content("#n-free"), "9,000")
            self.assertIn("first 8,192 of 9,000 blocks", page.text_content("#drawn"))
            page.close()
        with Served() as server:
            page = self.open(server)
            self.assertFalse(page.is_visible("#drawn"))
            self.assertRegex(page.text_content("#curve"), r"\d+ B.*tokens.*2 minutes")
            page.close()

    def test_a_server_that_is_gone_is_said_plainly(self):
        server = Served(step_ms=20).__enter__()
        page = self.open(server)
        self.assertEqual(page.evaluate("getComputedStyle(document.querySelector('#figures')).opacity"), "1")
        server.__exit__()
        page.wait_for_function("document.querySelector('#state').textContent.includes('does not answer')")
        self.assertLess(float(page.evaluate("getComputedStyle(document.querySelector('#figures')).opacity")), 0.6)
        page.close()

    def test_a_welcome_page_calls_with_the_headers_of_the_js_client(self):
        with Served() as other, Served(cors=other.url, max_body=4000) as server:
            page = self.browser.new_page(bypass_csp=True)  # on a page of the other server's origin
            page.goto(other.url + "/")
            ask = """async ([url, content]) => {
                const answer = await fetch(url + "/v1/chat/completions", {method: "POST", headers: {
                    "Content-Type": "application/json", Authorization: "Bearer none", "X-Stainless-Lang": "js",
                    "X-Stainless-OS": "Linux", "X-Stainless-Retry-Count": "0", "X-Stainless-Runtime": "browser:chrome"},
                    body: JSON.stringify({messages: [{role: "user", content}], shiny: 1})});
                return [answer.status, answer.headers.get("X-Request-Id"), answer.headers.get("X-Ignored-Fields")]; }"""
            status, request_id, ignored = page.evaluate(ask, [server.url, "say:x"])
            self.assertEqual((status, request_id[:9], ignored), (200, "chatcmpl-", "shiny"))
            self.assertEqual(page.evaluate(ask, [server.url, "x" * 5000])[0], 413)
            page.close()

    def test_a_key_is_sent(self):
        server = Served(key="k1")
        try:
            page = self.browser.new_page(bypass_csp=True)
            page.goto(server.url + "/")
            page.wait_for_function("document.querySelector('#state').textContent.includes('API key')")
            page.fill("#key", "k1")
            page.wait_for_function("document.querySelector('#state').textContent === 'idle'")
            page.close()
        finally:
            server.__exit__()

    def test_names_and_roles_for_screen_readers(self):
        with Served() as server:
            page = self.open(server)
            self.assertEqual(page.get_by_role("button").count(), 3)
            self.assertEqual(page.get_by_role("textbox", name="Message").count(), 1)
            self.assertRegex(page.get_attribute("#map", "aria-label"), r"Map of 256 blocks: .*256 free")
            self.assertEqual(page.evaluate("document.documentElement.lang"), "en")
            # Everything that can be worked with can be reached by Tab.
            reached = set()
            for _ in range(8):
                page.keyboard.press("Tab")
                reached.add(page.evaluate("document.activeElement.id"))
            self.assertLessEqual({"map", "say", "send", "clear", "key"}, reached)
            page.close()

    def test_its_own_security_policy_lets_it_work(self):
        with Served() as server:
            page = self.browser.new_page()
            problems = []
            page.on("console", lambda m: problems.append(m.text))
            page.goto(server.url + "/")
            page.fill("#say", "say:safe")
            page.click("#send")
            page.get_by_text("safe", exact=True).wait_for()
            page.get_by_text("idle").wait_for()
            self.assertEqual(problems, [])
            page.close()

    def test_it_fits_a_phone(self):
        with Served() as server:
            page = self.open(server, viewport={"width": 360, "height": 700})
            self.assertLessEqual(page.evaluate("document.documentElement.scrollWidth"), 360)
            top = {name: page.locator(name).bounding_box()["y"] for name in ("#chat", "#map")}
            self.assertLess(top["#chat"], top["#map"])
            page.close()

    def test_light_and_dark_differ(self):
        with Served() as server:
            colors = []
            for scheme in ("light", "dark"):
                page = self.open(server, color_scheme=scheme)
                colors.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
                page.close()
            self.assertNotEqual(*colors)

    @unittest.skipIf("PAGEDKV_SCREENSHOT" not in os.environ, "PAGEDKV_SCREENSHOT is not set")
    def test_screenshot(self):
        model = os.environ["PAGEDKV_TEST_MODEL"]
        server = Served([os.environ["PAGEDKV_BIN"], "serve", "-m", model, "--port", "0", "--kv-quant", "q8",
                         "--served-model-name", "SmolLM2-135M-Instruct"])
        try:
            page = self.open(server, viewport={"width": 1180, "height": 860}, device_scale_factor=1.5)
            system = "You are a careful librarian who answers in one short paragraph. " * 20
            threads = []
            for i in range(12):
                threads.append(threading.Thread(target=server.post, args=("/v1/chat/completions", {
                    "messages": [{"role": "system", "content": system if i % 3 else system[:600]},
                                 {"role": "user", "content": f"What is book number {i} about?"}],
                    "max_tokens": 120 + 10 * i})))
            for t in threads:
                t.start()
                time.sleep(0.15)
            page.fill("#say", "What is a paged KV cache?")
            page.keyboard.press("Enter")
            page.wait_for_function("/s/.test(document.querySelector('#map').dataset.states) && "
                                   "document.querySelector('#talk').textContent.length > 120", timeout=120000)
            page.screenshot(path=os.environ["PAGEDKV_SCREENSHOT"])
            for t in threads:
                t.join()
            page.close()
        finally:
            server.__exit__()


if __name__ == "__main__":
    unittest.main(warnings="ignore")
