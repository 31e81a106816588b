// Perplexity, and the divergence of one storage format from another, over one engine with two caches.
//
// Both caches are fed the same few tokens in turn and compared at once: nothing but the logits of one step is kept.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "engine/engine_impl.h"

namespace pagedkv::engine {
namespace {

constexpr int64_t kLeastChunk = 4;
// Tokens scored by one step: [64, vocabulary] f32 are 13 MB for SmolLM2, 67 MB for Gemma 3.
constexpr int64_t kScoredStep = 64;

struct RowSummary {
  double log_sum = 0;  // of exp over the row: log p[i] = row[i] - log_sum
  int64_t best = 0;    // the first of equals
};

RowSummary summarize(std::span<const float> row) {
  const auto best = std::max_element(row.begin(), row.end());
  double sum = 0;
  for (const float x : row) sum += std::exp(x - *best);
  return {double(*best) + std::log(sum), best - row.begin()};
}

// sum p_ref * (log p_ref - log p), in nats.
double divergence(std::span<const float> reference, const RowSummary& of_reference, std::span<const float> row,
                  const RowSummary& of_row) {
  double sum = 0;
  for (size_t i = 0; i < row.size(); ++i) {
    const double log_p = double(reference[i]) - of_reference.log_sum;
    sum += std::exp(float(log_p)) * (log_p - (double(row[i]) - of_row.log_sum));
  }
  return sum;
}

Result<std::unique_ptr<Cache>> reference_cache(const Cache& cache, const FidelityRequest& request) {
  CacheOptions options = cache.options();
  for (GroupSpec& group : options.groups) group.shape.formats = *request.reference;
  options.num_blocks = blocks_for(request.chunk, options.block_size);
  return Cache::create(std::move(options));
}

Status check(const FidelityRequest& request, Tokens context) {
  if (request.chunk.n < kLeastChunk || request.chunk > context) {
    return invalid_argument("[fidelity] chunks of " + std::to_string(request.chunk.n) + " tokens, expected " +
                            std::to_string(kLeastChunk) + " to " + std::to_string(context.n) + " (the context)");
  }
  const int64_t n_chunks = std::ssize(request.tokens) / request.chunk.n;
  if (n_chunks < std::max<int64_t>(request.max_chunks, 1)) {
    return invalid_argument("[fidelity] the text has " + std::to_string(request.tokens.size()) +
                            " tokens, that is " + std::to_string(n_chunks) + " chunks of " +
                            std::to_string(request.chunk.n) + "; asked for are " +
                            std::to_string(std::max<int64_t>(request.max_chunks, 1)));
  }
  return Status();
}

// A sequence of each cache, released however the chunk is left.
class Sequence {
 public:
  explicit Sequence(Cache& cache) : cache_(cache), started_(cache.start({}, {.reuse = false, .store = false})) {}
  ~Sequence() {
    if (started_.ok()) static_cast<void>(cache_.release(started_->id));
  }
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  Status status() const { return started_.status(); }
  SequenceId id() const { return started_->id; }

 private:
  Cache& cache_;
  Result<Started> started_;
};

// What the scored tokens add up to.
class Scores {
 public:
  // `reference`: the same row with the reference's formats; empty: there is none.
  void add(std::span<const float> row, std::span<const float> reference, size_t next) {
    const RowSummary summary = summarize(row);
    loss_ += summary.log_sum - double(row[next]);
    ++n_;
    if (reference.empty()) return;
    const RowSummary of_reference = summarize(reference);
    reference_loss_ += of_reference.log_sum - double(reference[next]);
    divergences_.push_back(divergence(reference, of_reference, row, summary));
    same_ += summary.best == of_reference.best;
  }

  Status fill(FidelityResult& result) {
    if (!std::isfinite(loss_) || !std::isfinite(reference_loss_))
      return Status(Code::kNotFinite, "[fidelity] the model's logits are not finite");
    const auto n = double(n_);
    result.tokens_scored = n_;
    result.ppl = std::exp(loss_ / n);
    if (divergences_.empty()) return Status();
    std::sort(divergences_.begin(), divergences_.end());
    double sum = 0;
    for (const double d : divergences_) sum += d;
    result.reference = {.ppl = std::exp(reference_loss_ / n),
                        .kld_mean = sum / n,
                        .kld_p999 = divergences_[size_t(0.999 * n)],
                        .top1 = 100 * double(same_) / n};
    return Status();
  }

 private:
  double loss_ = 0, reference_loss_ = 0;
  int64_t n_ = 0, same_ = 0;
  std::vector<double> divergences_;
};

}  // namespace

Result<FidelityResult> Engine::fidelity(const FidelityRequest& request) {
  Impl& e = *impl_;
  if (Status s = check(request, e.context); !s.ok()) return s;
  std::unique_ptr<Cache> other;
  if (request.reference) {
    auto cache = reference_cache(*e.cache, request);
    if (!cache.ok()) return cache.status();
    other = std::move(*cache);
  }
  // One step of the reference: the engine runs on whichever cache it holds.
  const auto step_of_reference = [&](const StepInput& input) {
    std::swap(e.cache, other);
    auto out = step({&input, 1});
    std::swap(e.cache, other);
    return out;
  };

  const auto vocab = size_t(model().vocab_size);
  const int64_t n_chunk = request.chunk.n, first_scored = n_chunk / 2;
  FidelityResult result;
  result.chunks = request.max_chunks > 0 ? request.max_chunks : std::ssize(request.tokens) / n_chunk;
  Scores scores;
  std::vector<float> reference_logits;
  for (int64_t c = 0; c < result.chunks; ++c) {
    const auto text = request.tokens.subspan(size_t(c * n_chunk), size_t(n_chunk));
    std::vector<int32_t> tokens(text.begin(), text.end());
    if (e.text->bos() >= 0) tokens[0] = e.text->bos();
    const Sequence ours(*e.cache);
    if (!ours.status().ok()) return ours.status();
    std::optional<Sequence> theirs;
    if (other) theirs.emplace(*other);
    if (theirs && !theirs->status().ok()) return theirs->status();

    // The last token of a chunk is only predicted.
    for (int64_t at = 0; at < n_chunk - 1;) {
      const bool scored = at >= first_scored;
      const int64_t n = std::min(scored ? kScoredStep : e.chunk.n, (scored ? n_chunk - 1 : first_scored) - at);
      StepInput input{
          .sequence = ours.id(), .tokens = std::span(tokens).subspan(size_t(at), size_t(n)), .all_logits = scored};
      if (theirs) {
        StepInput same_input = input;
        same_input.sequence = theirs->id();
        auto out = step_of_reference(same_input);
        if (!out.ok()) return out.status();
        if (!out->statuses[0].ok()) return out->statuses[0];
        if (scored) reference_logits.assign(out->logits.begin(), out->logits.end());
      }
      auto out = step({&input, 1});
      if (!out.ok()) return out.status();
      if (!out->statuses[0].ok()) return out->statuses[0];
      for (int64_t i = 0; scored && i < n; ++i) {
        const auto next = size_t(tokens[size_t(at + i + 1)]);
        const auto row = out->logits.subspan(size_t(i) * vocab, vocab);
        const auto reference = theirs ? std::span<const float>(reference_logits).subspan(size_t(i) * vocab, vocab)
                                      : std::span<const float>();
        scores.add(row, reference, next);
      }
      at += n;
      if (request.progress)
        request.progress((double(c) + double(at) / double(n_chunk - 1)) / double(result.chunks));
    }
  }
  if (Status status = scores.fill(result); !status.ok()) return status;
  return result;
}

}  // namespace pagedkv::engine
