// Broken model files: each is refused with a message that tells what is wrong, none reaches ggml.
#include "engine/gguf_file.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/engine/files.h"

namespace pagedkv::engine {
namespace {

// Writes GGUF headers field by field, right or wrong.
class Header {
 public:
  explicit Header(uint64_t n_tensors = 0, uint64_t n_keys = 0, uint32_t version = 3) {
    for (char c : std::string_view("GGUF")) bytes.push_back(static_cast<std::byte>(c));
    put(version);
    put(n_tensors);
    put(n_keys);
  }
  template <class T>
  Header& put(T value) {
    const auto* from = reinterpret_cast<const std::byte*>(&value);
    bytes.insert(bytes.end(), from, from + sizeof value);
    return *this;
  }
  Header& text(std::string_view s) {
    put<uint64_t>(s.size());
    for (char c : s) bytes.push_back(static_cast<std::byte>(c));
    return *this;
  }
  Header& key(std::string_view name, GgufType type) { return text(name).put(uint32_t(type)); }
  Header& tensor(std::string_view name, const std::vector<int64_t>& ne, uint32_t type, uint64_t offset) {
    text(name).put(uint32_t(ne.size()));
    for (int64_t n : ne) put(n);
    return put(type).put(offset);
  }
  Header& zeros(size_t n) {
    bytes.resize(bytes.size() + n);
    return *this;
  }
  Contents bytes;
};

// The message of a refusal. An acceptance, or a refusal of another kind, fails the test.
std::string refusal(const Contents& bytes, Code code = Code::kCorrupt) {
  auto file = GgufFile::parse(bytes, "test.gguf");
  if (file.ok()) {
    ADD_FAILURE() << "accepted";
    return "";
  }
  EXPECT_EQ(file.status().code(), code) << file.status().message();
  EXPECT_TRUE(file.status().message().starts_with("test.gguf: ")) << file.status().message();
  return file.status().message();
}

void expect_says(const std::string& message, std::initializer_list<std::string_view> parts) {
  for (std::string_view part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "'" << part << "' is not in: " << message;
  }
}

// --- what is right --------------------------------------------------------------------------------------------

TEST(GgufFile, ReadsKeysOfEveryTypeAndTensorsOfAWholeFile) {
  Header h(1, 5);
  h.key("an.integer", GgufType::kU16).put<uint16_t>(7);
  h.key("a.negative", GgufType::kI8).put<int8_t>(-3);
  h.key("a.float", GgufType::kF32).put(0.5f);
  h.key("a.bool", GgufType::kBool).put<uint8_t>(1);
  h.key("a.text", GgufType::kString).text("hello");
  h.tensor("w", {32, 2}, GGML_TYPE_Q8_0, 0);
  h.zeros(32 + 68);
  auto file = GgufFile::parse(h.bytes, "test.gguf");
  ASSERT_TRUE(file.ok()) << file.status().message();
  const GgufFile& f = **file;
  EXPECT_EQ(**f.integer("an.integer"), 7);
  EXPECT_EQ(**f.integer("a.negative"), -3);
  EXPECT_EQ(**f.real("a.float"), 0.5);
  EXPECT_EQ(**f.boolean("a.bool"), true);
  EXPECT_EQ(**f.text("a.text"), "hello");
  EXPECT_FALSE(f.integer("missing")->has_value());
  EXPECT_EQ(f.integer("a.text").status().code(), Code::kCorrupt);
  EXPECT_EQ(f.text("a.float").status().code(), Code::kCorrupt);
  const GgufTensor* w = f.tensor("w");
  ASSERT_TRUE(w);
  EXPECT_EQ(w->n_bytes, 68);  // two rows of one block of 34 bytes
  EXPECT_EQ(w->offset % f.alignment(), 0);
  EXPECT_EQ(f.data(*w).size(), 68u);
}

TEST(GgufFile, OpensEveryTinyModel) {
  for (const char* name : kTinyModels) {
    auto file = GgufFile::open(tiny_model(name));
    ASSERT_TRUE(file.ok()) << file.status().message();
    EXPECT_EQ(**(*file)->text("general.name"), name);
  }
}

// --- files that are none --------------------------------------------------------------------------------------

TEST(GgufFile, RefusesWhatIsNoFile) {
  EXPECT_EQ(GgufFile::open("/nowhere/model.gguf").status().code(), Code::kNotFound);
  EXPECT_EQ(GgufFile::open(tiny_model("d64_gqa3_tied") + "/below").status().code(), Code::kNotFound);
  const Status folder = GgufFile::open("/").status();
  EXPECT_EQ(folder.code(), Code::kInvalidArgument);
  expect_says(folder.message(), {"/", "directory"});
  const Status device = GgufFile::open("/dev/null").status();
  EXPECT_EQ(device.code(), Code::kInvalidArgument);
  const TemporaryFile empty({});
  const Status nothing = GgufFile::open(empty.path()).status();
  EXPECT_EQ(nothing.code(), Code::kCorrupt);
  expect_says(nothing.message(), {empty.path(), "empty"});
}

TEST(GgufFile, RefusesOtherFormatsVersionsAndByteOrders) {
  Contents text(100, std::byte{'x'});
  expect_says(refusal(text), {"not a GGUF file", "'xxxx'"});
  expect_says(refusal(Header(0, 0, 1).bytes, Code::kUnsupported), {"version 1", "2 and 3"});
  expect_says(refusal(Header(0, 0, 4).bytes, Code::kUnsupported), {"version 4"});
  expect_says(refusal(Header(0, 0, 0).bytes, Code::kUnsupported), {"version 0"});
  expect_says(refusal(Header(0, 0, 0x03000000).bytes, Code::kUnsupported), {"big-endian"});
}

TEST(GgufFile, RefusesOnePartOfASplitModel) {
  Header h(0, 1);
  h.key("split.count", GgufType::kU16).put<uint16_t>(3);
  expect_says(refusal(h.bytes, Code::kUnsupported), {"split.count", "3"});
}

// --- truncation -----------------------------------------------------------------------------------------------

TEST(GgufFile, RefusesAFileCutAnywhere) {  // O-LOAD-03
  const Contents whole = read_file(tiny_model("d64_gqa3_tied"));
  std::vector<size_t> cuts;
  for (size_t n = 1; n < 4096; ++n) cuts.push_back(n);
  for (size_t n = 4096; n < whole.size(); n += 65536) cuts.push_back(n);
  cuts.push_back(whole.size() / 2);
  cuts.push_back(whole.size() - 1);
  for (size_t n : cuts) {
    const Contents cut(whole.begin(), whole.begin() + std::ptrdiff_t(n));
    const std::string message = refusal(cut);
    ASSERT_FALSE(message.empty()) << "cut at " << n;
  }
  const Contents half(whole.begin(), whole.begin() + std::ptrdiff_t(whole.size() / 2));
  expect_says(refusal(half), {"tensor '", "expected", "found", std::to_string(half.size())});
}

// --- counts and lengths ---------------------------------------------------------------------------------------

TEST(GgufFile, RefusesCountsThatTheFileCannotHold) {
  for (uint64_t n : {uint64_t{1} << 63, UINT64_MAX, uint64_t{1000000}, uint64_t{2131}}) {
    expect_says(refusal(Header(n, 0).zeros(100).bytes), {std::to_string(n), "tensors"});
    expect_says(refusal(Header(0, n).zeros(100).bytes), {std::to_string(n), "keys"});
  }
}

TEST(GgufFile, RefusesAHeaderThatPromisesMoreTensorsThanThereAre) {  // O-LOAD-03
  Contents file = read_file(tiny_model("d64_gqa3_tied"));
  overwrite<uint64_t>(file, 8, 2131);
  // What follows the last entry is padding and weights, which make no entry.
  ASSERT_FALSE(refusal(file).empty());
}

TEST(GgufFile, RefusesStringsAndArraysLongerThanTheFile) {
  for (uint64_t n : {uint64_t{1000}, UINT64_MAX, uint64_t{1} << 62}) {
    expect_says(refusal(Header(0, 1).put(n).zeros(20).bytes), {"key 0 of 1", std::to_string(n)});
    Header text(0, 1);
    text.key("some.text", GgufType::kString).put(n).zeros(20);
    expect_says(refusal(text.bytes), {"some.text", std::to_string(n)});
    for (GgufType type : {GgufType::kU8, GgufType::kF64, GgufType::kString, GgufType::kBool}) {
      Header array(0, 1);
      array.key("some.array", GgufType::kArray).put(uint32_t(type)).put(n).zeros(20);
      expect_says(refusal(array.bytes), {"some.array", std::to_string(n)});
    }
  }
}

TEST(GgufFile, RefusesKeysThatMakeNoSense) {
  Header nested(0, 1);
  nested.key("a.matrix", GgufType::kArray).put(uint32_t(GgufType::kArray)).put<uint64_t>(1).zeros(64);
  expect_says(refusal(nested.bytes, Code::kUnsupported), {"a.matrix", "array of arrays"});
  Header type(0, 1);
  type.text("odd").put<uint32_t>(13).zeros(20);
  expect_says(refusal(type.bytes), {"'odd'", "13"});
  Header nameless(0, 1);
  nameless.key("", GgufType::kU8).zeros(20);
  expect_says(refusal(nameless.bytes), {"key 0 of 1", "0 bytes"});
  Header twice(0, 2);
  for (int i = 0; i < 2; ++i) twice.key("same", GgufType::kU32).put<uint32_t>(1);
  expect_says(refusal(twice.bytes), {"'same'", "twice"});
  Header boolean(0, 1);
  boolean.key("truth", GgufType::kBool).put<uint8_t>(2);
  expect_says(refusal(boolean.bytes), {"'truth'", "2"});
  Header alignment_type(0, 1);
  alignment_type.key("general.alignment", GgufType::kU64).put<uint64_t>(32);
  expect_says(refusal(alignment_type.bytes), {"general.alignment", "u64"});
  for (uint32_t alignment : {0u, 1u, 4u, 24u, 33u, 0x80000000u}) {
    Header odd(0, 1);
    odd.key("general.alignment", GgufType::kU32).put(alignment);
    expect_says(refusal(odd.bytes), {"general.alignment", std::to_string(alignment)});
  }
}

// --- tensors --------------------------------------------------------------------------------------------------

std::string tensor_refusal(const std::vector<int64_t>& ne, uint32_t type = GGML_TYPE_F32, uint64_t offset = 0) {
  return refusal(Header(1, 0).tensor("some.tensor", ne, type, offset).zeros(4096).bytes);
}

TEST(GgufFile, RefusesZeroNegativeAndOverflowingDimensions) {  // O-LOAD-01
  expect_says(tensor_refusal({4, 0}), {"some.tensor", "[4, 0]", "at least 1"});
  expect_says(tensor_refusal({0}), {"some.tensor", "[0]"});
  expect_says(tensor_refusal({4, -1}), {"some.tensor", "[4, -1]"});
  expect_says(tensor_refusal({int64_t{1} << 32, int64_t{1} << 32}), {"some.tensor", "63 bits"});
  expect_says(tensor_refusal({int64_t{1} << 62}), {"some.tensor", "63 bits"});  // elements fit, bytes do not
  expect_says(tensor_refusal({}), {"some.tensor", "0 dimensions"});
  expect_says(tensor_refusal({1, 1, 1, 1, 1}), {"some.tensor", "5 dimensions"});
}

TEST(GgufFile, RefusesTypesThatGgmlDoesNotKnowAndRowsThatDoNotPack) {
  for (uint32_t type : {4u, 5u, 31u, 36u, uint32_t(GGML_TYPE_COUNT), 1000u, UINT32_MAX}) {
    expect_says(tensor_refusal({32}, type), {"some.tensor", std::to_string(type)});
  }
  expect_says(tensor_refusal({33}, GGML_TYPE_Q8_0), {"some.tensor", "33", "32"});
  expect_says(tensor_refusal({32}, GGML_TYPE_Q4_K), {"some.tensor", "32", "256"});
}

TEST(GgufFile, RefusesTensorsOutsideTheFile) {  // O-LOAD-03
  expect_says(tensor_refusal({2000}), {"some.tensor", "expected 8000 bytes", "found"});
  expect_says(tensor_refusal({4}, GGML_TYPE_F32, 1 << 20), {"some.tensor", "expected 16 bytes", "found 0"});
  expect_says(tensor_refusal({4}, GGML_TYPE_F32, UINT64_MAX - 31), {"some.tensor"});
  expect_says(tensor_refusal({4}, GGML_TYPE_F32, 8), {"some.tensor", "offset 8", "alignment 32"});
}

TEST(GgufFile, RefusesNamesThatGgmlCannotHold) {
  expect_says(refusal(Header(1, 0).tensor(std::string(64, 'n'), {4}, 0, 0).zeros(100).bytes), {"64 bytes", "63"});
  expect_says(refusal(Header(1, 0).tensor("", {4}, 0, 0).zeros(100).bytes), {"tensor 0 of 1"});
  expect_says(refusal(Header(1, 0).tensor(std::string_view("a\0b", 3), {4}, 0, 0).zeros(100).bytes), {"zeros"});
  Header twice(2, 0);
  twice.tensor("same", {4}, 0, 0).tensor("same", {4}, 0, 32).zeros(4096);
  expect_says(refusal(twice.bytes), {"'same'", "twice"});
}

// --- everything else ------------------------------------------------------------------------------------------

TEST(GgufFile, SurvivesAnyDamageToItsHeader) {
  const Contents whole = read_file(tiny_model("d64_gqa3_tied"));
  const size_t header = size_t((*GgufFile::parse(whole, "whole"))->data_offset());
  std::mt19937 random(20260801);
  int refused = 0;
  for (int round = 0; round < 4000; ++round) {
    Contents damaged = whole;
    for (uint32_t i = 0, n = 1 + random() % 4; i < n; ++i) {
      const uint32_t kinds[] = {0, 0xff, 0x80, 0x7f, uint32_t(random() & 0xff)};
      damaged[random() % header] = static_cast<std::byte>(kinds[random() % 5]);
    }
    auto file = GgufFile::parse(damaged, "damaged");
    if (!file.ok()) {
      ++refused;
      EXPECT_FALSE(file.status().message().empty());
      continue;
    }
    // What was accepted is safe to look at.
    for (const GgufTensor& t : (*file)->tensors()) {
      ASSERT_EQ((*file)->data(t).size(), size_t(t.n_bytes));
    }
  }
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace pagedkv::engine
