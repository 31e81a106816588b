#include "base/hash.h"

#include <openssl/evp.h>

#include "base/check.h"

namespace pagedkv {
namespace {

// One context a thread: fetching the algorithm costs more than hashing a block.
class Sha256 {
 public:
  Sha256() : algorithm_(EVP_MD_fetch(nullptr, "SHA256", nullptr)), context_(EVP_MD_CTX_new()) {
    PKV_CHECK(algorithm_ != nullptr && context_ != nullptr);
  }
  ~Sha256() {
    EVP_MD_CTX_free(context_);
    EVP_MD_free(algorithm_);
  }
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void begin() { PKV_CHECK(EVP_DigestInit_ex2(context_, algorithm_, nullptr) == 1); }
  void add(const void* data, size_t size) { PKV_CHECK(EVP_DigestUpdate(context_, data, size) == 1); }
  Key end() {
    Key key;
    PKV_CHECK(EVP_DigestFinal_ex(context_, key.bytes.data(), nullptr) == 1);
    return key;
  }

 private:
  EVP_MD* algorithm_;
  EVP_MD_CTX* context_;
};

Sha256& thread_hash() {
  thread_local Sha256 hash;
  return hash;
}

// Lengths go in front, so that ("ab", "c") and ("a", "bc") differ.
void add_sized(Sha256& hash, std::string_view text) {
  const uint64_t size = text.size();
  hash.add(&size, sizeof size);
  hash.add(text.data(), text.size());
}

}  // namespace

Key root_key(std::string_view fingerprint, std::string_view name_space) {
  Sha256& hash = thread_hash();
  hash.begin();
  add_sized(hash, "pagedkv root 1");
  add_sized(hash, fingerprint);
  add_sized(hash, name_space);
  return hash.end();
}

Key chain_key(const Key& parent, std::span<const int32_t> tokens) {
  Sha256& hash = thread_hash();
  hash.begin();
  hash.add(parent.bytes.data(), parent.bytes.size());
  hash.add(tokens.data(), tokens.size_bytes());
  return hash.end();
}

}  // namespace pagedkv
