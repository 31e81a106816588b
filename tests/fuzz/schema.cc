// A JSON schema is refused with the field that is wrong, or its grammar is read, and answers drawn from it are
// JSON.
#include <algorithm>
#include <cstdint>
#include <string>

#include "server/json_grammar.h"
#include "tests/fuzz/require.h"
#include "tests/server/random_answer.h"

namespace {

using namespace pagedkv;
using namespace pagedkv::server;

constexpr size_t kMostBytes = 50'000;  // of a grammar from which answers are drawn: larger ones take long

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  if (size == 0) return 0;
  std::mt19937 random(bytes[size - 1]);
  int depth = 0;
  const auto deep = [&](int at, OrderedJson::parse_event_t, OrderedJson&) {
    depth = std::max(depth, at);
    return depth <= kMaxJsonDepth;
  };
  const OrderedJson schema = OrderedJson::parse(bytes, bytes + size - 1, deep, false);
  if (schema.is_discarded() || depth > kMaxJsonDepth) return 0;
  const auto text = schema_grammar(schema, "schema");
  if (!text.ok()) {
    require(text.error().status == 400 && !text.error().message.empty());
    require(text.error().param.starts_with("schema") && text.error().message.size() < 1000);
    return 0;
  }
  const auto grammar = engine::Grammar::parse(*text);
  require(grammar.ok());
  if (text->size() > kMostBytes) return 0;
  for (int i = 0; i < 3; ++i)
    if (const auto answer = random_answer(*grammar, random, 40, 200)) require(Json::accept(*answer));
  return 0;
}
