"""pagedkv bench: a short smoke of its records. No timing is asserted."""
import unittest

from process import CliTest, pagedkv

CASE = "decode_4_1_64_1x256"


class Bench(CliTest):
    def records(self, *words):
        done = pagedkv("bench", *words, "--json")
        self.assertEqual(done.code, 0, done.err)
        return done.json()

    def test_limits_name_every_wall_by_threads_and_pages(self):
        records = self.records("limits", "--threads", "2")
        reads = [(r["threads"], r["pages"]) for r in records if r["limit"] == "read"]
        self.assertEqual(reads, [(1, "4KiB"), (1, "2MiB"), (2, "4KiB"), (2, "2MiB")])
        for record in records:
            with self.subTest(record=record):
                self.assertEqual(list(record), ["limit", "pages", "threads", "path", "gbps", "median_gbps", "gops", "huge",
                                                "note"])
                if record["limit"] == "read":
                    self.assertGreaterEqual(record["gbps"], record["median_gbps"])
                    if record["pages"] == "2MiB" and record["huge"] is not None and record["huge"] < 0.9:
                        self.assertIn("2 MiB pages", record["note"])
                    elif record["pages"] == "4KiB" and record["huge"] is not None:
                        self.assertEqual(record["huge"], 0)
                else:  # a peak has its instruction, or the reason why there is none
                    self.assertEqual(record["gops"] is None, record["path"] is None)
                    self.assertEqual(record["gops"] is None, record["note"] is not None)
        peaks = {(r["limit"], r["threads"]) for r in records if r["limit"] != "read"}
        self.assertEqual(peaks, {(name, n) for name in ("f32_fma", "int8_dot", "bf16_dot") for n in (1, 2)})

    def test_a_kernel_case_says_how_it_was_sampled(self):
        for record in self.records("kernels", "--case", CASE, "--threads", "1", "--peer", "ggml"):
            with self.subTest(format=record["format"]):
                self.assertEqual((record["case"], record["batch"], record["tokens"]), (CASE, 1, 256))
                self.assertGreaterEqual(record["runs"], 7)
                self.assertGreaterEqual(record["slow_samples"], 0)
                self.assertGreaterEqual(record["slow_kept"], 0)
                self.assertLessEqual(record["p10"], record["seconds"])
                for name in ("gbps", "share", "roofline"):
                    self.assertGreater(record[name], 0)
                self.assertGreaterEqual(record["roofline"], record["share"] * 0.999)
                self.assertEqual(record["ratio"] is None, record["format"] == "q6", "ggml has no q6 of ours")

    def test_a_product_case_is_checked_and_held_against_ggml(self):
        for case in ("Q4_1_64x96_n1", "Q4_K_33x256_n9"):
            record, = self.records("products", "--case", case, "--threads", "1", "--peer", "ggml")
            with self.subTest(case=case):
                self.assertEqual((record["case"], record["format"]), (case, case[:4]))
                self.assertEqual(record["tokens"], int(case.split("_n")[1]))
                for name in ("seconds", "share", "peer_seconds", "ratio"):
                    self.assertGreater(record[name], 0)
                self.assertEqual(record["gbps"] is None, record["tokens"] > 8)

    def test_cases_that_cannot_be_are_refused(self):
        for case in ("Q4_1_576x1536", "Q9_9_64x64_n1", "Q4_1_31x64_n1", "Q4_K_64x128_n1", "Q4_1_64x64_n1x"):
            self.refused(pagedkv("bench", "products", "--case", case), 1, "[bench]", case, "Q4_1_576x1536_n512")
        self.refused(pagedkv("bench", "products", "--peer", "llama"), 1, "[bench]", "llama", "ggml")
        self.refused(pagedkv("bench", "kernels", "--case", "decode_4_1_64"), 1, "[bench]", "decode_32_8_128_1x32k")
        self.refused(pagedkv("bench", "kernels", "--full", "--case", CASE), 2, "[usage]", "excludes")
        self.refused(pagedkv("bench", "limits", "--peer", "ggml"), 2, "[usage]", "--peer")


if __name__ == "__main__":
    unittest.main()
