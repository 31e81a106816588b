#!/usr/bin/env python3
"""What one call from Python costs on top of the C++ that it runs: append and attend of one token over 16.

    bench/python/call_overhead.py

The whole call is timed from Python, so the figure is an upper bound of the overhead: the C++ under it is in it. Prints one
JSON array on stdout, a table on stderr.
"""

import json
import statistics
import sys
import timeit

import numpy as np

import pagedkv


def measure(call, rounds=15, number=20_000):
    call()
    times = sorted(t / number * 1e6 for t in timeit.repeat(call, number=number, repeat=rounds))
    return {"median_us": statistics.median(times), "p10": times[rounds // 10], "p90": times[-1 - rounds // 10],
            "runs": rounds, "calls": number}


def cases(make, name):
    cache = pagedkv.Cache(num_kv_heads=2, head_dim=64, num_q_heads=4, kv_quant="q8", num_blocks=64)
    plan = cache.reserve([(cache.start().sequence, 1)])
    k, q, out = make((1, 2, 64)), make((1, 4, 64)), make((1, 4, 64))
    yield f"append, {name}", lambda: pagedkv.append(plan, 0, k, k)
    yield f"attend, {name}", lambda: pagedkv.attend(plan, 0, q)
    yield f"attend into out=, {name}", lambda: pagedkv.attend(plan, 0, q, out=out)


def main():
    kinds = [(lambda shape: np.ones(shape, np.float32), "numpy")]
    try:
        import torch

        kinds.append((torch.ones, "torch"))
    except ImportError:
        pass
    records = []
    print(f"{'':28} {'us':>7} {'p10':>7} {'p90':>7}", file=sys.stderr)
    for make, kind in kinds:
        for name, call in cases(make, kind):
            record = {"case": name, **measure(call)}
            records.append(record)
            print(f"{name:28} {record['median_us']:7.2f} {record['p10']:7.2f} {record['p90']:7.2f}", file=sys.stderr)
    json.dump(records, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
