"""Mixed load with dropped clients on a real model and a pool that is much too small. Nothing may be lost or leak.

PAGEDKV_SOAK_SECONDS: how long (60).
"""
import asyncio
import os
import time
import unittest

from load import mixed
from served import Served

MODEL = os.environ.get("PAGEDKV_TEST_MODEL")
SECONDS = float(os.environ.get("PAGEDKV_SOAK_SECONDS", "60"))
WORDS = ("the river ran past the old mill and nobody counted boats that evening because rain had come early with "
         "a wind out of the north while lamps were lit in every window along the quay " * 12).split()


@unittest.skipIf(not MODEL, "PAGEDKV_TEST_MODEL names no model")
class Soak(unittest.TestCase):
    def test_mixed_load(self):
        server = Served([os.environ["PAGEDKV_BIN"], "serve", "-m", MODEL, "--port", "0", "--kv-quant", "q8",
                         "--context", "1024", "--num-blocks", "96", "--no-dynamic", "--max-num-seqs", "12",
                         "--max-queue", "64"])
        try:
            # Memory after each quarter: buffers and the allocator reach their sizes in the first half.
            outcomes, rss, live = [], [], []
            for quarter in range(4):
                outcomes += asyncio.run(mixed(server.port, SECONDS / 4, 24, quarter, WORDS))
                s = server.idle()
                rss.append(server.rss() >> 20)
                live.append(s["heap_live_bytes"] / (1 << 20))
            unexpected = [(o.status, o.error) for o in outcomes
                          if not o.aborted and o.status not in (200, 400) or o.status == 200 and o.error]
            self.assertEqual(unexpected, [])
            self.assertGreater(sum(o.status == 200 for o in outcomes), SECONDS / 2)
            self.assertGreater(sum(o.aborted for o in outcomes), SECONDS / 20)
            scheduler, cache = s["scheduler"], s["cache"]
            self.assertEqual(scheduler["failed"], 0)
            self.assertEqual(cache["blocks_free"] + cache["blocks_cached"], cache["blocks_total"])
            self.assertEqual(cache["quarantined_blocks"], 0)
            self.assertEqual(scheduler["finished_stop"] + scheduler["finished_length"] + scheduler["cancelled"],
                             scheduler["requests"])
            print(f"{SECONDS:.0f} s: {len(outcomes)} requests, {scheduler['cancelled']} cancelled, "
                  f"{scheduler['preemptions']} preemptions, {cache['evictions']} evictions, "
                  f"after each quarter MiB of RSS: {rss}, live on the heap: {[round(n, 2) for n in live]}")
            self.assertGreater(scheduler["preemptions"] + cache["evictions"], 0)
            # Live bytes are what a leak is made of. Resident ones also hold what the allocator keeps for later and which
            # pages of the model's file are in memory: that depends on the machine, and has room here.
            self.assertLess(live[3] - live[1], 1)
            self.assertLess(rss[3] - rss[1], 48)
            self.assertEqual(server.stop(), 0, "".join(server.log[-5:]))  # it verifies the cache on its way out
        finally:
            server.__exit__()


if __name__ == "__main__":
    unittest.main(warnings="ignore")
