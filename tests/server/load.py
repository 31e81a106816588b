"""Load on a completion server: many streams at once from one thread, each measured."""
import asyncio
import json
import random
import time


class Outcome:
    def __init__(self):
        self.status = None       # of HTTP; None: no answer
        self.first = None        # seconds to the first piece of text
        self.total = None
        self.tokens = 0          # pieces of text that came
        self.cached = None
        self.prompt_tokens = None
        self.aborted = False
        self.error = None
        self.text = ""


async def ask(port, body, abort_after=None, path="/v1/completions", host="127.0.0.1"):
    """Sends one request and reads its answer. `abort_after`: seconds until the connection is dropped."""
    out = Outcome()
    began = time.perf_counter()

    async def talk():
        data = json.dumps(body).encode()
        reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
        try:
            writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
                         b"Content-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data)
            await writer.drain()
            out.status = int((await reader.readline()).split()[1])
            while (await reader.readline()).strip():
                pass
            if not body.get("stream"):
                answer = await reader.read()
                if out.status != 200:
                    out.error = answer.decode(errors="replace")
                    return
                answer = json.loads(answer[answer.index(b"{"):answer.rindex(b"}") + 1])
                out.text = "".join(c.get("text") or c["message"]["content"] for c in answer["choices"])
                out.tokens = answer["usage"]["completion_tokens"]
                return
            while True:
                line = await reader.readline()
                if not line or line.startswith(b"data: [DONE]"):
                    break
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    out.error = event["error"]["message"]
                    continue
                for choice in event["choices"]:
                    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                    if text:
                        out.first = out.first or time.perf_counter() - began
                        out.text += text
                        out.tokens += 1
                usage = event.get("usage")
                if usage:
                    out.prompt_tokens = usage["prompt_tokens"]
                    out.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                    out.tokens = usage["completion_tokens"]
        finally:
            writer.close()

    try:
        await asyncio.wait_for(talk(), abort_after)
    except asyncio.TimeoutError:
        out.aborted = True
    except (OSError, asyncio.IncompleteReadError) as error:
        out.error = repr(error)
    out.total = time.perf_counter() - began
    return out


def all_at_once(port, bodies):
    """All requests at the same moment; their outcomes in order, and the seconds until the last one."""
    async def run():
        began = time.perf_counter()
        outcomes = await asyncio.gather(*(ask(port, body) for body in bodies))
        return outcomes, time.perf_counter() - began
    return asyncio.run(run())


async def mixed(port, seconds, clients, seed, words):
    """Clients that ask again and again: shared and own prompts, short and long, some of them dropped on the way."""
    until = time.perf_counter() + seconds
    outcomes = []

    async def client(i):
        rng = random.Random(seed * 1000 + i)
        while time.perf_counter() < until:
            shared = words[:rng.choice((40, 120, 300))]
            own = [rng.choice(words) for _ in range(rng.choice((2, 10, 60, 200)))]
            body = {"prompt": " ".join((shared if rng.random() < 0.6 else []) + own),
                    "max_tokens": rng.choice((1, 4, 16, 64)), "n": rng.choice((1, 1, 1, 2)),
                    "stream": rng.random() < 0.7, "temperature": rng.choice((0, 0.8)),
                    "cache_salt": rng.choice(("", "", "a", "b"))}
            if rng.random() < 0.1:
                body["response_format"] = {"type": "json_object"}
            abort = rng.random() * 1.5 if rng.random() < 0.3 else None
            outcomes.append(await ask(port, body, abort))
            if rng.random() < 0.02:
                outcomes.append(await ask(port, {"prompt": 5}))
    await asyncio.gather(*(client(i) for i in range(clients)))
    return outcomes
