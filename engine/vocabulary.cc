#include "engine/vocabulary.h"

#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace pagedkv::engine {
namespace {

// What libllama assumes where the file says nothing.
struct Kind {
  std::string_view model;
  int64_t bos, eos;
  bool add_bos;  // BPE adds one by default for some pre-tokenizers only; asking for an existing token is harmless
};
constexpr Kind kKinds[] = {
    {.model = "llama", .bos = 1, .eos = 2, .add_bos = true},   // SentencePiece
    {.model = "gpt2", .bos = 11, .eos = 11, .add_bos = true},  // BPE
};

// A token that will be added to every prompt must exist. libllama ignores an id out of range and takes the default.
Status check_added(const GgufFile& file, const std::string& name, bool by_default, int64_t otherwise,
                   int64_t n_tokens) {
  auto add = file.boolean("tokenizer.ggml.add_" + name + "_token");
  if (!add.ok()) return add.status();
  if (!add->value_or(by_default)) return Status();
  const std::string key = "tokenizer.ggml." + name + "_token_id";
  auto id = file.integer(key);
  if (!id.ok()) return id.status();
  const int64_t token = id->value_or(otherwise);
  if (token >= 0 && token < n_tokens) return Status();
  return Status(Code::kCorrupt, "key '" + key + "' is " + std::to_string(token) +
                                    (id->has_value() ? "" : " by default") + ", expected 0 to " +
                                    std::to_string(n_tokens - 1));
}

}  // namespace

Status check_vocabulary(const GgufFile& file) {
  auto model = file.text("tokenizer.ggml.model");
  if (!model.ok()) return model.status();
  if (!model->has_value()) return Status(Code::kCorrupt, "key 'tokenizer.ggml.model' is missing");
  const Kind* kind = nullptr;
  for (const Kind& k : kKinds) {
    if (k.model == **model) kind = &k;
  }
  if (!kind) {
    return Status(Code::kUnsupported, "tokenizer '" + (*model)->substr(0, 40) +
                                          "' (key 'tokenizer.ggml.model'); supported are: llama, gpt2");
  }
  const std::vector<std::string_view> tokens = file.strings("tokenizer.ggml.tokens");
  std::unordered_map<std::string_view, size_t> seen;
  seen.reserve(tokens.size());
  std::vector<std::string> stand_ins;  // libllama's names of empty tokens; they must not clash either
  stand_ins.reserve(tokens.size());
  for (size_t i = 0; i < tokens.size(); ++i) {
    // libllama reads up to the first zero byte.
    std::string_view token = tokens[i].substr(0, tokens[i].find('\0'));
    if (token.empty()) token = stand_ins.emplace_back("[EMPTY_" + std::to_string(i) + "]");
    const auto [first, added] = seen.emplace(token, i);
    if (!added) {
      return Status(Code::kCorrupt, "tokens " + std::to_string(first->second) + " and " + std::to_string(i) +
                                        " of key 'tokenizer.ggml.tokens' are the same");
    }
  }
  const auto n_tokens = int64_t(tokens.size());
  if (Status s = check_added(file, "bos", kind->add_bos, kind->bos, n_tokens); !s.ok()) return s;
  return check_added(file, "eos", false, kind->eos, n_tokens);
}

}  // namespace pagedkv::engine
