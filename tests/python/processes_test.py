"""Forks, and threads that are inside when the interpreter ends: in processes of their own, twenty times each."""

import concurrent.futures

import pytest

import process

TIMES = 20

# Forks TIMES children that run child(i); each must end by itself, with status 0.
FORKED = f"""
import os, signal, sys, time
def forked(child):
    for i in range({TIMES}):
        pid = os.fork()
        if pid == 0:
            signal.alarm(60)  # it hangs: killed, which the parent sees
            child(i)
            sys.exit(0)  # as a program ends, with all that is dropped on the way
        status = os.waitpid(pid, 0)[1]
        assert status == 0, (i, status)
"""


def expect_quiet(code, *arguments):
    out = process.python(code, arguments=arguments)
    assert (out.returncode, out.stdout, out.stderr) == (0, "", "")


def expect_all_quiet(codes, *arguments):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda code: expect_quiet(code, *arguments), codes))


CACHE_IN_USE = FORKED + """
import threading
import numpy as np, pagedkv
cache = pagedkv.Cache(num_kv_heads=8, head_dim=128, num_q_heads=32, kv_quant="f32", num_blocks=512)
s = cache.start().sequence
k = np.ones((1000, 8, 128), np.float32)
with cache.reserve([(s, 1000)]) as plan:
    pagedkv.append(plan, 0, k, k)
q = np.ones((400, 32, 128), np.float32)
mine = pagedkv.PagedKVCache(kv_quant_config="f32", dynamic=True)
mine.update_without_fetch(k[None, :, :100].swapaxes(1, 2), k[None, :, :100].swapaxes(1, 2))
one = np.ones((1, 8, 1, 128), np.float32)
stop = False
def work():
    while not stop:
        pagedkv.attend(cache.plan_read([(s, 400)]), 0, q)
def work_mine():
    while not stop:
        mine.update_without_fetch(one, one)
        mine.paged_attention(one)
threads = [threading.Thread(target=f) for f in (work, work_mine)]
for thread in threads:
    thread.start()
"""


def test_a_fork_waits_for_the_calls_of_other_threads_and_both_sides_go_on():
    expect_quiet(CACHE_IN_USE + """
def child(i):
    assert (pagedkv.attend(cache.plan_read([(s, 1)]), 0, q[:1]) == 1).all()
    with cache.reserve([(s, 1)]) as plan:
        pagedkv.append(plan, 0, k[:1], k[:1])
    cache.verify()
    mine.update_without_fetch(one, one)
    assert mine.paged_attention(one).shape == one.shape and mine.fork().offset == mine.offset
forked(child)
stop = True
for thread in threads:
    thread.join()
cache.verify()
""")


# The calls go on while the interpreter ends.
AT_EXIT = """
import threading, time
import numpy as np, pagedkv
cache = pagedkv.Cache(num_kv_heads=8, head_dim=64, num_q_heads=8, kv_quant="q8", num_blocks=512)
s = cache.start().sequence
k = np.ones((500, 8, 64), np.float32)
with cache.reserve([(s, 500)]) as plan:
    pagedkv.append(plan, 0, k, k)
mine = pagedkv.PagedKVCache(kv_quant_config="q8", dynamic=True)
one = np.ones((1, 8, 1, 64), np.float32)
def forever(call):
    while True:
        call()
calls = [lambda: pagedkv.attend(cache.plan_read([(s, 100)]), 0, k[:100]), lambda: cache.stats(),
         lambda: (mine.update_without_fetch(one, one), mine.paged_attention(one)), lambda: pagedkv.quantize_symmetric(k)]
for call in calls:
    threading.Thread(target=forever, args=(call,), daemon=True).start()
"""


def test_daemon_threads_may_be_inside_when_the_interpreter_ends():
    expect_all_quiet(AT_EXIT + f"time.sleep({i * 0.003})\n" for i in range(TIMES))


LOADED = FORKED + """
import gc
import pagedkv
llm = pagedkv.LLM(sys.argv[1], context=512, num_blocks=64)
"""


@pytest.mark.parametrize("child", [
    "pass",
    "llm.close()",
    "globals().pop('llm'); gc.collect()",
    "assert len(llm.tokenize('a b c')) > 1 and llm.info['n_layers'] > 1",
    """
    for call in (lambda: llm.generate("a"), llm.stats, lambda: llm.chat("a"), lambda: next(stream)):
        try:
            call()
        except pagedkv.UnavailableError as error:
            assert "forked" in str(error), error
        else:
            raise AssertionError("no error")
""",
], ids=["exit", "close", "del", "what_needs_no_thread", "generate"])
def test_a_forked_child_of_a_model_gets_an_error_and_ends(model_path, child):
    expect_quiet(LOADED + f"""
stream = llm.generate("Once", max_tokens=400, stream=True)
def child(i):
    {child}
forked(child)
stream.close()
assert llm.generate("a", max_tokens=2, temperature=0).text is not None
""", model_path)


def test_multiprocessing_by_fork_gets_an_error_and_ends(model_path):
    expect_quiet(LOADED + """
import multiprocessing
context = multiprocessing.get_context("fork")
def work(queue):
    try:
        llm.generate("a")
    except pagedkv.UnavailableError as error:
        queue.put(str(error))
queue = context.SimpleQueue()
for i in range(20):
    worker = context.Process(target=work, args=(queue,))
    worker.start()
    assert "forked" in queue.get()
    worker.join(60)
    assert worker.exitcode == 0
""", model_path)


def test_a_model_may_answer_daemon_threads_when_the_interpreter_ends(model_path):
    expect_all_quiet([f"""
import sys, threading, time
import pagedkv
llm = pagedkv.LLM(sys.argv[1], context=512, num_blocks=64)
def forever():
    while True:
        llm.generate("Once upon a time", max_tokens=50)
for _ in range(2):
    threading.Thread(target=forever, daemon=True).start()
time.sleep({0.05 + i * 0.01})
""" for i in range(TIMES)], model_path)
