"""tools/layers: passes the real tree, and sees one planted breach of each kind."""
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# A tree in which everything is as it should be; each test adds one thing.
CLEAN = {
    "include/pagedkv/units.h": "#include <cstdint>\n",
    "include/pagedkv/cache.h": '#include "pagedkv/units.h"\n#include <vector>\n',
    "src/base/env.h": '#include "pagedkv/units.h"\n',
    "src/base/env.cc": '#include "base/env.h"\n#include <cstdlib>\nconst char* x = getenv("X");\n',
    "src/device/memory.h": '#include "base/env.h"\n',
    "src/device/memory.cc": '#include "device/memory.h"\n#include <sys/mman.h>\n',
    "src/cache/pool.h": '#include "base/env.h"\n#include "pagedkv/units.h"\n',
    "src/cache/pool.cc": '#include "pool.h"  // found beside this file\n// a float in a comment\n'
                         'const char* s = "double";\nint n = 1\'000;\n',
    "src/store/arena.h": '#include "device/memory.h"\n',
    "src/kernels/kernels.h": "#include <cstddef>\n#include <span>\n",
    "src/kernels/plan/work.h": '#include "kernels/kernels.h"\n#include <vector>\n',
    "src/api/cache.cc": '#include "cache/pool.h"\n#include "kernels/kernels.h"\n#include "store/arena.h"\n',
    "engine/engine.h": '#include "engine/text.h"\n#include "pagedkv/cache.h"\n',
    "engine/text.h": "#include <string>\n",
    "engine/gguf_file.h": "#include <string>\n",
    "engine/attention_node.cc": '#include "ggml.h"\n#include <llama.h>\n#include "engine/engine.h"\n',
    "bench/bench.h": "#include <string>\n",
    "bench/peer_llama.h": "#include <string>\n",
    "bench/peer_llama.cc": '#include "bench/peer_llama.h"\n#include "engine/engine.h"\n#include "ggml-cpu.h"\n',
    "cli/main.cc": '#include "bench/bench.h"\n#include "cli/options.h"\n#include "engine/engine.h"\n'
                   '#include <CLI/CLI.hpp>\nbool c = std::getenv("NO_COLOR");\n',
    "cli/options.h": '#include "pagedkv/cache.h"\n',
    "examples/one.cc": '#include "pagedkv/cache.h"\n',
    "tests/cache/pool_test.cc": '#include "cache/pool.h"\n#include "ggml.h"\n#include <thread>\nfloat f;\n',
}


class Layers(unittest.TestCase):
    def run_on(self, extra):
        with tempfile.TemporaryDirectory() as folder:
            for path, text in {**CLEAN, **extra}.items():
                file = Path(folder) / path
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
            return subprocess.run([ROOT / "tools/layers", folder], capture_output=True, text=True)

    def assert_breach(self, path, text, *expected):
        """One breach, at line 2 of `path`, whose line holds every expected word."""
        result = self.run_on({path: "// line 1\n" + text + "\n"})
        self.assertEqual(result.returncode, 1, result.stdout + result.stderr)
        lines = result.stdout.splitlines()
        self.assertEqual(len(lines), 1, result.stdout)
        self.assertTrue(lines[0].startswith(f"{path}:2: "), lines[0])
        for words in expected:
            self.assertIn(words, lines[0])

    def test_the_real_tree_passes(self):
        result = subprocess.run([ROOT / "tools/layers"], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_a_clean_tree_passes(self):
        result = self.run_on({})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

    def test_an_upward_include_is_named_with_what_the_layer_may_include(self):
        self.assert_breach("src/base/bad.h", '#include "cache/pool.h"',
                           "includes cache/pool.h, but src/base may only include itself, include/pagedkv and std")

    def test_every_other_upward_or_sideways_include(self):
        for path, include in [
            ("include/pagedkv/bad.h", '"base/env.h"'),
            ("include/pagedkv/bad.h", '"../../src/base/env.h"'),
            ("include/pagedkv/bad.h", "<nlohmann/json.hpp>"),
            ("include/pagedkv/bad.h", "<stdint.h>"),
            ("src/device/bad.cc", '"store/arena.h"'),
            ("src/cache/bad.cc", '"store/arena.h"'),
            ("src/cache/bad.cc", '"device/memory.h"'),
            ("src/cache/bad.cc", '"../kernels/kernels.h"'),
            ("src/store/bad.cc", '"cache/pool.h"'),
            ("src/store/bad.cc", '"kernels/kernels.h"'),
            ("src/kernels/bad.cc", '"cache/pool.h"'),
            ("src/kernels/bad.cc", '"kernels/plan/work.h"'),
            ("src/kernels/plan/bad.cc", '"device/memory.h"'),
            ("src/kernels/bad.cc", '"store/arena.h"'),
            ("src/api/bad.cc", '"engine/engine.h"'),
            ("src/api/bad.cc", "<spdlog/spdlog.h>"),
            ("engine/bad.cc", '"base/env.h"'),
            ("engine/bad.cc", '"bench/bench.h"'),
            ("cli/bad.cc", '"engine/gguf_file.h"'),
            ("cli/bad.cc", '"bench/peer_llama.h"'),
            ("cli/bad.cc", '"cache/pool.h"'),
            ("server/bad.cc", '"bench/bench.h"'),
            ("bench/bad.cc", '"kernels/kernels.h"'),
            ("bench/peer_bad.cc", '"kernels/kernels.h"'),
            ("examples/bad.cc", '"src/base/env.h"'),
            ("python/bad.cc", '"base/env.h"'),
        ]:
            with self.subTest(path=path, include=include):
                self.assert_breach(path, f"#include {include}", f"includes {include[1:-1]}, but")

    def test_ggml_and_llama_stay_in_the_engine_and_the_bench_peers(self):
        for path in ["src/api/bad.cc", "src/kernels/bad.cc", "include/pagedkv/bad.h", "cli/bad.cc", "bench/bad.cc",
                     "bench/peer_bad.h", "examples/bad.cc"]:
            for include in ['"ggml.h"', "<ggml-cpu.h>", "<llama.h>", '"gguf.h"']:
                with self.subTest(path=path, include=include):
                    self.assert_breach(path, f"#include {include}", f"includes {include[1:-1]}")

    def test_a_folder_outside_the_table(self):
        result = self.run_on({"src/utils/misc.h": "\n"})
        self.assertEqual(result.returncode, 1)
        self.assertIn("src/utils/misc.h:1: src/utils is not in the layer table", result.stdout)

    def test_a_file_has_at_most_600_lines(self):
        for path in ["src/cache/long.cc", "tests/cache/long_test.cc"]:
            self.assertEqual(self.run_on({path: "\n" * 600}).returncode, 0)
            result = self.run_on({path: "\n" * 601})
            self.assertEqual(result.returncode, 1)
            self.assertIn(f"{path}:601: 601 lines", result.stdout)

    def test_kernels_have_no_threads_no_memory_and_no_environment(self):
        for text in ["#include <thread>", "#include <mutex>", "#include <cstdlib>", "#include <vector>",
                     "float* p = new float[4];", "void* p = malloc(4);", 'auto e = getenv("PAGEDKV_ISA");']:
            with self.subTest(text=text):
                self.assert_breach("src/kernels/bad.cc", text)

    def test_a_second_reader_of_the_environment(self):
        self.assert_breach("src/base/second.cc", 'auto e = std::getenv("X");', "getenv", "src/base/env.cc")
        self.assert_breach("src/api/bad.cc", 'auto e = std::getenv("X");', "getenv")
        self.assert_breach("engine/bad.cc", 'auto e = getenv("X");', "getenv")
        self.assert_breach("cli/second.cc", 'auto e = getenv("X");', "getenv", "cli/main.cc")

    def test_threads_in_the_library(self):
        self.assert_breach("src/api/bad.cc", "std::thread t;", "std::thread")
        self.assert_breach("src/store/bad.cc", "auto f = std::async(g);", "std::async")
        self.assert_breach("src/base/bad.cc", "#include <thread>", "<thread>")

    def test_a_float_in_the_cache(self):
        self.assert_breach("src/cache/bad.cc", "float x = 1;", "float")
        self.assert_breach("src/cache/bad.h", "int y = 3 /* kept */ * static_cast<double>(2);", "double")

    def test_a_device_switched_by_the_preprocessor(self):
        for text in ["#ifdef __CUDACC__", "#if defined(PAGEDKV_CUDA) && 1", "# ifndef GGML_USE_METAL"]:
            with self.subTest(text=text):
                self.assert_breach("src/store/bad.cc", f"{text}\n#endif", "never switched by #if")

    def test_a_cuda_header_in_a_header(self):
        self.assert_breach("src/device/bad.h", "#include <cuda_runtime.h>", "free of CUDA")


if __name__ == "__main__":
    unittest.main()
