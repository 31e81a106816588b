// A GGUF model file: mapped read-only, its whole header checked before anything else looks at it.
//
// ggml and libllama abort on some broken headers, so every count, length, type, shape and offset is validated here,
// against the length of the file and before any allocation that depends on it. What passes open() can be handed to
// them. Layout of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pagedkv/status.h"

namespace pagedkv::engine {

// Value types as the format numbers them.
enum class GgufType : uint32_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};
const char* gguf_type_name(GgufType type);

// A metadata value where it lies in the file. Of an array: the type and count of its elements.
struct GgufValue {
  GgufType type = GgufType::kU8;          // kArray for arrays
  GgufType element_type = GgufType::kU8;  // equal to `type` for scalars
  int64_t count = 1;                      // elements of an array, 1 for scalars
  std::span<const std::byte> bytes;       // as in the file; strings with their length prefixes
};

struct GgufTensor {
  std::string name;
  ggml_type type = GGML_TYPE_F32;
  int n_dims = 1;
  int64_t ne[4] = {1, 1, 1, 1};  // ne[0] is contiguous; every one > 0
  int64_t offset = 0;            // from the start of the file
  int64_t n_bytes = 0;
};

// "[576, 49152]"
std::string shape_text(std::span<const int64_t> ne);

// Const members: any thread.
class GgufFile {
 public:
  // Errors: kNotFound, kInvalidArgument (a directory, not a regular file), kUnavailable (the system refuses to
  // read), kCorrupt (names key or tensor, value and limit), kUnsupported (byte order, version, split files).
  static Result<std::shared_ptr<const GgufFile>> open(const std::string& path);
  // The same over bytes in memory, which must outlive the object; `name` stands for the path in messages.
  static Result<std::shared_ptr<const GgufFile>> parse(std::span<const std::byte> bytes, std::string name);
  ~GgufFile();
  GgufFile(const GgufFile&) = delete;
  GgufFile& operator=(const GgufFile&) = delete;

  const std::string& path() const { return path_; }
  uint32_t version() const { return version_; }
  std::span<const std::byte> bytes() const { return bytes_; }  // the whole file
  int64_t data_offset() const { return data_offset_; }         // where tensor data begin; the header is before it
  int64_t alignment() const { return alignment_; }

  // --- metadata. The getters give nullopt when the key is missing, and kCorrupt when it has another type or its
  // value does not fit; integers of any width and sign are accepted for one another.
  const GgufValue* find(std::string_view key) const;
  int64_t n_keys() const { return int64_t(values_.size()); }
  Result<std::optional<int64_t>> integer(std::string_view key) const;
  Result<std::optional<double>> real(std::string_view key) const;
  Result<std::optional<bool>> boolean(std::string_view key) const;
  Result<std::optional<std::string>> text(std::string_view key) const;
  // The elements of an array of bool, u32 or i32 as zero or not. Nullopt also when the key is no array.
  Result<std::optional<std::vector<bool>>> flags(std::string_view key) const;
  // The elements of an array of strings, where they lie in the file. Empty when the key is no such array.
  std::vector<std::string_view> strings(std::string_view key) const;

  // --- tensors
  std::span<const GgufTensor> tensors() const { return tensors_; }
  const GgufTensor* tensor(std::string_view name) const;
  std::span<const std::byte> data(const GgufTensor& tensor) const {
    return bytes_.subspan(size_t(tensor.offset), size_t(tensor.n_bytes));
  }

 private:
  class Parser;
  GgufFile() = default;
  static Result<std::shared_ptr<const GgufFile>> parse(std::span<const std::byte> bytes, std::string name,
                                                       bool mapped);

  std::string path_;
  std::span<const std::byte> bytes_;
  bool mapped_ = false;
  uint32_t version_ = 0;
  int64_t alignment_ = 32;
  int64_t data_offset_ = 0;
  std::unordered_map<std::string_view, GgufValue> values_;  // keys point into the file
  std::vector<GgufTensor> tensors_;
  std::unordered_map<std::string_view, size_t> tensor_index_;
};

}  // namespace pagedkv::engine
