#include "engine/gguf_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace pagedkv::engine {
namespace {

constexpr uint32_t kOldestVersion = 2;
constexpr uint32_t kNewestVersion = 3;
constexpr int64_t kMaxKeyBytes = 65535;                     // the format's own limit
constexpr int64_t kMaxEntries = 1 << 20;                    // keys or tensors; real files have hundreds
constexpr int64_t kMaxAlignment = 1 << 20;                  // real files use 32
constexpr int64_t kMinKeyValueBytes = 8 + 1 + 4 + 1;        // length, one letter, type, one byte
constexpr int64_t kMinTensorBytes = 8 + 1 + 4 + 8 + 4 + 8;  // length, one letter, n_dims, ne[0], type, offset

// Bytes of one scalar; 0 for strings, arrays and unknown types.
int64_t scalar_bytes(GgufType type) {
  switch (type) {
    case GgufType::kU8:
    case GgufType::kI8:
    case GgufType::kBool:
      return 1;
    case GgufType::kU16:
    case GgufType::kI16:
      return 2;
    case GgufType::kU32:
    case GgufType::kI32:
    case GgufType::kF32:
      return 4;
    case GgufType::kU64:
    case GgufType::kI64:
    case GgufType::kF64:
      return 8;
    case GgufType::kString:
    case GgufType::kArray:
      break;
  }
  return 0;
}

template <class T>
T load(const std::byte* from) {  // the format is little-endian, and so are the machines we build for
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Text of an untrusted file inside a message: printable and short.
std::string quoted(std::string_view text) {
  constexpr size_t kMost = 80;
  std::string out = "'";
  for (char c : text.substr(0, kMost)) out += std::isprint(static_cast<unsigned char>(c)) ? c : '?';
  return out + (text.size() > kMost ? "...'" : "'");
}

Status corrupt(std::string message) { return Status(Code::kCorrupt, std::move(message)); }

Result<std::optional<int64_t>> as_integer(const GgufValue& value, std::string_view key) {
  const std::byte* p = value.bytes.data();
  switch (value.type) {
    case GgufType::kU8:
      return std::optional<int64_t>(load<uint8_t>(p));
    case GgufType::kI8:
      return std::optional<int64_t>(load<int8_t>(p));
    case GgufType::kU16:
      return std::optional<int64_t>(load<uint16_t>(p));
    case GgufType::kI16:
      return std::optional<int64_t>(load<int16_t>(p));
    case GgufType::kU32:
      return std::optional<int64_t>(load<uint32_t>(p));
    case GgufType::kI32:
      return std::optional<int64_t>(load<int32_t>(p));
    case GgufType::kI64:
      return std::optional<int64_t>(load<int64_t>(p));
    case GgufType::kU64: {
      const uint64_t wide = load<uint64_t>(p);
      if (wide > uint64_t(std::numeric_limits<int64_t>::max())) {
        return corrupt("key " + quoted(key) + " is " + std::to_string(wide) + ", more than any count can be");
      }
      return std::optional<int64_t>(int64_t(wide));
    }
    default:
      return corrupt("key " + quoted(key) + " must be an integer, but is of type " + gguf_type_name(value.type));
  }
}

}  // namespace

const char* gguf_type_name(GgufType type) {
  static constexpr const char* kNames[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                           "bool", "string", "array", "u64", "i64", "f64"};
  const auto index = uint32_t(type);
  return index < std::size(kNames) ? kNames[index] : "unknown";
}

std::string shape_text(std::span<const int64_t> ne) {
  std::string out = "[";
  for (size_t i = 0; i < ne.size(); ++i) out += (i ? ", " : "") + std::to_string(ne[i]);
  return out + "]";
}

// Reads the header front to back. Every read is checked against the end of the file; after a failed one `status` is
// set and the rest of the header is not looked at.
class GgufFile::Parser {
 public:
  explicit Parser(GgufFile& file) : file_(file), size_(int64_t(file.bytes_.size())) {}

  Status run() {
    if (Status s = preamble(); !s.ok()) return s;
    for (int64_t i = 0; i < n_keys_; ++i) {
      if (Status s = key_value(i); !s.ok()) return s;
    }
    if (Status s = read_alignment(); !s.ok()) return s;
    if (Status s = refuse_split(); !s.ok()) return s;
    for (int64_t i = 0; i < n_tensors_; ++i) {
      if (Status s = tensor(i); !s.ok()) return s;
    }
    return place_tensors();
  }

 private:
  int64_t left() const { return size_ - at_; }

  Status truncated(const std::string& what, int64_t need) const {
    return corrupt("the file ends inside " + what + ": expected " + std::to_string(need) + " bytes at offset " +
                   std::to_string(at_) + ", found " + std::to_string(left()) + " (file of " +
                   std::to_string(size_) + " bytes)");
  }

  template <class T>
  Status read(T* to, const std::string& what) {
    if (left() < int64_t(sizeof(T))) return truncated(what, sizeof(T));
    *to = load<T>(file_.bytes_.data() + at_);
    at_ += sizeof(T);
    return Status();
  }

  // A length-prefixed string, left in the file.
  Status read_string(std::string_view* to, const std::string& what) {
    uint64_t length = 0;
    if (Status s = read(&length, "the length of " + what); !s.ok()) return s;
    if (length > uint64_t(left())) {
      return corrupt(what + " claims " + std::to_string(length) + " bytes at offset " + std::to_string(at_) +
                     ", but the file has only " + std::to_string(left()) + " left");
    }
    *to = std::string_view(reinterpret_cast<const char*>(file_.bytes_.data() + at_), size_t(length));
    at_ += int64_t(length);
    return Status();
  }

  Status preamble() {
    if (size_ == 0) return corrupt("the file is empty");
    if (size_ < 4) return truncated("the magic", 4);
    if (std::memcmp(file_.bytes_.data(), "GGUF", 4) != 0) {
      const std::string_view magic(reinterpret_cast<const char*>(file_.bytes_.data()), 4);
      return corrupt("not a GGUF file: it begins with " + quoted(magic) + ", expected 'GGUF'");
    }
    at_ = 4;
    if (Status s = read(&file_.version_, "the version"); !s.ok()) return s;
    const uint32_t version = file_.version_;
    if (version != 0 && (version & 0xffff) == 0) {
      return Status(Code::kUnsupported, "a big-endian GGUF file (version reads as " + std::to_string(version) +
                                            "); only little-endian files are supported");
    }
    if (version < kOldestVersion || version > kNewestVersion) {
      return Status(Code::kUnsupported, "GGUF version " + std::to_string(version) + "; versions " +
                                            std::to_string(kOldestVersion) + " and " +
                                            std::to_string(kNewestVersion) + " are supported");
    }
    uint64_t n_tensors = 0, n_keys = 0;
    if (Status s = read(&n_tensors, "the tensor count"); !s.ok()) return s;
    if (Status s = read(&n_keys, "the key count"); !s.ok()) return s;
    if (Status s = fits(n_tensors, kMinTensorBytes, "tensors"); !s.ok()) return s;
    if (Status s = fits(n_keys, kMinKeyValueBytes, "keys"); !s.ok()) return s;
    n_tensors_ = int64_t(n_tensors);
    n_keys_ = int64_t(n_keys);
    return Status();
  }

  // Refuses counts that the rest of the file cannot hold, so that no allocation follows an invented number.
  Status fits(uint64_t count, int64_t least_bytes, const std::string& what) const {
    const uint64_t most = uint64_t(std::min(left() / least_bytes, kMaxEntries));
    if (count <= most) return Status();
    return corrupt("the header promises " + std::to_string(count) + " " + what + ", but a file of " +
                   std::to_string(size_) + " bytes has room for at most " + std::to_string(most));
  }

  Status key_value(int64_t index) {
    const std::string nth = "key " + std::to_string(index) + " of " + std::to_string(n_keys_);
    std::string_view key;
    if (Status s = read_string(&key, nth); !s.ok()) return s;
    if (key.empty() || int64_t(key.size()) > kMaxKeyBytes) {
      return corrupt("the name of " + nth + " has " + std::to_string(key.size()) + " bytes, allowed are 1 to " +
                     std::to_string(kMaxKeyBytes));
    }
    const std::string name = "key " + quoted(key);
    GgufValue value;
    if (Status s = read_type(&value.type, name); !s.ok()) return s;
    value.element_type = value.type;
    if (value.type == GgufType::kArray) {
      uint64_t count = 0;
      if (Status s = read_type(&value.element_type, name); !s.ok()) return s;
      if (value.element_type == GgufType::kArray) {
        return Status(Code::kUnsupported, name + " is an array of arrays; only flat arrays are supported");
      }
      if (Status s = read(&count, "the length of " + name); !s.ok()) return s;
      const int64_t each = std::max<int64_t>(scalar_bytes(value.element_type), 1);
      const int64_t least = value.element_type == GgufType::kString ? 8 : each;
      if (count > uint64_t(left() / least)) {
        return corrupt(name + " claims " + std::to_string(count) + " elements of type " +
                       gguf_type_name(value.element_type) + ", but the file has only " + std::to_string(left()) +
                       " bytes left");
      }
      value.count = int64_t(count);
    }
    const int64_t begin = at_;
    if (value.element_type == GgufType::kString) {
      std::string_view ignored;
      for (int64_t i = 0; i < value.count; ++i) {
        if (left() < 8) return truncated("string " + std::to_string(i) + " of " + name, 8);
        if (Status s = read_string(&ignored, "a string of " + name); !s.ok()) return s;
      }
    } else {
      const int64_t n_bytes = value.count * scalar_bytes(value.element_type);  // bounded by left() above, or 8
      if (n_bytes > left()) return truncated(name, n_bytes);
      at_ += n_bytes;
    }
    value.bytes = file_.bytes_.subspan(size_t(begin), size_t(at_ - begin));
    if (value.element_type == GgufType::kBool) {
      for (std::byte b : value.bytes) {
        if (std::to_integer<int>(b) > 1) {
          return corrupt(name + " holds " + std::to_string(std::to_integer<int>(b)) +
                         " as a bool, expected 0 or 1");
        }
      }
    }
    if (!file_.values_.emplace(key, value).second) return corrupt(name + " appears twice");
    return Status();
  }

  Status read_type(GgufType* to, const std::string& name) {
    uint32_t type = 0;
    if (Status s = read(&type, "the type of " + name); !s.ok()) return s;
    if (type > uint32_t(GgufType::kF64)) {
      return corrupt(name + " has value type " + std::to_string(type) + ", known are 0 to 12");
    }
    *to = GgufType(type);
    return Status();
  }

  Status read_alignment() {
    const GgufValue* value = file_.find("general.alignment");
    if (!value) return Status();
    if (value->type != GgufType::kU32) {
      return corrupt(std::string("key 'general.alignment' must be of type u32, but is ") +
                     gguf_type_name(value->type));
    }
    const int64_t alignment = load<uint32_t>(value->bytes.data());
    // Eight at least: the format says so, and kernels read 8-byte words of the mapped weights.
    if (alignment < 8 || alignment > kMaxAlignment || (alignment & (alignment - 1)) != 0) {
      return corrupt("key 'general.alignment' is " + std::to_string(alignment) +
                     ", expected a power of two from 8 to " + std::to_string(kMaxAlignment));
    }
    file_.alignment_ = alignment;
    return Status();
  }

  Status refuse_split() {
    auto count = file_.integer("split.count");
    if (!count.ok()) return count.status();
    if (count->value_or(0) <= 1) return Status();
    return Status(Code::kUnsupported, "the file is one part of a model split in " + std::to_string(**count) +
                                          " files (key 'split.count'); only whole models are supported: join the "
                                          "parts with `llama-gguf-split --merge`");
  }

  Status tensor(int64_t index) {
    const std::string nth = "tensor " + std::to_string(index) + " of " + std::to_string(n_tensors_);
    std::string_view name;
    if (Status s = read_string(&name, "the name of " + nth); !s.ok()) return s;
    if (name.empty() || name.size() >= GGML_MAX_NAME || name.find('\0') != std::string_view::npos) {
      return corrupt("the name of " + nth + " has " + std::to_string(name.size()) + " bytes, allowed are 1 to " +
                     std::to_string(GGML_MAX_NAME - 1) + " without zeros");
    }
    const std::string what = "tensor " + quoted(name);
    GgufTensor t;
    t.name = name;
    uint32_t n_dims = 0;
    if (Status s = read(&n_dims, "the dimensions of " + what); !s.ok()) return s;
    if (n_dims < 1 || n_dims > 4) {
      return corrupt(what + " has " + std::to_string(n_dims) + " dimensions, expected 1 to 4");
    }
    t.n_dims = int(n_dims);
    for (int d = 0; d < t.n_dims; ++d) {
      if (Status s = read(&t.ne[d], "the shape of " + what); !s.ok()) return s;
    }
    const std::string shape = shape_text({t.ne, n_dims});
    int64_t n_elements = 1;
    for (int d = 0; d < t.n_dims; ++d) {
      if (t.ne[d] <= 0) return corrupt(what + " has shape " + shape + ", every dimension must be at least 1");
      if (__builtin_mul_overflow(n_elements, t.ne[d], &n_elements)) {
        return corrupt(what + " has shape " + shape + ", whose element count does not fit 63 bits");
      }
    }
    uint32_t type = 0;
    if (Status s = read(&type, "the type of " + what); !s.ok()) return s;
    // Numbers of removed types stay reserved in ggml, with a block size of zero.
    if (type >= GGML_TYPE_COUNT || ggml_blck_size(ggml_type(type)) == 0) {
      return corrupt(what + " has data type " + std::to_string(type) + ", which ggml does not know");
    }
    t.type = ggml_type(type);
    const int64_t block = ggml_blck_size(t.type);
    if (t.ne[0] % block != 0) {
      return corrupt(what + " has rows of " + std::to_string(t.ne[0]) + " elements, not a multiple of the " +
                     std::to_string(block) + " that type " + ggml_type_name(t.type) + " packs together");
    }
    if (__builtin_mul_overflow(n_elements / block, int64_t(ggml_type_size(t.type)), &t.n_bytes)) {
      return corrupt(what + " has shape " + shape + ", whose bytes do not fit 63 bits");
    }
    uint64_t offset = 0;
    if (Status s = read(&offset, "the offset of " + what); !s.ok()) return s;
    if (offset % uint64_t(file_.alignment_) != 0) {
      return corrupt(what + " has offset " + std::to_string(offset) + ", not a multiple of the alignment " +
                     std::to_string(file_.alignment_));
    }
    if (offset > uint64_t(std::numeric_limits<int64_t>::max() / 2)) {
      return corrupt(what + " has offset " + std::to_string(offset) + " in a file of " + std::to_string(size_) +
                     " bytes");
    }
    t.offset = int64_t(offset);  // from the start of the data, until place_tensors()
    file_.tensors_.push_back(std::move(t));
    return Status();
  }

  // The data begin behind the header, aligned; only now is it known where.
  Status place_tensors() {
    const int64_t align = file_.alignment_;
    file_.data_offset_ = (at_ + align - 1) / align * align;
    for (size_t i = 0; i < file_.tensors_.size(); ++i) {
      GgufTensor& t = file_.tensors_[i];
      t.offset += file_.data_offset_;
      if (t.offset > size_ || t.n_bytes > size_ - t.offset) {
        return corrupt("tensor " + quoted(t.name) + " ends past the file: expected " + std::to_string(t.n_bytes) +
                       " bytes at offset " + std::to_string(t.offset) + ", found " +
                       std::to_string(std::max<int64_t>(size_ - t.offset, 0)) + " (file of " +
                       std::to_string(size_) + " bytes)");
      }
      if (!file_.tensor_index_.emplace(t.name, i).second) {
        return corrupt("tensor " + quoted(t.name) + " appears twice");
      }
    }
    file_.data_offset_ = std::min(file_.data_offset_, size_);
    return Status();
  }

  GgufFile& file_;
  const int64_t size_;
  int64_t at_ = 0;
  int64_t n_tensors_ = 0;
  int64_t n_keys_ = 0;
};

Result<std::shared_ptr<const GgufFile>> GgufFile::parse(std::span<const std::byte> bytes, std::string name,
                                                        bool mapped) {
  std::shared_ptr<GgufFile> file(new GgufFile);
  file->path_ = std::move(name);
  file->bytes_ = bytes;
  file->mapped_ = mapped;
  if (Status s = Parser(*file).run(); !s.ok()) return Status(s.code(), file->path_ + ": " + s.message());
  return std::shared_ptr<const GgufFile>(std::move(file));
}

Result<std::shared_ptr<const GgufFile>> GgufFile::parse(std::span<const std::byte> bytes, std::string name) {
  return parse(bytes, std::move(name), false);
}

Result<std::shared_ptr<const GgufFile>> GgufFile::open(const std::string& path) {
  // O_NONBLOCK: a pipe must be refused, not waited for.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const int error = errno;
    const bool missing = error == ENOENT || error == ENOTDIR || error == ENAMETOOLONG;
    return Status(missing ? Code::kNotFound : Code::kUnavailable, path + ": " + std::strerror(error));
  }
  struct stat info = {};
  Status problem;
  if (fstat(fd, &info) != 0) {
    problem = Status(Code::kUnavailable, path + ": " + std::strerror(errno));
  } else if (S_ISDIR(info.st_mode)) {
    problem = invalid_argument(path + ": is a directory, expected a GGUF file");
  } else if (!S_ISREG(info.st_mode)) {
    problem = invalid_argument(path + ": is not a regular file, expected a GGUF file");
  } else if (info.st_size == 0) {
    problem = corrupt(path + ": the file is empty");
  }
  if (!problem.ok()) {
    ::close(fd);
    return problem;
  }
  const auto size = size_t(info.st_size);
  void* base = mmap(nullptr, size, PROT_READ, MAP_SHARED, fd, 0);
  const int error = errno;
  ::close(fd);  // the mapping keeps the file
  if (base == MAP_FAILED) {
    return Status(error == ENOMEM ? Code::kNoMemory : Code::kUnavailable,
                  path + ": mapping " + std::to_string(size) + " bytes: " + std::strerror(error));
  }
  return parse({static_cast<const std::byte*>(base), size}, path, true);
}

GgufFile::~GgufFile() {
  if (mapped_) munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
}

const GgufValue* GgufFile::find(std::string_view key) const {
  const auto it = values_.find(key);
  return it == values_.end() ? nullptr : &it->second;
}

const GgufTensor* GgufFile::tensor(std::string_view name) const {
  const auto it = tensor_index_.find(name);
  return it == tensor_index_.end() ? nullptr : &tensors_[it->second];
}

Result<std::optional<int64_t>> GgufFile::integer(std::string_view key) const {
  const GgufValue* value = find(key);
  return value ? as_integer(*value, key) : std::optional<int64_t>();
}

Result<std::optional<double>> GgufFile::real(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<double>();
  double number = 0;
  if (value->type == GgufType::kF32) {
    number = load<float>(value->bytes.data());
  } else if (value->type == GgufType::kF64) {
    number = load<double>(value->bytes.data());
  } else {
    return corrupt("key " + quoted(key) + " must be a float, but is of type " + gguf_type_name(value->type));
  }
  if (!std::isfinite(number)) {
    return corrupt("key " + quoted(key) + " is " + std::to_string(number) + ", expected a finite number");
  }
  return std::optional<double>(number);
}

Result<std::optional<bool>> GgufFile::boolean(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<bool>();
  if (value->type != GgufType::kBool) {
    return corrupt("key " + quoted(key) + " must be a bool, but is of type " + gguf_type_name(value->type));
  }
  return std::optional<bool>(value->bytes[0] != std::byte{0});
}

Result<std::optional<std::vector<bool>>> GgufFile::flags(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::kArray) return std::optional<std::vector<bool>>();
  const bool bools = value->element_type == GgufType::kBool;
  if (!bools && value->element_type != GgufType::kU32 && value->element_type != GgufType::kI32) {
    return corrupt("key " + quoted(key) + " must be an array of bool, u32 or i32, but its elements are of type " +
                   gguf_type_name(value->element_type));
  }
  std::vector<bool> out;
  const std::byte* at = value->bytes.data();  // as many as `count`, checked when the file was opened
  for (int64_t i = 0; i < value->count; ++i, at += bools ? 1 : 4) {
    out.push_back(bools ? *at != std::byte{0} : load<uint32_t>(at) != 0);
  }
  return std::optional<std::vector<bool>>(std::move(out));
}

std::vector<std::string_view> GgufFile::strings(std::string_view key) const {
  std::vector<std::string_view> out;
  const GgufValue* value = find(key);
  if (!value || value->type != GgufType::kArray || value->element_type != GgufType::kString) return out;
  out.reserve(size_t(value->count));
  const std::byte* at = value->bytes.data();  // lengths were checked when the file was opened
  for (int64_t i = 0; i < value->count; ++i) {
    const auto n = size_t(load<uint64_t>(at));
    out.emplace_back(reinterpret_cast<const char*>(at + 8), n);
    at += 8 + n;
  }
  return out;
}

Result<std::optional<std::string>> GgufFile::text(std::string_view key) const {
  const GgufValue* value = find(key);
  if (!value) return std::optional<std::string>();
  if (value->type != GgufType::kString) {
    return corrupt("key " + quoted(key) + " must be a string, but is of type " + gguf_type_name(value->type));
  }
  const auto* letters = reinterpret_cast<const char*>(value->bytes.data());
  return std::optional<std::string>(std::string(letters + 8, value->bytes.size() - 8));
}

}  // namespace pagedkv::engine
