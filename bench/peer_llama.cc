// libllama with its own KV cache.

#include <ggml-cpu.h>
#include <llama.h>

#include <algorithm>

#include "bench/peer.h"

namespace pagedkv::bench {
namespace {

class Llama : public LlamaPeer {
 public:
  ~Llama() override {
    llama_free(context);
    llama_model_free(model);
    if (pool != nullptr) ggml_threadpool_free(pool);
  }
  void clear() override { llama_memory_clear(llama_get_memory(context), true); }
  bool feed(std::span<const int32_t> tokens) override {
    while (!tokens.empty()) {
      const size_t n = std::min<size_t>(tokens.size(), 512);
      std::vector<llama_token> chunk(tokens.begin(), tokens.begin() + int64_t(n));
      if (llama_decode(context, llama_batch_get_one(chunk.data(), int32_t(n))) != 0) return false;
      tokens = tokens.subspan(n);
    }
    llama_synchronize(context);
    return llama_get_logits_ith(context, -1) != nullptr;
  }
  bool answer(std::span<const std::vector<int32_t>> prompts, int64_t n_tokens) override {
    clear();
    const auto n = int32_t(prompts.size());
    const int32_t vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    const auto best = [&](int32_t row) {
      const float* logits = llama_get_logits_ith(context, row);
      return llama_token(std::max_element(logits, logits + vocab) - logits);
    };
    llama_batch batch = llama_batch_init(std::max(512, n), 0, 1);
    const auto add = [&](llama_token token, int64_t position, int32_t sequence, bool logits) {
      const int32_t i = batch.n_tokens++;
      batch.token[i] = token;
      batch.pos[i] = llama_pos(position);
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = int8_t(logits);
    };
    std::vector<llama_token> next;
    bool ok = true;
    for (int32_t s = 0; ok && s < n; ++s) {
      const auto& prompt = prompts[size_t(s)];
      for (size_t at = 0; ok && at < prompt.size();) {
        batch.n_tokens = 0;
        for (; at < prompt.size() && batch.n_tokens < 512; ++at)
          add(prompt[at], int64_t(at), s, at + 1 == prompt.size());
        ok = llama_decode(context, batch) == 0;
      }
      if (ok) next.push_back(best(batch.n_tokens - 1));
    }
    for (int64_t step = 1; ok && step < n_tokens; ++step) {
      batch.n_tokens = 0;
      for (int32_t s = 0; s < n; ++s) add(next[size_t(s)], int64_t(prompts[size_t(s)].size()) + step - 1, s, true);
      ok = llama_decode(context, batch) == 0;
      for (int32_t s = 0; ok && s < n; ++s) next[size_t(s)] = best(s);
    }
    llama_batch_free(batch);
    return ok;
  }
  void truncate(int64_t length) override { llama_memory_seq_rm(llama_get_memory(context), 0, int32_t(length), -1); }

  llama_model* model = nullptr;
  llama_context* context = nullptr;
  ggml_threadpool* pool = nullptr;
};

}  // namespace

Result<std::unique_ptr<LlamaPeer>> LlamaPeer::load(const std::string& path, Format format, int64_t n_context,
                                                   int threads, int64_t sequences) {
  ggml_type type;
  switch (format) {
    case Format::kF32:
      type = GGML_TYPE_F32;
      break;
    case Format::kF16:
      type = GGML_TYPE_F16;
      break;
    case Format::kBF16:
      type = GGML_TYPE_BF16;
      break;
    case Format::kQ8:
      type = GGML_TYPE_Q8_0;
      break;
    case Format::kQ4:
      type = GGML_TYPE_Q4_0;
      break;
    default:
      return std::unique_ptr<LlamaPeer>();
  }
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  auto peer = std::make_unique<Llama>();
  llama_model_params model_params = llama_model_default_params();
  model_params.n_gpu_layers = 0;
  peer->model = llama_model_load_from_file(path.c_str(), model_params);
  if (peer->model == nullptr) return Status(Code::kCorrupt, "[peer llama] the model does not load: " + path);
  llama_context_params params = llama_context_default_params();
  params.n_ctx = uint32_t(n_context * sequences);
  params.n_seq_max = uint32_t(sequences);
  params.n_batch = params.n_ubatch = 512;
  params.n_threads = params.n_threads_batch = threads;
  params.type_k = params.type_v = type;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.no_perf = true;
  peer->context = llama_init_from_model(peer->model, params);
  if (peer->context == nullptr) return Status(Code::kInvalidArgument, "[peer llama] no context of that size");
  ggml_threadpool_params pool_params = ggml_threadpool_params_default(threads);
  pool_params.poll = 0;  // an idle pool must not take a core from the other side
  peer->pool = ggml_threadpool_new(&pool_params);
  llama_attach_threadpool(peer->context, peer->pool, peer->pool);
  return std::unique_ptr<LlamaPeer>(std::move(peer));
}

}  // namespace pagedkv::bench
