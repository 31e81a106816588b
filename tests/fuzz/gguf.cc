// Any bytes as a model file: parse() refuses them with a Status, or all it offers lies inside them and ggml's own
// reader takes them without aborting.
#include <gguf.h>

#include <cstdint>
#include <cstdlib>

#include "engine/gguf_file.h"
#include "tests/fuzz/require.h"

namespace {

using pagedkv::engine::GgufFile;

template <class T>
bool inside(std::span<const T> part, std::span<const std::byte> whole) {
  const auto* begin = reinterpret_cast<const std::byte*>(part.data());
  return part.empty() || (begin >= whole.data() && begin + part.size() <= whole.data() + whole.size());
}

void read_keys(const GgufFile& file) {
  for (const char* key : {"general.architecture", "general.alignment", "general.name", "split.count", "n", "x",
                          "tokenizer.ggml.tokens", "llama.rope.freq_base", "a.flag"}) {
    (void)file.integer(key);
    (void)file.real(key);
    (void)file.boolean(key);
    (void)file.text(key);
    for (std::string_view text : file.strings(key)) require(inside(std::span(text), file.bytes()));
    if (const auto* value = file.find(key)) require(inside(value->bytes, file.bytes()));
  }
}

void read_tensors(const GgufFile& file) {
  for (const auto& tensor : file.tensors()) {
    require(file.tensor(tensor.name) == &tensor);
    require(tensor.offset >= file.data_offset() && tensor.offset % file.alignment() == 0 && tensor.n_bytes > 0);
    const std::span<const std::byte> data = file.data(tensor);
    require(inside(data, file.bytes()) && int64_t(data.size()) == tensor.n_bytes);
    (void)pagedkv::engine::shape_text(tensor.ne);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const bool quiet = [] {
    ggml_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
    return true;
  }();
  (void)quiet;
  const auto file = GgufFile::parse(std::as_bytes(std::span(data, size)), "fuzz");
  if (!file.ok()) {
    require(file.status().message().starts_with("fuzz: "));
    return 0;
  }
  read_keys(**file);
  read_tensors(**file);
  gguf_free(gguf_init_from_buffer(data, size, {.no_alloc = true, .ctx = nullptr}));  // null: refused, which is fine
  return 0;
}
