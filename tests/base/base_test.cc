// The environment, keys.

#include <gtest/gtest.h>

#include <cstdlib>

#include "base/env.h"
#include "base/hash.h"
#include "pagedkv/format.h"
#include "pagedkv/log.h"
#include "pagedkv/paged_kv_cache.h"

namespace pagedkv {
namespace {

class Environment : public testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"PAGEDKV_QUANT", "MTPLX_VLLM_METAL_PAGED_KV_QUANT", "MTPLX_PAGED_KV_QUANT",
                             "PAGEDKV_DYNAMIC", "MTPLX_DYNAMIC_PAGED_KV"})
      unsetenv(name);
  }
  void set(const char* name, const char* value) { setenv(name, value, 1); }
};

TEST_F(Environment, OursComesBeforeTheArticlesNamesAndEmptyCountsAsUnset) {
  set("MTPLX_PAGED_KV_QUANT", "q4");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ4);
  set("MTPLX_VLLM_METAL_PAGED_KV_QUANT", "int8");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ8);
  set("PAGEDKV_QUANT", "q6");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ6);
  set("PAGEDKV_QUANT", "");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ8);
}

TEST_F(Environment, ASpellingOfAnotherFormatElsewhereGivesOneNotice) {
  int notices = 0;
  set_log_sink([&](std::string_view) { ++notices; });
  set("PAGEDKV_QUANT", "q8_0");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ8);
  EXPECT_EQ(notices, 1);
  set("PAGEDKV_QUANT", "q8");
  EXPECT_EQ(kv_quant_from_env()->k, Format::kQ8);
  EXPECT_EQ(notices, 1);
  set_log_sink({});
}

TEST_F(Environment, AnUnknownModeNamesTheVariableTheValueAndTheModes) {
  set("PAGEDKV_QUANT", "q5");
  const std::string text = kv_quant_from_env().status().message();
  for (const char* word : {"PAGEDKV_QUANT", "q5", "q8", "q6", "q4", "off"})
    EXPECT_NE(text.find(word), std::string::npos) << text;
}

TEST_F(Environment, SwitchesTakeTheUsualWordsAndNothingElse) {
  for (const char* yes : {"1", "true", "YES", "On"}) {
    set("MTPLX_DYNAMIC_PAGED_KV", yes);
    EXPECT_TRUE(paged_kv_options_from_env({.dynamic = false})->dynamic);
  }
  set("PAGEDKV_DYNAMIC", "off");
  EXPECT_FALSE(paged_kv_options_from_env()->dynamic);
  set("PAGEDKV_DYNAMIC", "maybe");
  const std::string text = paged_kv_options_from_env().status().message();
  for (const char* word : {"PAGEDKV_DYNAMIC", "maybe", "true", "off"})
    EXPECT_NE(text.find(word), std::string::npos) << text;
}

TEST(Key, ChainsOverFullWidthTokensAndEverythingAbove) {
  const Key root = root_key(sha256("model"), "tenant");
  EXPECT_NE(root, root_key(sha256("model"), "tenant2"));
  const int32_t a[] = {1, 2}, b[] = {1, 2 + 65536};
  EXPECT_NE(chain_key(root, a), chain_key(root, b));
  EXPECT_NE(chain_key(root, a), chain_key(root_key(sha256("other"), "tenant"), a));
  EXPECT_EQ(chain_key(root, a), chain_key(root, a));
}

std::string hex(const Key& key) {
  std::string text;
  for (const uint8_t byte : key.bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// Python: hmac.new(hashlib.sha256(salt).digest(), bytes(range(32)), hashlib.sha256).hexdigest()
TEST(Key, TheSaltEntersAsHmac) {
  Key descriptor;
  for (size_t i = 0; i < descriptor.bytes.size(); ++i) descriptor.bytes[i] = uint8_t(i);
  EXPECT_EQ(hex(root_key(descriptor, "")), "c8f5b23c34d49694d6963612e906f004223f69e5f8ea9abc16cf22a997286d8c");
  EXPECT_EQ(hex(root_key(descriptor, "tenant")),
            "2fdb3fd9d6cd8b066fd3af9fc2486e60b9b332bc44fa8d167f97a78a42354d9c");
  EXPECT_EQ(hex(root_key(descriptor, std::string_view("tenant\0", 7))),
            "0de62b163388180a7037c806cd0c38570f3fa27a037821fe9d6a7b4124a037ba");
}

}  // namespace
}  // namespace pagedkv
