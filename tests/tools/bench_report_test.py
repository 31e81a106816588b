"""tools/bench-report on records as `pagedkv bench --json` writes them."""
import json
import subprocess
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def kernel(case, fmt, tokens, seconds, **more):
    record = {"case": case, "format": fmt, "heads_q": 9, "heads_kv": 3, "head_dim": 64, "batch": 1, "tokens": tokens,
              "threads": 2, "isa": "avx512", "seconds": seconds, "p10": seconds * 0.9, "p90": seconds * 1.1, "runs": 11,
              "gbps": 30.0, "share": 0.6, "roofline": 0.7, "peer": None, "peer_seconds": None, "ratio": None,
              "slow_samples": 2, "slow_kept": 0, "arena_huge": 1.0}
    return {**record, **more}


LIMITS = [{"limit": "read", "pages": "2MiB", "threads": 2, "path": None, "gbps": 48.5, "median_gbps": 47.0, "gops": None,
           "huge": 1.0, "note": None},
          {"limit": "bf16_dot", "pages": None, "threads": 2, "path": None, "gbps": None, "median_gbps": None, "gops": None,
           "huge": None, "note": "this CPU has no AVX512_BF16"}]
KERNELS = [kernel("decode_9_3_64_1x8k", "f16", 8192, 4e-4, peer="ggml", peer_seconds=2e-3, ratio=5.0),
           kernel("decode_9_3_64_1x8k", "q8", 8192, 2e-4, slow_kept=3)]
CONTEXT = [kernel(f"decode_9_3_64_1x{n}", fmt, n, n * cost, peer="ggml" if fmt != "q6" else None,
                  peer_seconds=n * cost * 5 if fmt != "q6" else None)
           for n in (512, 2048, 32768) for fmt, cost in (("f16", 5e-8), ("q8", 3e-8), ("q6", 2.9e-8), ("q4", 2e-8))]
MODEL = [kernel("decode", "q8", 1024, 0.01, gbps=None, share=None, roofline=None, peer="llama", peer_seconds=0.02, ratio=2.0,
                slow_samples=None, slow_kept=None, arena_huge=None),
         kernel("prefill", "q8", 1024, 0.5, gbps=None, share=None, roofline=None, slow_samples=None, slow_kept=None,
                arena_huge=None)]


class BenchReport(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def report(self, **files):
        for name, records in files.items():
            (self.folder / f"{name.replace('_', '-')}.json").write_text(json.dumps(records), encoding="utf-8")
        return subprocess.run([ROOT / "tools/bench-report", self.folder], capture_output=True, text=True)

    def text(self, name):
        return (self.folder / name).read_text(encoding="utf-8")

    def svg(self, name):
        root = ElementTree.fromstring(self.text(name))
        width, height = float(root.get("width")), float(root.get("height"))
        for text in root.iter(f"{SVG}text"):
            self.assertTrue(0 <= float(text.get("x")) <= width and 0 <= float(text.get("y")) <= height, text.text)
        return root

    def test_a_scan_of_products_becomes_a_plot_and_a_few_of_them_a_table(self):
        def product(shape, n, ratio):
            return kernel(f"{shape}_n{n}", shape[:4], n, 1e-4, peer="ggml", peer_seconds=1e-4 * ratio, ratio=ratio)
        few = [product("Q4_1_576x1536", n, 2.5) for n in (1, 512)]
        self.assertEqual(self.report(products=few).returncode, 0)
        self.assertIn("| Q4_1_576x1536_n512 | 100 µs | 30.0 | 0.60 | 250 µs | 2.50 |\n", self.text("report.md"))
        self.assertFalse((self.folder / "products.svg").exists())
        scan = [product(shape, n, 0.7 + n / 100) for shape in ("Q4_1_576x1536", "Q4_K_4096x4096")
                for n in (1, 2, 3, 5, 8, 13, 100, 400, 600)]
        self.assertEqual(self.report(products=scan).returncode, 0)
        labels = [text.text for text in self.svg("products.svg").iter(f"{SVG}text")]
        self.assertIn("Q4_K_4096x4096", labels)

    def test_every_record_becomes_a_row(self):
        done = self.report(limits=LIMITS, kernels=KERNELS, model_smollm2=MODEL)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        report = self.text("report.md")
        self.assertIn("| read | 2MiB | 2 | 48.5 GB/s | 47.0 GB/s |  |\n", report)
        self.assertIn("| bf16_dot |  | 2 |  |  | this CPU has no AVX512_BF16 |\n", report)
        self.assertIn("| decode_9_3_64_1x8k | f16 | 400 µs | 360 µs to 440 µs | 1.00 | 30.0 | 0.60 | 0.70 | 2 ms | 5.0 | 11 |",
                      report)
        self.assertIn("| decode_9_3_64_1x8k | q8 | 200 µs | 180 µs to 220 µs | 0.50 |", report)
        self.assertIn("| 11 (3 slow) | 2 | 1.00 |\n", report)
        self.assertIn("### smollm2", report)
        self.assertIn("| decode | q8 | 1024 | 100.0 | 50.0 | 2.00 | 10 ms | 11 |\n", report)
        self.assertIn("| prefill | q8 | 1024 | 1024.0 |", report)
        for line in report.splitlines():
            if line.startswith("|"):
                self.assertNotIn("None", line)
        self.assertFalse((self.folder / "context.svg").exists())

    def test_the_share_plot_has_a_bar_for_each_record(self):
        self.report(kernels=KERNELS)
        self.assertEqual(len(list(self.svg("share.svg").iter(f"{SVG}rect"))), len(KERNELS))
        self.assertIn("](share.svg)", self.text("report.md"))

    def test_the_context_plot_has_a_line_a_format_and_dashes_the_peer(self):
        self.report(context=CONTEXT)
        paths = list(self.svg("context.svg").iter(f"{SVG}path"))
        self.assertEqual(len(paths), 7, "ggml has no q6")
        self.assertEqual(sum(path.get("stroke-dasharray") is not None for path in paths), 3)
        labels = {text.text for text in self.svg("context.svg").iter(f"{SVG}text")}
        self.assertLessEqual({"f16", "q6", "ggml q4", "512", "2k", "32k"}, labels)

    def test_labels_of_lines_that_end_together_do_not_overlap(self):
        self.report(context=[{**r, "seconds": r["tokens"] * 1e-8, "peer_seconds": None} for r in CONTEXT])
        ends = sorted(float(text.get("y")) for text in self.svg("context.svg").iter(f"{SVG}text")
                      if text.text in ("f16", "q8", "q6", "q4"))
        self.assertTrue(all(after - before >= 13.9 for before, after in zip(ends, ends[1:])), ends)

    def test_an_empty_folder_and_a_broken_file_are_errors(self):
        self.assertEqual(self.report().returncode, 1)
        (self.folder / "kernels.json").write_text("[{", encoding="utf-8")
        done = self.report()
        self.assertEqual(done.returncode, 1)
        self.assertIn("kernels.json is not JSON", done.stderr)


if __name__ == "__main__":
    unittest.main()
