// The model files and texts that the engine's tests read.
#pragma once

#include <unistd.h>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace pagedkv::engine {

// The tiny models of make_gguf.py, written when the tests were built.
inline const char* const kTinyModels[] = {
    "d64_gqa3_tied",         "d64_gqa1_untied",          "d80_gqa1_untied",
    "d128_gqa4_linear",      "d64_gqa7_llama3",          "d64_gqa4_yarn",
    "d64_gqa3_none",         "d64_gqa4_biases",          "qwen2_d64_gqa7_tied",
    "qwen2_d64_gqa2_untied", "qwen3_d128_gqa2",          "qwen3_d64_yarn",
    "gemma3_window8",        "gemma3_window16_pattern3", "gemma3_window11_listed",
    "gemma3_window40_all",   "gemma3_no_window",
};
inline std::string tiny_model(std::string_view name) {
  return std::string(PAGEDKV_TINY_MODELS) + "/" + std::string(name) + ".gguf";
}

// SmolLM2-135M-Instruct Q4_1: PAGEDKV_TEST_MODEL, else where tools/model keeps it. Empty when it is not there.
inline std::string smollm2() {
  const char* named = std::getenv("PAGEDKV_TEST_MODEL");
  const std::string path = named ? named : PAGEDKV_SMOLLM2;
  return std::filesystem::is_regular_file(path) ? path : "";
}

// Gemma 3 270M Q4_K_M: PAGEDKV_TEST_GEMMA3, else beside SmolLM2, where tools/model keeps it. Empty when not there.
inline std::string gemma3() {
  const char* named = std::getenv("PAGEDKV_TEST_GEMMA3");
  const auto folder = std::filesystem::path(PAGEDKV_SMOLLM2).parent_path();
  const std::string path = named ? named : (folder / "gemma-3-270m-q4_k_m.gguf").string();
  return std::filesystem::is_regular_file(path) ? path : "";
}

// WikiText-2: PAGEDKV_TEST_TEXT, else beside the checkout. Empty when it is not there.
inline std::string test_text() {
  const char* named = std::getenv("PAGEDKV_TEST_TEXT");
  std::ifstream file(named ? named : PAGEDKV_SOURCE_DIR "/../shared/data/wikitext-2-raw/wiki.test.raw");
  return std::string(std::istreambuf_iterator<char>(file), {});
}

using Contents = std::vector<std::byte>;

inline Contents read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  Contents out(text.size());
  std::memcpy(out.data(), text.data(), text.size());
  return out;
}

// A file of the test's own, removed with the object.
class TemporaryFile {
 public:
  explicit TemporaryFile(std::span<const std::byte> contents)
      : path_((std::filesystem::temp_directory_path() /
               ("pagedkv-test-" + std::to_string(getpid()) + "-" + std::to_string(next_++) + ".gguf"))
                  .string()) {
    std::ofstream(path_, std::ios::binary)
        .write(reinterpret_cast<const char*>(contents.data()), static_cast<std::streamsize>(contents.size()));
  }
  ~TemporaryFile() { std::filesystem::remove(path_); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  static inline int next_ = 0;
  std::string path_;
};

// Where `text` lies in the file; the first place.
inline size_t find_in(const Contents& file, std::string_view text) {
  const std::string_view all(reinterpret_cast<const char*>(file.data()), file.size());
  return all.find(text);
}

// Overwrites the scalar value of a metadata key. Behind the key's letters come its type, 4 bytes, and the value.
template <class T>
void set_key(Contents& file, std::string_view key, T value) {
  std::memcpy(file.data() + find_in(file, key) + key.size() + 4, &value, sizeof value);
}

// The fields of a tensor's entry: behind its name come n_dims u32, ne i64 each, type u32, offset u64.
struct TensorEntry {
  size_t at;
  int n_dims;
  size_t ne(int d) const { return at + 4 + 8 * size_t(d); }
  size_t type() const { return ne(n_dims); }
  size_t offset() const { return type() + 4; }
};
inline TensorEntry entry_of(const Contents& file, std::string_view tensor) {
  const size_t at = find_in(file, tensor) + tensor.size();
  uint32_t n_dims = 0;
  std::memcpy(&n_dims, file.data() + at, sizeof n_dims);
  return {at, int(n_dims)};
}
template <class T>
void overwrite(Contents& file, size_t at, T value) {
  std::memcpy(file.data() + at, &value, sizeof value);
}

}  // namespace pagedkv::engine
