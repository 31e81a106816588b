#include "engine/sha256.h"

#include <openssl/evp.h>

namespace pagedkv::engine {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256()
    : context_(std::make_unique<Context>()),
      ok_(context_->evp != nullptr && EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr) == 1) {}
Sha256::~Sha256() = default;

void Sha256::add(const void* data, size_t n) { ok_ = ok_ && EVP_DigestUpdate(context_->evp, data, n) == 1; }

std::optional<PrefixKey> Sha256::finish() {
  PrefixKey key;
  if (!ok_ || EVP_DigestFinal_ex(context_->evp, key.bytes.data(), nullptr) != 1) return std::nullopt;
  return key;
}

std::string hex(const PrefixKey& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string out;
  for (const uint8_t byte : key.bytes) out += {kDigits[byte >> 4], kDigits[byte & 15]};
  return out;
}

}  // namespace pagedkv::engine
