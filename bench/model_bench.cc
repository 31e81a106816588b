// Prefill and decode of a whole model, beside libllama on the same file.

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <latch>
#include <thread>
#include <utility>

#include "bench/bench.h"
#include "bench/measure.h"
#include "bench/peer.h"
#include "bench/record.h"
#include "bench/table.h"
#include "engine/engine.h"
#include "engine/scheduler.h"

namespace pagedkv::bench {
namespace {

constexpr int kRounds = 5;      // ours and the peer's, in turn
constexpr int kDeepRounds = 2;  // of chunks of prompts, from kDeep stored tokens on: libllama takes 10 s for one
constexpr int64_t kDeep = 4096;
constexpr int kDecodeSteps = 24;  // a round
constexpr int64_t kPrefill = 512;
// After a round the other side's threads may still spin; they sleep after this.
constexpr auto kPause = std::chrono::milliseconds(150);

// Text that every vocabulary can spell, long enough for any depth.
Result<std::vector<int32_t>> some_tokens(const engine::Engine& engine, int64_t n) {
  std::string text;
  for (int64_t i = 0; int64_t(text.size()) < n * 6; ++i)
    text += "Paragraph " + std::to_string(i) + ": the river ran past the old mill, and item " +
            std::to_string(i * 7919 % 1000) + " of the list was counted again before the evening came. ";
  auto tokens = engine.text().tokenize(text, true, false);
  if (tokens.ok()) tokens->resize(size_t(n));
  return tokens;
}

class Ours {
 public:
  explicit Ours(engine::Engine& engine) : engine_(engine) {}
  Status open() {
    auto started = engine_.cache().start({}, {.reuse = false, .store = false});
    if (!started.ok()) return started.status();
    id_ = started->id;
    return Status();
  }
  // From here on tokens go into a fork, and back() starts a new one: behind a window nothing can be truncated.
  Status mark() {
    base_ = id_;
    return refork();
  }
  Status back() {
    if (Status status = engine_.cache().release(id_); !status.ok()) return status;
    return refork();
  }
  Status unmark() {
    const SequenceId fork = std::exchange(id_, base_);
    return engine_.cache().release(fork);
  }
  Status close() { return engine_.cache().release(id_); }
  Status feed(std::span<const int32_t> tokens) {
    while (!tokens.empty()) {
      const auto chunk = tokens.first(std::min<size_t>(tokens.size(), size_t(kPrefill)));
      const engine::StepInput input{.sequence = id_, .tokens = chunk};
      auto out = engine_.step({&input, 1});
      if (!out.ok()) return out.status();
      if (!out->statuses[0].ok()) return out->statuses[0];
      tokens = tokens.subspan(chunk.size());
    }
    return Status();
  }

 private:
  Status refork() {
    auto fork = engine_.cache().fork(base_);
    if (fork.ok()) id_ = *fork;
    return fork.status();
  }

  engine::Engine& engine_;
  SequenceId id_, base_;
};

Record record(const std::string& name, const engine::Engine& engine, Format format, int64_t depth,
              const std::vector<double>& seconds, const std::vector<double>& peer) {
  const GroupSpec& group = engine.cache_options().groups.front();
  Record r{.name = name,
           .format = format_name(format),
           .heads_q = engine.model().n_head,
           .heads_kv = group.shape.num_kv_heads,
           .head_dim = group.shape.head_dim_k,
           .batch = 1,
           .tokens = depth,
           .threads = engine.threads()};
  set_seconds(r, seconds);
  set_peer(r, "llama", peer);
  return r;
}

bool wanted(const BenchOptions& options, const char* name) {
  return options.cases.empty() || std::ranges::find(options.cases, name) != options.cases.end();
}

// One sequence of ours and one of the peer's (may be none), with the same tokens in them.
struct Sides {
  Ours& ours;
  LlamaPeer* peer;
  std::span<const int32_t> tokens;
};
struct Seconds {
  std::vector<double> ours, peer;
};

Status peer_failed() { return Status(Code::kInternal, "[bench] libllama failed"); }

// Feeds tokens [from, to) to both, and adds what each took.
Status feed(const Sides& sides, int64_t from, int64_t to, Seconds* seconds) {
  const auto part = sides.tokens.subspan(size_t(from), size_t(to - from));
  if (part.empty()) return Status();
  double begin = now_seconds();
  if (Status status = sides.ours.feed(part); !status.ok()) return status;
  if (seconds != nullptr) seconds->ours.push_back(now_seconds() - begin);
  if (sides.peer == nullptr) return Status();
  std::this_thread::sleep_for(kPause);
  begin = now_seconds();
  if (!sides.peer->feed(part)) return peer_failed();
  if (seconds != nullptr) seconds->peer.push_back(now_seconds() - begin);
  std::this_thread::sleep_for(kPause);
  return Status();
}

Status back(const Sides& sides, int64_t length) {
  if (sides.peer != nullptr) sides.peer->truncate(length);
  return sides.ours.back();
}

// Seconds of one decoded token at `depth`, where both are before and after.
Status bench_decode(const Sides& sides, int64_t depth, Seconds& seconds) {
  if (Status s = sides.ours.mark(); !s.ok()) return s;
  for (int round = 0; round < kRounds + 1; ++round) {  // the first one warms up
    for (int i = 0; i < kDecodeSteps; ++i) {
      const double begin = now_seconds();
      if (Status s = sides.ours.feed(sides.tokens.subspan(size_t(depth + i), 1)); !s.ok()) return s;
      if (round > 0) seconds.ours.push_back(now_seconds() - begin);
    }
    std::this_thread::sleep_for(kPause);
    for (int i = 0; sides.peer != nullptr && i < kDecodeSteps; ++i) {
      const double begin = now_seconds();
      if (!sides.peer->feed(sides.tokens.subspan(size_t(depth + i), 1))) return peer_failed();
      if (round > 0) seconds.peer.push_back(now_seconds() - begin);
    }
    if (Status s = back(sides, depth); !s.ok()) return s;
    std::this_thread::sleep_for(kPause);
  }
  return sides.ours.unmark();
}

// Seconds of 512 tokens after `depth` (0: from the start), where both are before and after.
Status bench_prefill(const Sides& sides, int64_t depth, Seconds& seconds) {
  const int rounds = depth >= kDeep ? kDeepRounds : kRounds;
  if (Status s = sides.ours.mark(); !s.ok()) return s;
  for (int round = 0; round < rounds + 1; ++round) {
    if (Status s = feed(sides, depth, depth + kPrefill, round > 0 ? &seconds : nullptr); !s.ok()) return s;
    if (Status s = back(sides, depth); !s.ok()) return s;
  }
  return sides.ours.unmark();
}

// --- many sequences --------------------------------------------------------------------------------------------
constexpr int64_t kBatchPrompt = 512, kBatchAnswer = 128;
constexpr int kBatchRounds = 2;  // of some 20 seconds each with 8 sequences, 80 with 32

// "batch_32": 32. 0: another name.
int64_t sequences_of(const std::string& name) {
  if (!name.starts_with("batch_")) return 0;
  int64_t n = 0;
  const auto [end, error] = std::from_chars(name.data() + 6, name.data() + name.size(), n);
  return error == std::errc() && end == name.data() + name.size() && n >= 1 && n <= 256 ? n : 0;
}

// Prompts that differ from their first block on, each of kBatchPrompt tokens.
Result<std::vector<std::vector<int32_t>>> some_prompts(const engine::Text& text, int64_t n, int round) {
  std::vector<std::vector<int32_t>> prompts;
  for (int64_t i = 0; i < n; ++i) {
    std::string words = "Letter " + std::to_string(round * 1000 + i) + ". ";
    for (int64_t line = 0; std::ssize(words) < kBatchPrompt * 6; ++line)
      words += "Item " + std::to_string((line * 7919 + i * 31) % 1000) + " was counted twice by clerk " +
               std::to_string(i) + " before the evening came. ";
    auto tokens = text.tokenize(words, true, false);
    if (!tokens.ok()) return tokens.status();
    tokens->resize(size_t(kBatchPrompt));
    prompts.push_back(std::move(*tokens));
  }
  return prompts;
}

class CountEnds : public engine::RequestSink {
 public:
  explicit CountEnds(std::latch& ends, std::atomic<int64_t>& failed) : ends_(ends), failed_(failed) {}
  void on_delta(engine::Delta) override {}
  void on_end(const Status& status, const engine::Usage& usage) override {
    if (!status.ok() || usage.completion_tokens != kBatchAnswer) ++failed_;
    ends_.count_down();
  }

 private:
  std::latch& ends_;
  std::atomic<int64_t>& failed_;
};

// Seconds until all of `n` requests, 512 tokens in and 128 out, greedy, are answered.
Result<Record> bench_batch(const BenchOptions& options, const std::string& name, int64_t n, Format format) {
  const int64_t context = kBatchPrompt + kBatchAnswer + 16;
  auto engine = engine::Engine::load({.model_path = options.model,
                                      .context = Tokens(context),
                                      .threads = options.threads,
                                      .kv_formats = {format, format},
                                      .query_path = options.query_path,
                                      .max_sequences = n,
                                      .reproducible = options.reproducible});
  if (!engine.ok()) return engine.status();
  std::unique_ptr<LlamaPeer> peer;
  if (!options.peer.empty()) {
    auto loaded = LlamaPeer::load(options.model, format, context, (*engine)->threads(), n);
    if (!loaded.ok()) return loaded.status();
    peer = std::move(*loaded);
  }
  std::vector<double> seconds, peer_seconds;
  for (int round = 0; round < kBatchRounds; ++round) {
    auto prompts = some_prompts((*engine)->text(), n, round);
    if (!prompts.ok()) return prompts.status();
    {
      auto scheduler = engine::Scheduler::start(**engine, {.max_num_seqs = n, .max_step_seconds = 0});
      if (!scheduler.ok()) return scheduler.status();
      std::latch ends(n);
      std::atomic<int64_t> failed{0};
      const double begin = now_seconds();
      for (const auto& prompt : *prompts) {
        engine::ServeRequest request;
        request.prompt = prompt;
        request.answer.max_tokens = Tokens(kBatchAnswer);
        request.answer.sampling.temperature = 0;
        request.answer.ignore_end = true;
        auto id = (*scheduler)->submit(std::move(request), std::make_shared<CountEnds>(ends, failed));
        if (!id.ok()) return id.status();
      }
      ends.wait();
      seconds.push_back(now_seconds() - begin);
      if (failed != 0) return Status(Code::kInternal, "[bench] " + std::to_string(failed) + " requests failed");
      (*scheduler)->stop();  // from here on the cache is this thread's again
      (*engine)->cache().clear_cached();
    }
    if (!peer) continue;
    std::this_thread::sleep_for(kPause);
    const double begin = now_seconds();
    if (!peer->answer(*prompts, kBatchAnswer)) return Status(Code::kInternal, "[bench] libllama failed");
    peer_seconds.push_back(now_seconds() - begin);
    std::this_thread::sleep_for(kPause);
  }
  Record r = record(name, **engine, format, kBatchPrompt, seconds, peer_seconds);
  r.batch = n;
  r.isa = std::string((*engine)->cache().isa());
  return r;
}

}  // namespace

Result<std::vector<Record>> bench_model(const BenchOptions& options, std::ostream& table) {
  if (!options.peer.empty() && options.peer != "llama")
    return invalid_argument("[bench] peer \"" + options.peer + "\" is not one of the model cases' peers: llama");
  for (const std::string& name : options.cases)
    if (name != "decode" && name != "prefill" && sequences_of(name) == 0)
      return invalid_argument("[bench] case \"" + name +
                              "\" is none of the model cases: decode, prefill, batch_N (1 to 256 sequences)");
  const std::vector<int64_t> depths = options.depths.empty() ? std::vector<int64_t>{16} : options.depths;
  for (const int64_t depth : depths)
    if (depth < 0 || depth > 1 << 20)
      return invalid_argument("[bench] depth is " + std::to_string(depth) + ", allowed are 0 to 1048576");
  const int64_t deepest = *std::ranges::max_element(depths) + kPrefill;
  const std::vector<Format> formats = options.formats.empty()
                                          ? std::vector<Format>{Format::kF16, Format::kQ8, Format::kQ6, Format::kQ4}
                                          : options.formats;
  std::vector<Record> records;
  print_head(table);
  for (const Format format : formats) {
    for (const std::string& name : options.cases) {
      const int64_t sequences = sequences_of(name);
      if (sequences == 0) continue;
      auto made = bench_batch(options, name, sequences, format);
      if (!made.ok()) return made.status();
      records.push_back(*made);
      print_row(table, records.back());
    }
    if (!wanted(options, "decode") && !wanted(options, "prefill")) continue;
    auto engine = engine::Engine::load({.model_path = options.model,
                                        .context = Tokens(deepest),
                                        .threads = options.threads,
                                        .kv_formats = {format, format},
                                        .query_path = options.query_path,
                                        .max_sequences = 2,  // a sequence and its fork
                                        .reproducible = options.reproducible,
                                        .allow_past_trained_context = true});
    if (!engine.ok()) return engine.status();
    auto tokens = some_tokens(**engine, deepest);
    if (!tokens.ok()) return tokens.status();
    std::unique_ptr<LlamaPeer> peer;
    if (!options.peer.empty()) {
      auto loaded = LlamaPeer::load(options.model, format, deepest, (*engine)->threads());
      if (!loaded.ok()) return loaded.status();
      peer = std::move(*loaded);
    }
    const auto add = [&](const std::string& name, int64_t depth, const Seconds& seconds) {
      records.push_back(record(name, **engine, format, depth, seconds.ours, seconds.peer));
      records.back().isa = std::string((*engine)->cache().isa());
      print_row(table, records.back());
    };
    for (const int64_t depth : depths) {
      Ours ours(**engine);
      if (Status s = ours.open(); !s.ok()) return s;
      if (peer) peer->clear();
      const Sides sides{.ours = ours, .peer = peer.get(), .tokens = *tokens};
      if (wanted(options, "prefill") && options.depths.empty()) {  // that of a fresh prompt
        Seconds seconds;
        if (Status s = bench_prefill(sides, 0, seconds); !s.ok()) return s;
        add("prefill", 0, seconds);
      }
      // A long prompt is fed once, and its second half is a figure of its own.
      const int64_t half = depth >= kDeep ? depth / 2 : depth;
      Seconds second_half;
      if (Status s = feed(sides, 0, half, nullptr); !s.ok()) return s;
      if (Status s = feed(sides, half, depth, &second_half); !s.ok()) return s;
      if (wanted(options, "prefill") && half < depth) add("prefill to " + std::to_string(depth), half, second_half);
      if (wanted(options, "decode") && depth > 0) {
        Seconds seconds;
        if (Status s = bench_decode(sides, depth, seconds); !s.ok()) return s;
        add("decode", depth, seconds);
      }
      if (wanted(options, "prefill") && !options.depths.empty()) {
        Seconds seconds;
        if (Status s = bench_prefill(sides, depth, seconds); !s.ok()) return s;
        add("prefill", depth, seconds);
      }
      if (Status s = ours.close(); !s.ok()) return s;
    }
  }
  return records;
}

}  // namespace pagedkv::bench
