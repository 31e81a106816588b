// An engine on a model file, and the ways its logits can be asked for.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/engine.h"

namespace pagedkv::engine {

// Any tokens do: the models are random. 3 and above are neither control tokens nor ends.
inline std::vector<int32_t> random_tokens(int n, int64_t vocab_size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  for (int32_t& t : tokens) t = 3 + int32_t(random() % uint32_t(vocab_size - 3));
  return tokens;
}

class World {
 public:
  explicit World(const EngineOptions& options) {
    auto loaded = Engine::load(options);
    if (!loaded.ok()) throw std::runtime_error(loaded.status().message());
    engine = std::move(*loaded);
  }

  // Opens a sequence; returns it with what the cache already knew.
  Started start(std::span<const int32_t> prompt) {
    auto started = engine->cache().start(prompt);
    if (!started.ok()) throw std::runtime_error(started.status().message());
    return *started;
  }

  // Logits of all these tokens, fed in chunks of the given sizes, the last size repeating.
  std::vector<float> feed(SequenceId sequence, std::span<const int32_t> tokens, std::vector<int> chunks) {
    std::vector<float> out;
    size_t turn = 0;
    for (size_t at = 0; at < tokens.size();) {
      const size_t n = std::min(tokens.size() - at, size_t(chunks[turn]));
      const StepInput input{.sequence = sequence, .tokens = tokens.subspan(at, n), .all_logits = true};
      auto result = engine->step({&input, 1});
      if (!result.ok()) throw std::runtime_error(result.status().message());
      if (!result->statuses[0].ok()) throw std::runtime_error(result->statuses[0].message());
      out.insert(out.end(), result->logits.begin(), result->logits.end());
      at += n;
      turn = std::min(turn + 1, chunks.size() - 1);
    }
    return out;
  }

  // The same for a fresh sequence that takes nothing from the cache and leaves nothing in it.
  std::vector<float> logits(std::span<const int32_t> tokens, std::vector<int> chunks) {
    auto started = engine->cache().start(tokens, {.name_space = {}, .reuse = false, .store = false});
    if (!started.ok()) throw std::runtime_error(started.status().message());
    auto out = feed(started->id, tokens, std::move(chunks));
    EXPECT_TRUE(engine->cache().release(started->id).ok());
    return out;
  }

  // The same, chunk after chunk, for vocabularies that do not fit in memory several thousand times.
  void each_chunk(std::span<const int32_t> tokens, int chunk,
                  const std::function<void(std::span<const float>)>& use) {
    auto started = engine->cache().start(tokens, {.name_space = {}, .reuse = false, .store = false});
    if (!started.ok()) throw std::runtime_error(started.status().message());
    while (!tokens.empty()) {
      const auto now = tokens.first(std::min(tokens.size(), size_t(chunk)));
      use(feed(started->id, now, {chunk}));
      tokens = tokens.subspan(now.size());
    }
    EXPECT_TRUE(engine->cache().release(started->id).ok());
  }

  int64_t vocab_size() const { return engine->model().vocab_size; }

  std::unique_ptr<Engine> engine;
};

}  // namespace pagedkv::engine
