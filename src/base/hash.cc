#include "base/hash.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <bit>

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

}  // namespace

Key sha256(std::string_view bytes) {
  Sha256& hash = thread_hash();
  hash.begin();
  hash.add(bytes.data(), bytes.size());
  return hash.end();
}

Key root_key(const Key& descriptor, std::string_view salt) {
  const Key secret = sha256(salt);  // HMAC pads short keys with zeros: of one length they cannot meet
  Key key;
  PKV_CHECK(HMAC(EVP_sha256(), secret.bytes.data(), int(secret.bytes.size()), descriptor.bytes.data(),
                 descriptor.bytes.size(), key.bytes.data(), nullptr) != nullptr);
  return key;
}

Key chain_key(const Key& parent, std::span<const int32_t> tokens) {
  Sha256& hash = thread_hash();
  hash.begin();
  hash.add(parent.bytes.data(), parent.bytes.size());
  static_assert(std::endian::native == std::endian::little, "keys are of little-endian token ids");
  hash.add(tokens.data(), tokens.size_bytes());
  return hash.end();
}

}  // namespace pagedkv
