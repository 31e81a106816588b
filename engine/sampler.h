// Draws the tokens of one answer: bias, penalties, grammar, then libllama's samplers and one draw.
#pragma once

#include <memory>

#include "engine/grammar.h"
#include "engine/text.h"
#include "pagedkv/status.h"

namespace pagedkv::engine {

// What a sampler asks of the vocabulary. Must outlive the sampler; const members: any thread.
class Vocabulary {
 public:
  virtual ~Vocabulary() = default;
  virtual std::string piece(int32_t token) const = 0;
  virtual bool is_end(int32_t token) const = 0;
  virtual const std::vector<int32_t>& end_tokens() const = 0;
  virtual const SortedPieces& sorted_pieces() const = 0;
};

// Requires: check_sampling(options).ok(). Errors: those of Grammar::parse.
Result<std::unique_ptr<Sampler>> make_vocabulary_sampler(const Vocabulary& vocabulary,
                                                         const SamplingOptions& options);

}  // namespace pagedkv::engine
