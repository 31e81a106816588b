"""pagedkv.LLM on a real model."""

import threading
import time

import numpy as np
import pytest

import pagedkv

QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def llm(model_path):
    with pagedkv.LLM(model_path, kv_quant="q8") as llm:
        yield llm


def settled(llm, wanted):
    """The statistics, once they have caught up (a quarter of a second)."""
    for _ in range(100):
        stats = llm.stats()
        if wanted(stats):
            return stats
        time.sleep(0.05)
    raise AssertionError(stats)


def test_it_answers(llm):
    answer = llm.chat(QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in answer.text and answer.finish_reason == "stop" and str(answer) == answer.text
    assert answer.usage["prompt_tokens"] > 5 and answer.usage["completion_tokens"] > 3


def test_a_stream_brings_the_same_text_in_pieces(llm):
    whole = llm.chat(QUESTION, temperature=0, max_tokens=32)
    with llm.chat([{"role": "user", "content": QUESTION}], temperature=0, max_tokens=32, stream=True) as stream:
        pieces = list(stream)
    assert len(pieces) > 3 and "".join(pieces) == whole.text == stream.text
    assert stream.finish_reason == "stop" and stream.usage["completion_tokens"] == whole.usage["completion_tokens"]


def test_a_stream_that_is_closed_ends_its_request(llm):
    stream = llm.generate("Once upon a time", max_tokens=2000, ignore_end=True, stream=True)
    next(stream)
    stream.close()
    assert stream.finish_reason == "cancelled" and stream.usage["completion_tokens"] < 2000
    with pytest.raises(StopIteration):
        next(stream)
    dropped = llm.generate("Once upon a time", max_tokens=2000, ignore_end=True, stream=True)
    next(dropped)
    del dropped
    settled(llm, lambda stats: stats["running"] == 0)


def test_a_prompt_that_was_there_before_is_not_computed_again(llm):
    text = "The quick brown fox jumps over the lazy dog. " * 20
    first, second = (llm.generate(text, max_tokens=4, temperature=0) for _ in range(2))
    assert second.usage["cached_tokens"] >= second.usage["prompt_tokens"] - 17 and first.text == second.text
    elsewhere = llm.generate(text, max_tokens=4, temperature=0, name_space="another tenant")
    assert elsewhere.usage["cached_tokens"] == 0


def test_lists_choices_and_threads(llm):
    prompts = ["The sky is", "Water is", "Fire is"]
    alone = [llm.generate(prompt, max_tokens=6, temperature=0).text for prompt in prompts]
    assert [answer.text for answer in llm.generate(prompts, max_tokens=6, temperature=0)] == alone
    choices = llm.generate("The sky is", max_tokens=6, n=3, seed=5, temperature=1.5)
    assert len(choices) == 3 and len({choice.text for choice in choices}) > 1
    assert [len(c) for c in llm.generate(prompts, max_tokens=2, n=2)] == [2, 2, 2]
    texts = [None] * 3

    def ask(i):
        texts[i] = llm.generate(prompts[i], max_tokens=6, temperature=0).text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == alone


def test_tokens_go_in_and_come_out(llm):
    tokens = llm.tokenize("Hello world", add_special=False)
    assert llm.detokenize(tokens) == "Hello world"
    by_ids = llm.generate(llm.tokenize("The sky is"), max_tokens=5, temperature=0)
    assert by_ids.text == llm.generate("The sky is", max_tokens=5, temperature=0).text
    with pytest.raises(ValueError, match="vocabulary has"):
        llm.detokenize([10**8])


def test_sampling_options_reach_the_sampler(llm):
    def same(**options):
        return {llm.generate("A story:", max_tokens=8, **options).text for _ in range(2)}

    assert len(same(seed=7)) == 1
    assert llm.generate("A story:", max_tokens=8, seed=7).text != llm.generate("A story:", max_tokens=8, seed=8, temperature=2.0).text
    assert llm.generate("1, 2, 3,", max_tokens=20, temperature=0, stop=" 6").finish_reason == "stop"
    assert llm.generate("Yes or no?", max_tokens=8, grammar='root ::= "yes" | "no"').text in ("yes", "no")
    token = llm.tokenize(" Z", add_special=False)[0]
    assert llm.generate("A", max_tokens=3, temperature=0, logit_bias={token: 100}).text == " Z" * 3


@pytest.mark.parametrize("prompt,options,error,match", [
    ("x", {"temperature": -1}, ValueError, "temperature is -1"), ("x", {"temperature": float("nan")}, ValueError, "temperature"),
    ("x", {"top_p": 2}, ValueError, "top_p"), ("", {}, ValueError, "empty"), ([10**6], {}, ValueError, "vocabulary"),
    ("x", {"n": 0}, ValueError, "n"), ("x", {"grammar": 'rule ::= "a"'}, ValueError, "grammar"),
    ("x", {"no_such_option": 1}, TypeError, "no_such_option"), (["a", "b"], {"stream": True}, ValueError, "one prompt"),
    ("x", {"n": 2, "stream": True}, ValueError, "n is 2"),
])
def test_what_cannot_be_done_is_refused_by_name(llm, prompt, options, error, match):
    with pytest.raises(error, match=match):
        llm.generate(prompt, **options)


@pytest.mark.parametrize("options, error, text", [
    (dict(temperature="hot"), TypeError, "temperature is 'hot', of type str, allowed are numbers"),
    (dict(max_tokens=2.0), TypeError, "max_tokens is 2.0, of type float, allowed are integers"),
    (dict(max_tokens=-2), ValueError, "max_tokens is -2, allowed are -1 to"),
    (dict(seed=-1), ValueError, "seed is -1, allowed are 0 to"),
    (dict(seed="x"), TypeError, "seed is 'x'"),
    (dict(stop=3), TypeError, "stop is 3, of type int, allowed are lists"),
    (dict(stop=[3]), TypeError, "stop is 3, of type int, allowed are strings"),
    (dict(logit_bias=[1]), TypeError, r"logit_bias is \[1\], of type list, allowed are dicts"),
    (dict(logit_bias={"a": 1}), TypeError, "logit_bias is 'a', of type str, allowed are integers"),
    (dict(ignore_end=1), TypeError, "ignore_end is 1, of type int, allowed are True and False"),
    (dict(grammar='root ::= "a" | missing'), ValueError, 'the rule "missing" is named, and not defined'),
])
@pytest.mark.parametrize("max_tokens", [0, 4])
def test_a_wrong_option_is_named_with_what_is_allowed(llm, options, error, text, max_tokens):
    with pytest.raises(error, match=text):
        llm.generate("x", **dict(max_tokens=max_tokens) | options)


@pytest.mark.parametrize("prompt, error, text", [
    (b"abc", TypeError, "prompt is b'abc', of type bytes, allowed are texts"),
    ([1.0, 2.0], TypeError, "prompt is 1.0, of type float, allowed are integers"),
    (np.ones(3), TypeError, "prompt is 1.0, of type float, allowed are integers"),
    ([True], TypeError, "prompt is True, of type bool"),
    ([2**40], ValueError, "prompt is 1099511627776, allowed are"),
    (np.ones((2, 3), int), ValueError, r"token ids are \[2, 3\], allowed are \[n\] and \[1, n\]"),
    (7, TypeError, "prompt is 7, of type int, allowed are texts"),
    (None, TypeError, "prompt is None"),
])
def test_what_is_no_prompt_is_refused_by_name(llm, prompt, error, text):
    with pytest.raises(error, match=text):
        llm.generate(prompt, max_tokens=1)


def test_token_ids_come_as_any_integers(llm):
    ids = llm.tokenize("The sky is")
    expected = llm.generate(ids, max_tokens=5, temperature=0).text
    forms = [tuple(ids), np.array(ids), np.array([ids], np.int32), [np.int64(i) for i in ids]]
    try:
        import torch

        forms += [torch.tensor(ids), torch.tensor([ids]), list(torch.tensor(ids))]
    except ImportError:
        pass
    for form in forms:
        assert llm.generate(form, max_tokens=5, temperature=0).text == expected
        assert llm.detokenize(form) == "The sky is"


def test_no_tokens_are_none(llm):
    answer = llm.generate("The sky is", max_tokens=0)
    assert (answer.text, answer.finish_reason, answer.usage["completion_tokens"]) == ("", "length", 0)
    assert answer.usage["prompt_tokens"] == len(llm.tokenize("The sky is"))
    assert [a.text for a in llm.generate("x", max_tokens=0, n=3)] == [""] * 3
    assert list(llm.generate("x", max_tokens=0, stream=True)) == []
    with pytest.raises(ValueError, match="empty"):
        llm.generate("", max_tokens=0)


def test_no_seed_is_another_one_each_time(llm):
    texts = {llm.generate("A story:", max_tokens=16, seed=None, temperature=2.0, top_p=1.0).text for _ in range(4)}
    assert len(texts) == 4


def test_statistics_right_after_an_answer_hold_it(llm):
    for _ in range(5):
        before = llm.stats()
        llm.generate("x", max_tokens=3, ignore_end=True)
        after = llm.stats()
        assert after["finished_length"] - before["finished_length"] == 1
        assert after["generated_tokens"] - before["generated_tokens"] == 3


@pytest.mark.parametrize("options", [
    {"grammar": 'root ::= "a" [^\\x00-\\U0010FFFF]', "logit_bias": {2: 100}},
    {"grammar": 'root ::= "a" [^\\x00-\\U0010FFFF]', "temperature": 0}, {"grammar": 'root ::= "\\U00040000"'},
])
def test_a_grammar_that_the_vocabulary_cannot_follow_is_an_error_and_no_abort(llm, options):
    with pytest.raises(ValueError, match="no token of this model's vocabulary goes on"):
        llm.generate("x", max_tokens=8, **options)
    assert llm.generate("x", max_tokens=2).finish_reason == "length"


def test_any_grammar_is_read_or_refused_in_bounded_time(llm):
    for grammar in ('root ::= a root "x" | "y"\na ::= b\nb ::= "z" | ', 'root ::= root "x" | "y"'):  # left recursion
        assert llm.generate("x", max_tokens=4, grammar=grammar, temperature=0).text
    for grammar in ("root ::= " + "(" * 100_000, "root ::= root", 'root ::= "a"{1000000000}', "\0"):
        with pytest.raises(ValueError):
            llm.generate("x", max_tokens=4, grammar=grammar)
    doubling = 'root ::= s\ns ::= "[" s "b" | "[" s "c" | "d"'  # two ways at each step
    assert llm.generate("[[[", max_tokens=200, temperature=0, grammar=doubling, logit_bias={llm.tokenize("[", add_special=False)[0]: 100}).text.startswith("[[[")


def test_seeds_of_64_bits_are_all_different(llm):
    def text(seed):
        return llm.generate("A story:", max_tokens=16, seed=seed, temperature=2.0, top_p=1.0).text

    assert len({text(seed) for seed in (0, 1, 2**32 - 2, 2**32 - 1, 2**32, 2**32 + 1, 2**64 - 1)}) == 7
    assert text(2**64 - 1) == text(2**64 - 1)
    choices = llm.generate("A story:", max_tokens=16, seed=2**32 - 2, n=4, temperature=2.0, top_p=1.0)
    assert len({choice.text for choice in choices}) == 4


def test_a_text_is_tokenized_and_back_unchanged(llm):
    for text in ("Hello", " Hello", "caf\u00e9 \U0001f600", "", "  two  spaces"):
        assert llm.detokenize(llm.tokenize(text)) == text
    with pytest.raises(ValueError, match=r"U\+0004"):
        llm.tokenize("a\x04b")


@pytest.mark.parametrize("messages,error", [
    ([{"role": "wizard", "content": "x"}], ValueError), ([{"content": "x"}], TypeError), (["x"], TypeError),
    ([{"role": "user", "content": 3}], TypeError), (None, TypeError), (3, TypeError),
])
def test_messages_that_are_none_are_refused(llm, messages, error):
    with pytest.raises(error):
        llm.chat(messages)


@pytest.mark.parametrize("text, call", [
    ("messages is None, allowed are texts", lambda llm: llm.chat(None)),
    ("text is None, allowed are strings", lambda llm: llm.tokenize(None)),
    ("add_special is None, allowed are True and False", lambda llm: llm.tokenize("x", add_special=None)),
    ("parse_special is None, allowed are True and False", lambda llm: llm.tokenize("x", parse_special=None)),
    ("tokens are None, of type NoneType, allowed are token ids", lambda llm: llm.detokenize(None)),
    ("model is None, of type NoneType, allowed are paths", lambda llm: pagedkv.LLM(None)),
])
def test_a_none_is_named(llm, text, call):
    with pytest.raises(TypeError, match=text):
        call(llm)


def test_statistics_are_those_of_the_cache_and_of_the_scheduler(llm):
    llm.generate("x", max_tokens=3)
    stats = settled(llm, lambda stats: stats["running"] == 0)
    assert stats["requests"] >= 1 and stats["generated_tokens"] >= 1
    assert stats["cache"]["dense_materializations"] == 0 and stats["cache"]["growth_bytes_copied"] == 0
    assert llm.info["kv_quant"] == "q8" and llm.info["architecture"] == "llama"


def test_loading_reports_its_progress_and_bad_files_are_refused(model_path, tmp_path):
    seen = []
    pagedkv.LLM(model_path, progress=seen.append, num_blocks=64).close()
    assert seen[-1] == 1 and seen == sorted(seen)
    with pytest.raises(ZeroDivisionError):
        pagedkv.LLM(model_path, progress=lambda fraction: 1 / 0)
    with pytest.raises(FileNotFoundError):
        pagedkv.LLM(tmp_path / "nothing.gguf")
    broken = tmp_path / "broken.gguf"
    with open(model_path, "rb") as whole:
        broken.write_bytes(whole.read(10_000))
    with pytest.raises(pagedkv.CorruptError):
        pagedkv.LLM(broken)
    with pytest.raises(ValueError, match="q8, q6, q4"):
        pagedkv.LLM(model_path, kv_quant="q3")


def test_a_closed_model_says_so(model_path):
    llm = pagedkv.LLM(model_path, num_blocks=64)
    llm.close()
    with pytest.raises(pagedkv.UnavailableError):
        llm.generate("x")


def test_a_folder_keeps_a_prompt_for_the_next_start(model_path, tmp_path):
    text = "The quick brown fox jumps over the lazy dog. " * 40
    with pagedkv.LLM(model_path, kv_quant="q8", cache_dir=tmp_path / "blocks", cache_disk=64 << 20) as llm:
        first = llm.generate(text, max_tokens=4, temperature=0)
        settled(llm, lambda stats: stats["tier"]["waiting_blocks"] == 0 and stats["tier"]["blocks"] > 20)
        with pytest.raises(pagedkv.PagedKVError, match="blocks"):
            pagedkv.LLM(model_path, cache_dir=tmp_path / "blocks")
    with pagedkv.LLM(model_path, kv_quant="q8", cache_dir=tmp_path / "blocks") as llm:
        second = llm.generate(text, max_tokens=4, temperature=0)
    assert second.usage["cached_tokens"] >= second.usage["prompt_tokens"] - 17 and first.text == second.text
