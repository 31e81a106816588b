// Any bytes as the body of a completion request: refused with a status, a bounded message and the field that is
// wrong, or read into prompts that fit the context.
#include <cstdint>
#include <memory>
#include <string>

#include "engine/text.h"
#include "server/completion_request.h"
#include "tests/fuzz/require.h"

namespace {

using namespace pagedkv;
using namespace pagedkv::server;

constexpr size_t kMostMessageBytes = 1000;
constexpr Tokens kContext{256};

const engine::Text& vocabulary(bool few_bytes) {
  static const auto load = [](const char* name) {
    return engine::Text::load(std::string(PAGEDKV_FUZZ_VOCABULARIES "/") + name + ".gguf").value();
  };
  static const std::unique_ptr<engine::Text> all[] = {load("d64_gqa3_tied"), load("bpe_few_bytes")};
  return *all[few_bytes ? 1 : 0];
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return 0;
  const uint8_t choices = bytes[size - 1];
  const auto endpoint = (choices & 1) != 0 ? Endpoint::kChat : Endpoint::kCompletions;
  const engine::Text& text = vocabulary((choices & 2) != 0);
  const std::string body(reinterpret_cast<const char*>(bytes), size - 1);
  const auto read = read_completion(endpoint, body, text, {.models = {"m"}, .context = kContext, .max_choices = 4});
  if (!read.ok()) {
    require(read.error().status >= 400 && read.error().status < 500);
    require(!read.error().message.empty() && read.error().message.size() <= kMostMessageBytes);
    return 0;
  }
  require(!read->prompts.empty());
  for (const engine::ServeRequest& request : read->prompts) {
    require(!request.prompt.empty() && std::ssize(request.prompt) < kContext.n);
    for (const int32_t token : request.prompt) require(token >= 0 && token < text.vocab_size());
    require(request.n >= 1 && request.n <= 4);
  }
  return 0;
}
